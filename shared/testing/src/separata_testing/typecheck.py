"""Checks annotations while the tests run: jaxtyping's shapes by beartype, through an import hook."""

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# An int is fine where a float is asked for, as it is for a static checker.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"

_OURS = "separata-"
_NOT_UNDER_TEST = {"separata-testing"}


def default_modules() -> list[str]:
    """Names the top modules of the installed distributions that belong to this repository.

    These are the distributions named `separata-...`, those that depend on one, and those with the keyword `separata`.
    The module is named after the distribution, which is a rule of the repository, so that editable installs, which
    list no files, are found too.

    Returns:
        Module names, sorted.
    """
    found = set()
    for distribution in importlib.metadata.distributions():
        name = str(distribution.name)  # None for what is left of a broken uninstall
        if name in _NOT_UNDER_TEST:
            continue
        needed = distribution.requires or []
        keywords = re.split(r"[,\s]+", " ".join(distribution.metadata.get_all("Keywords") or []))
        if name.startswith(_OURS) or "separata" in keywords or any(need.startswith(_OURS) for need in needed):
            found.add(name.replace("-", "_"))
    return sorted(found)


class _LeaveKernelsAlone(MetaPathFinder):
    """Finds modules inside a package `kernels` the plain way, before the checking hook sees them.

    Triton reads the source of a kernel and looks names up in its module, both of which wrapped functions break.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds the module's spec, or none where the module is not a kernel under test."""
        inside = any(fullname.startswith(module + ".") for module in self.modules)
        if inside and "kernels" in fullname.split("."):
            return PathFinder.find_spec(fullname, path, target)
        return None


class TypecheckHook:
    """The installed hook.

    Attributes:
        modules: Names of the modules whose annotations are checked, each with everything below it.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        """Installs the hook.

        Args:
            modules: Names of modules or packages. None may have been imported yet.

        Raises:
            RuntimeError: One of the modules is already imported, so that it would go unchecked.
        """
        from jaxtyping import install_import_hook

        self.modules = tuple(modules)
        late = [name for name in self.modules if name in sys.modules]
        if late:
            raise RuntimeError(
                f"modules {late} were imported before the annotation check was installed; "
                "import them in a conftest or a test, not in a plugin, or pass --typecheck=none"
            )
        self._hook = install_import_hook(list(self.modules), CHECKER)
        self._exception = _LeaveKernelsAlone(self.modules)
        sys.meta_path.insert(0, self._exception)

    def uninstall(self) -> None:
        """Takes the hook away; modules already imported stay checked."""
        self._hook.uninstall()
        if self._exception in sys.meta_path:
            sys.meta_path.remove(self._exception)
