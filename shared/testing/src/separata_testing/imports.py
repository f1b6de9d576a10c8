"""Makes modules unimportable, to see what code says when an optional library is missing."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Block(MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def covers(self, fullname: str) -> bool:
        return any(fullname == name or fullname.startswith(name + ".") for name in self.names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuses a blocked module as if it were not installed."""
        if self.covers(fullname):
            raise ModuleNotFoundError(f"No module named {fullname!r} (blocked by a test)", name=fullname)
        return None


@contextmanager
def blocked_imports(*names: str) -> Iterator[None]:
    """Makes `import` of the named modules, and of everything below them, raise ModuleNotFoundError.

    Modules already loaded are hidden meanwhile and come back afterwards, the same objects.

    Args:
        names: Names of modules or packages, such as `"typer"` or `"transformers.models"`.
    """
    block = _Block(names)
    hidden = {name: module for name, module in sys.modules.items() if block.covers(name)}
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, block)
    try:
        yield
    finally:
        sys.meta_path.remove(block)
        for name in [name for name in sys.modules if block.covers(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)
