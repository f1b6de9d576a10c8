import datetime
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import catalogue
import pytest
import release as tool
import workspace
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from release import ReleaseError

Git = Callable[..., str]
TODAY = datetime.date(2026, 11, 30)


class Checks:
    """Stands for nox: remembers what it was asked, and what the tree looked like then."""

    def __init__(self, root: Path, passes: bool = True) -> None:
        self.passes = passes
        self.asked: list[str] = []
        self.version = ""

    def __call__(self, root: Path, sessions: Sequence[str]) -> bool:
        self.asked.extend(sessions)
        self.version = next(m.version for m in workspace.Workspace.load(root).members if m.name == "alpha")
        return self.passes


def build(root: Path, name: str, out: Path) -> None:
    member = workspace.Workspace.load(root).member(name)
    stem = f"{member.module}-{member.version}"
    (out / f"{stem}-py3-none-any.whl").write_text("wheel")
    (out / f"{stem}.tar.gz").write_text("sdist")


def no_lock(root: Path) -> None:
    raise AssertionError("nothing is to be locked")


def run(root: Path, *arguments: str, checks: Checks | None = None, **options: Callable[..., None]) -> int:
    return tool.main(
        arguments,
        root=root,
        runner=checks or Checks(root),
        builder=options.get("builder", build),
        relock=options.get("relock", no_lock),
    )


def state(root: Path, git: Git) -> tuple[str, ...]:
    files = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and ".git" not in p.parts)
    return (git(root, "rev-parse", "HEAD"), git(root, "status", "--porcelain"), git(root, "tag"), *files)


def test_a_release(repository: Path, git: Git) -> None:
    checks = Checks(repository)
    _, files = tool.release(repository, "alpha", "0.3.0", today=TODAY, runner=checks, builder=build, relock=no_lock)
    member = repository / "packages/alpha"
    assert (member / "CHANGELOG.md").read_text() == (
        "# Changelog\n\n## Unreleased\n\n## 0.3.0 (2026-11-30)\n\n- Something new.\n"
    )
    assert 'name = "alpha"\nversion = "0.3.0"\n' in (member / "pyproject.toml").read_text()
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "log", "-1", "--format=%s").strip() == "Release alpha 0.3.0"
    assert git(repository, "show", "--stat", "--format=", "--name-only", "HEAD").split() == [
        "README.md",
        "packages/alpha/CHANGELOG.md",
        "packages/alpha/pyproject.toml",
    ]
    # The lint session holds the table in the README against the versions.
    assert catalogue.main(["--check", "--root", str(repository)]) == 0
    assert "| 0.3.0 |" in (repository / "README.md").read_text()
    assert git(repository, "cat-file", "-t", "alpha-v0.3.0").strip() == "tag"
    assert git(repository, "rev-parse", "alpha-v0.3.0^{commit}") == git(repository, "rev-parse", "HEAD")
    assert [path.name for path in files] == ["alpha-0.3.0-py3-none-any.whl", "alpha-0.3.0.tar.gz"]
    assert all(path.parent == repository / "dist" and path.is_file() for path in files)
    assert not list(repository.glob(".release-*"))
    assert checks.version == "0.3.0"
    assert {"lint", "types", "api", "tests(alpha)", "vendor(alpha)", "wheels"} <= set(checks.asked)


