import io
import tarfile
import zipfile

import pytest
import wheel_check

METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: 1.0
Summary: One line.
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Requires-Dist: torch>=2.10
Requires-Dist: {name}[cli]; extra == 'demo'
Description-Content-Type: text/markdown

# {name}
"""


def wheel_files(name="alpha"):
    return {
        f"{name}/__init__.py": "",
        f"{name}/__main__.py": "def main(): ...",
        f"{name}/py.typed": "",
        f"{name}-1.0.dist-info/METADATA": METADATA.format(name=name),
        f"{name}-1.0.dist-info/RECORD": "",
        f"{name}-1.0.dist-info/licenses/LICENSE": "Apache",
        f"{name}-1.0.dist-info/entry_points.txt": f"[console_scripts]\n{name} = {name}.__main__:main\n",
    }


def sdist_files(name="alpha"):
    files = {"PKG-INFO": "", "README.md": "", "LICENSE": "", "CHANGELOG.md": "", f"src/{name}/py.typed": ""}
    files["pyproject.toml"] = f'[project]\nname = "{name}"\n'
    files["tests/test_it.py"] = ""
    return {f"{name}-1.0/{path}": text for path, text in files.items()}


def write_wheel(folder, files, name="alpha"):
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def write_sdist(folder, files, name="alpha", links=()):
    with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
        for path in links:
            member = tarfile.TarInfo(path)
            member.type = tarfile.SYMTYPE
            member.linkname = "elsewhere"
            archive.addfile(member)


def findings(folder, files=None, source=None):
    write_wheel(folder, wheel_files() if files is None else files)
    write_sdist(folder, sdist_files() if source is None else source)
    return wheel_check.check(folder)[0]


def one(found):
    assert len(found) == 1, found
    return found[0]


def test_sound_distributions_pass(tmp_path, capsys):
    for name in ("alpha", "beta"):
        write_wheel(tmp_path, wheel_files(name), name)
        write_sdist(tmp_path, sdist_files(name), name)
    (tmp_path / ".gitignore").write_text("*")
    assert wheel_check.main([str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert "4 distributions, 0 findings" in output.err


@pytest.mark.parametrize(
    ("path", "finding"),
    [
        ("alpha/py.typed", "alpha/py.typed is missing"),
        ("alpha-1.0.dist-info/licenses/LICENSE", "no licence in dist-info/licenses"),
        ("alpha-1.0.dist-info/METADATA", "no METADATA"),
        ("alpha/__main__.py", "console script 'alpha' starts 'alpha.__main__', which is not in the wheel"),
    ],
)
def test_missing_file(tmp_path, path, finding):
    files = wheel_files()
    del files[path]
    assert one(findings(tmp_path, files)) == f"alpha-1.0-py3-none-any.whl: {finding}"


def test_empty_licence_is_no_licence(tmp_path):
    assert "no licence" in one(findings(tmp_path, wheel_files() | {"alpha-1.0.dist-info/licenses/LICENSE": "\n"}))


@pytest.mark.parametrize(
    ("path", "finding"),
    [
        ("alpha/tests/data.json", "holds a test or benchmark: alpha/tests/data.json"),
        ("alpha/test_it.py", "holds a test or benchmark: alpha/test_it.py"),
        ("alpha/conftest.py", "holds a test or benchmark"),
        ("alpha/benchmarks/x.py", "holds a test or benchmark"),
        ("alpha/bench_speed.py", "holds a test or benchmark"),
        ("alpha/__pycache__/x.cpython-311.pyc", "holds a compiled file"),
        ("alpha/fast.so", "holds a compiled file"),
    ],
)
def test_file_that_does_not_belong(tmp_path, path, finding):
    assert finding in one(findings(tmp_path, wheel_files() | {path: "x"}))


def test_names_that_merely_begin_like_tests_pass(tmp_path):
    assert findings(tmp_path, wheel_files() | {"alpha/testing.py": "", "alpha/benchmark_table.py": ""}) == []


def test_second_top_level_name(tmp_path):
    found = findings(tmp_path, wheel_files() | {"README.md": "x"})
    assert "has 2 top-level names instead of one module: README.md, alpha" in found[0]


def test_path_owned_twice(tmp_path):
    write_wheel(tmp_path, wheel_files("beta") | {"alpha/__init__.py": ""}, "beta")
    write_sdist(tmp_path, sdist_files("beta"), "beta")
    found = findings(tmp_path)
    assert "beta-1.0-py3-none-any.whl: alpha/__init__.py is also in alpha-1.0-py3-none-any.whl" in found


def test_size_budget_and_its_exception(tmp_path):
    files = wheel_files() | {"alpha/words.txt": "x" * 1_100_000}
    assert one(findings(tmp_path, files)).endswith("kB, more than the budget of 1000 kB")
    wider = '[tool.separata]\nwheel-budget-kb = 1200\nwheel-budget-reason = "words"\n'
    assert findings(tmp_path, files, sdist_files() | {"alpha-1.0/pyproject.toml": wider}) == []
    bare = wider.rpartition("wheel-budget-reason")[0]
    assert "1200 without a wheel-budget-reason" in one(
        findings(tmp_path, files, sdist_files() | {"alpha-1.0/pyproject.toml": bare})
    )
    odd = '[tool.separata]\nwheel-budget-kb = "much"\n'
    found = findings(tmp_path, files, sdist_files() | {"alpha-1.0/pyproject.toml": odd})
    assert "alpha-1.0.tar.gz: wheel-budget-kb must be a whole number, it is 'much'" in found


@pytest.mark.parametrize("field", ["Summary", "License-Expression", "Requires-Python", "License-File"])
def test_missing_metadata(tmp_path, field):
    lines = METADATA.format(name="alpha").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith(field))
    found = one(findings(tmp_path, wheel_files() | {"alpha-1.0.dist-info/METADATA": text}))
    assert found.endswith(f"metadata: {field} is missing")


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("Name: alpha", "Name: gamma", "Name 'gamma' is not the file's"),
        ("Version: 1.0", "Version: 1.1", "Version '1.1' is not the file's"),
        ("# alpha", "", "no description"),
        ("text/markdown", "text/x-rst", "Description-Content-Type is 'text/x-rst'"),
        ("torch>=2.10", "torch @ file:///x.whl", "names a place instead of a version"),
        ("torch>=2.10", "torch>>2", "is not valid"),
        ("torch>=2.10", "separata-testing>=0.1,<0.2", "requires separata-testing, which is never published"),
    ],
)
def test_wrong_metadata(tmp_path, old, new, finding):
    text = METADATA.format(name="alpha").replace(old, new)
    assert finding in one(findings(tmp_path, wheel_files() | {"alpha-1.0.dist-info/METADATA": text}))


@pytest.mark.parametrize(
    ("requirement", "sound"),
    [("beta>=0.3,<0.4", True), ("beta~=0.3", True), ("beta==0.3", False), ("beta>=0.3", False), ("beta", False)],
)
def test_own_requirements_are_ranges(tmp_path, requirement, sound):
    write_wheel(tmp_path, wheel_files("beta"), "beta")
    write_sdist(tmp_path, sdist_files("beta"), "beta")
    text = METADATA.format(name="alpha").replace("torch>=2.10", requirement)
    found = findings(tmp_path, wheel_files() | {"alpha-1.0.dist-info/METADATA": text})
    assert (found == []) == sound


def test_console_script_needs_a_function(tmp_path):
    points = "[pytest11]\nx = nowhere\n[console_scripts]\nalpha = alpha.__main__\n"
    found = one(findings(tmp_path, wheel_files() | {"alpha-1.0.dist-info/entry_points.txt": points}))
    assert found.endswith("console script 'alpha' names no function in 'alpha.__main__'")


@pytest.mark.parametrize("path", ["PKG-INFO", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"])
def test_missing_file_of_the_sdist(tmp_path, path):
    source = sdist_files()
    del source[f"alpha-1.0/{path}"]
    assert one(findings(tmp_path, source=source)) == f"alpha-1.0.tar.gz: {path} is missing"


@pytest.mark.parametrize(
    ("path", "finding"),
    [
        ("alpha-1.0/../evil.py", "unpacks outside its own folder"),
        ("other/x.py", "unpacks outside its own folder"),
        ("alpha-1.0/.env", "holds a hidden or derived file"),
        ("alpha-1.0/src/alpha/__pycache__/x.pyc", "holds a hidden or derived file"),
    ],
)
def test_file_that_does_not_belong_into_the_sdist(tmp_path, path, finding):
    assert finding in one(findings(tmp_path, source=sdist_files() | {path: "x"}))


def test_sdist_without_marker_or_with_link(tmp_path):
    source = sdist_files()
    del source["alpha-1.0/src/alpha/py.typed"]
    assert "py.typed is missing" in one(findings(tmp_path, source=source))
    write_sdist(tmp_path, sdist_files(), links=["alpha-1.0/src/link.py"])
    assert "holds a link" in one(wheel_check.check(tmp_path)[0])


def test_wheel_and_sdist_come_together(tmp_path):
    write_wheel(tmp_path, wheel_files())
    write_sdist(tmp_path, sdist_files("beta"), "beta")
    assert wheel_check.check(tmp_path)[0] == [
        "alpha-1.0-py3-none-any.whl: no sdist of the same version beside it",
        "beta-1.0.tar.gz: no wheel of the same version beside it",
    ]


def test_broken_archives_are_findings(tmp_path, capsys):
    (tmp_path / "alpha-1.0-py3-none-any.whl").write_text("no zip")
    (tmp_path / "alpha.whl").write_text("")
    (tmp_path / "alpha-1.0.tar.gz").write_bytes(b"no tar")
    assert wheel_check.main([str(tmp_path)]) == 1
    assert [line.rpartition(": ")[0].partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert len(wheel_check.check(tmp_path)[0]) == 3


def test_wrong_folder_is_wrong_usage(tmp_path, capsys):
    assert wheel_check.main([str(tmp_path / "nowhere")]) == 2
    assert wheel_check.main([str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "is not a folder" in errors[0]
    assert "holds no wheel" in errors[1]