def test_the_upload_is_named_and_left_to_you(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(repository, "alpha", "0.3.0") == 0
    assert "uv publish dist/alpha-0.3.0-py3-none-any.whl dist/alpha-0.3.0.tar.gz" in capsys.readouterr().out


def test_the_first_release_may_have_the_version_that_is_there(repository: Path, git: Git) -> None:
    assert run(repository, "alpha", "0.2.0") == 0
    assert git(repository, "tag").split() == ["alpha-v0.2.0"]


def test_a_release_of_the_core_moves_its_range(repository: Path, git: Git) -> None:
    locked = []

    def relock(root: Path) -> None:
        locked.append(root)
        (root / "tools").mkdir()
        (root / "tools/lock.sha256").write_text("new\n")

    work, _ = tool.release(
        repository, "separata-core", "0.4.0", today=TODAY, runner=Checks(repository), builder=build, relock=relock
    )
    assert [member.name for member in work.moved] == ["alpha", "beta"]
    assert "vendor(separata-core)" not in work.sessions
    house = workspace.Workspace.load(repository)
    assert house.member("alpha").dependencies == ("separata-core>=0.4,<0.5", "numpy>=1.26")
    assert house.member("beta").dependencies == ("separata-core>=0.4,<0.5",)
    assert house.member("alpha").version == "0.2.0"
    text = (repository / "packages/beta/CHANGELOG.md").read_text()
    assert text == "# Changelog\n\n## Unreleased\n\n- Something new.\n- Needs `separata-core>=0.4,<0.5`.\n"
    assert locked == [repository]
    assert git(repository, "status", "--porcelain") == ""
    assert "tools/lock.sha256" in git(repository, "show", "--format=", "--name-only", "HEAD").split()


def test_a_release_of_the_core_within_its_range_leaves_the_others_alone(repository: Path, git: Git) -> None:
    assert run(repository, "separata-core", "0.3.2") == 0
    assert len(git(repository, "show", "--format=", "--name-only", "HEAD").split()) == 2


def test_dry_run_changes_nothing(repository: Path, git: Git, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(repository, git)
    checks = Checks(repository)
    assert run(repository, "separata-core", "0.4.0", "--dry-run", checks=checks) == 0
    assert state(repository, git) == before
    assert checks.asked == []
    said = capsys.readouterr().out
    assert "would change packages/beta/pyproject.toml" in said
    assert "would tag    separata-core-v0.4.0" in said


def test_dry_run_names_the_table_in_the_readme(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(repository, "alpha", "0.3.0", "--dry-run") == 0
    assert "would change README.md" in capsys.readouterr().out


def test_a_package_that_the_table_cannot_hold_puts_everything_back(
    repository: Path, git: Git, capsys: pytest.CaptureFixture[str]
) -> None:
    file = repository / "packages/beta/pyproject.toml"
    file.write_text(file.read_text().replace("[tool.separata]", "[tool.other]"))
    git(repository, "commit", "-qam", "untold")
    before = state(repository, git)
    assert run(repository, "alpha", "0.3.0") == 1
    assert capsys.readouterr().err.startswith("error: tools/catalogue.py: packages/beta/pyproject.toml")
    assert state(repository, git) == before


@pytest.mark.parametrize("name", ["tracked", "untracked"])
def test_refuses_a_dirty_tree(repository: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / ("README.md" if name == "tracked" else "new.txt")).write_text("changed\n")
    assert run(repository, "alpha", "0.3.0") == 1
    assert "uncommitted changes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "code", "said"),
    [
        ("0.2.5", 1, "not newer than the last release, 0.10.0"),
        ("0.10.0", 1, "the tag alpha-v0.10.0 exists already"),
        ("0.10.0rc1", 1, "not newer"),
        ("v0.11", 2, "must be written '0.11'"),
        ("0.11", 2, "must have three parts"),
        ("0.11.0-rc.1", 2, "must be written '0.11.0rc1'"),
        ("0.11.0+local", 2, "must be written '0.11.0'"),
        ("next", 2, "not a version by PEP 440"),
    ],
)
def test_refuses_a_version(
    repository: Path, git: Git, version: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    git(repository, "tag", "-a", "alpha-v0.10.0", "-m", "x")
    git(repository, "tag", "-a", "alpha-v0.9.0", "-m", "x")
    git(repository, "tag", "alpha-vnonsense")
    before = state(repository, git)
    assert run(repository, "alpha", version) == code
    assert said in capsys.readouterr().err
    assert state(repository, git) == before


def test_refuses_a_version_older_than_the_one_that_is_there(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(repository, "alpha", "0.1.9") == 1
    assert "older than 0.2.0" in capsys.readouterr().err


def test_unknown_package(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(repository, "alpa", "0.3.0") == 2
    assert capsys.readouterr().err == "error: unknown package 'alpa'; did you mean 'alpha'?\n"
    assert run(repository, "separata-testing", "0.3.0") == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-01-01)\n\n- Old.\n", "nothing stands under"),
        ("# Changelog\n\n## Unreleased\n", "nothing stands under"),
        ("# Changelog\n\n## 0.2.0\n", "no heading"),
    ],
)
def test_refuses_an_empty_changelog(
    repository: Path, git: Git, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "packages/alpha/CHANGELOG.md").write_text(text)
    git(repository, "commit", "-qam", "log")
    assert run(repository, "alpha", "0.3.0") == 1
    message = capsys.readouterr().err
    assert message.startswith("error: packages/alpha/CHANGELOG.md: ")
    assert said in message


def half_build(root: Path, name: str, out: Path) -> None:
    (out / f"{name}-0.3.0-py3-none-any.whl").write_text("wheel")


def broken_build(root: Path, name: str, out: Path) -> None:
    raise ReleaseError("uv build: it broke")


def interrupted(root: Path, name: str, out: Path) -> None:
    raise KeyboardInterrupt


def test_failing_checks_put_everything_back(repository: Path, git: Git, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(repository, git)
    assert run(repository, "alpha", "0.3.0", checks=Checks(repository, passes=False)) == 1
    assert "the checks failed: nox -s lock lint" in capsys.readouterr().err
    assert state(repository, git) == before


@pytest.mark.parametrize("builder", [half_build, broken_build])
def test_a_failing_build_puts_everything_back(
    repository: Path, git: Git, builder: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    before = state(repository, git)
    assert run(repository, "alpha", "0.3.0", builder=builder) == 1
    assert "build" in capsys.readouterr().err
    assert state(repository, git) == before


def test_an_interrupt_puts_everything_back(repository: Path, git: Git) -> None:
    before = state(repository, git)
    with pytest.raises(KeyboardInterrupt):
        run(repository, "alpha", "0.3.0", builder=interrupted)
    assert state(repository, git) == before


def test_a_failing_lock_puts_everything_back(repository: Path, git: Git, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(repository, git)

    def relock(root: Path) -> None:
        (root / "tools").mkdir()
        (root / "tools/lock.sha256").write_text("half\n")
        raise ReleaseError("no index")

    assert run(repository, "separata-core", "0.4.0", relock=relock) == 1
    assert capsys.readouterr().err == "error: no index\n"
    assert state(repository, git) == before


def test_a_failing_commit_puts_everything_back(repository: Path, git: Git) -> None:
    hook = repository / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    before = state(repository, git)
    assert run(repository, "alpha", "0.3.0") == 1
    assert state(repository, git) == before
    assert git(repository, "diff", "--cached", "--name-only") == ""


def test_files_that_cannot_be_moved_put_everything_back(
    repository: Path, git: Git, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "dist/alpha-0.3.0.tar.gz").mkdir(parents=True)
    before = state(repository, git)
    assert run(repository, "alpha", "0.3.0") == 1
    assert "alpha-0.3.0.tar.gz" in capsys.readouterr().err
    assert state(repository, git) == before


def test_a_real_build(repository: Path) -> None:
    out = repository / "out"
    tool.build_distributions(repository, "beta", out)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    assert wheel.name == "beta-0.1.0-py3-none-any.whl"
    assert "beta/__init__.py" in zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        assert "beta-0.1.0/src/beta/__init__.py" in archive.getnames()
    with pytest.raises(ReleaseError, match="uv build: "):
        tool.build_distributions(repository, "nothing", out)


@pytest.mark.parametrize(
    ("version", "inside", "outside"),
    [
        ("0.3.1", ["0.3.0", "0.3.9"], ["0.2.9", "0.4.0", "1.0"]),
        ("1.2.0", ["1.2.0", "1.99"], ["1.1.9", "2.0"]),
        ("0.0.1", ["0.0.1"], ["0.1.0"]),
    ],
)
def test_compatible_range(version: str, inside: list[str], outside: list[str]) -> None:
    allowed = SpecifierSet(tool.compatible_range(Version(version)))
    assert all(other in allowed for other in [version, *inside])
    assert not any(other in allowed for other in outside)


def test_set_range_touches_nothing_else() -> None:
    text = (
        'name = "separata-core-extra"\n'
        "dependencies = [\n"
        '    "numpy>=1.26",  # why\n'
        '    "separata-core>=0.3,<0.4",  # why\n'
        "    \"Separata_Core[triton] >=0.3 ; sys_platform == 'linux'\",\n"
        '    "separata-core-extra>=0.3",\n'
        "]\n"
        '[dependency-groups]\ntest = ["separata-core"]\n'
    )
    assert tool.set_range(text, "separata-core", ">=0.4,<0.5") == (
        'name = "separata-core-extra"\n'
        "dependencies = [\n"
        '    "numpy>=1.26",  # why\n'
        '    "separata-core>=0.4,<0.5",  # why\n'
        "    \"Separata_Core[triton]>=0.4,<0.5 ; sys_platform == 'linux'\",\n"
        '    "separata-core-extra>=0.3",\n'
        "]\n"
        '[dependency-groups]\ntest = ["separata-core"]\n'
    )


def test_set_version_knows_its_table() -> None:
    text = '[tool.x]\nversion = "9"\n\n[project]\nname = "a"\nversion = "1"  # why\n\n[tool.y]\nversion = "8"\n'
    assert tool.set_version(text, "2") == text.replace('"1"', '"2"')
    with pytest.raises(ReleaseError, match="has no version"):
        tool.set_version('[project]\nname = "a"\n\n[tool.y]\nversion = "8"\n', "2")


def test_an_entry_follows_a_sentence_after_a_blank_line() -> None:
    text = "# Changelog\n\n## Unreleased\n\nFirst release.\n\n## 0.1 (2026-01-01)\n\n- Old.\n"
    assert tool.add_entry(text, "More.") == (
        "# Changelog\n\n## Unreleased\n\nFirst release.\n\n- More.\n\n## 0.1 (2026-01-01)\n\n- Old.\n"
    )
    empty = "# Changelog\n\n## Unreleased\n\n## 0.1 (2026-01-01)\n\n- Old.\n"
    assert tool.add_entry(empty, "More.") == (
        "# Changelog\n\n## Unreleased\n\n- More.\n\n## 0.1 (2026-01-01)\n\n- Old.\n"
    )


def test_the_real_house_would_release_with_checks_that_exist() -> None:
    noxfile = (workspace.ROOT / "noxfile.py").read_text()
    for check in tool.PACKAGE_CHECKS:
        assert f"\ndef {check.partition('(')[0]}(session" in noxfile


def test_help_shows_an_example() -> None:
    done = subprocess.run(
        [sys.executable, str(workspace.ROOT / "tools/release.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "python tools/release.py zerotuning 0.2.0" in done.stdout
