import json
from pathlib import Path

import lock
import pytest

LOCK = """
version = 1
revision = 5

[[package]]
name = "alpha"
version = "1.0"
source = {{ registry = "{host}/simple" }}
dependencies = [{{ name = "beta", source = {{ registry = "{host}/simple" }} }}]
sdist = {{ url = "{host}/aa/alpha-1.0.tar.gz", hash = "sha256:01", size = 7{stamp} }}
wheels = [
    {{ url = "{host}/bb/alpha-1.0%2Bcpu-py3-none-any.whl", hash = "{wheel_hash}", size = 9{stamp} }},
    {{ url = "{host}/cc/alpha-1.0-cp311-none-any.whl", hash = "sha256:03", size = 9{stamp} }},
]

[[package]]
name = "ours"
version = "{ours}"
source = {{ editable = "shared/ours" }}
"""


def lock_text(host="https://one.example", stamp="", wheel_hash="sha256:02", ours="0.1.0"):
    return LOCK.format(host=host, stamp=stamp, wheel_hash=wheel_hash, ours=ours)


def requirement(name, version, *hashes, marker="sys_platform == 'linux'"):
    lines = [f"{name}=={version} ; {marker}", *(f"    --hash=sha256:{value}" for value in hashes)]
    return " \\\n".join(lines) + "\n"


def digest_of(text):
    return lock.digests(lock.normalise(text)).splitlines()[0]


def test_digest_is_the_same_behind_another_mirror():
    other = lock_text(host="http://mirror.example/a/b", stamp=', upload-time = "2026-01-01T00:00:00Z"')
    assert digest_of(lock_text()) == digest_of(other)


def test_digest_keeps_when_one_of_our_own_members_is_released():
    assert digest_of(lock_text()) == digest_of(lock_text(ours="0.2.0"))


@pytest.mark.parametrize(
    ("old", "new"),
    [("sha256:02", "sha256:99"), ('"1.0"', '"1.1"'), ("beta", "gamma"), ("revision = 5", "revision = 6")],
)
def test_digest_changes_with_what_is_installed(old, new):
    text = lock_text()
    assert digest_of(text) != digest_of(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("beta", "gamma", ["alpha 1.0"]),
        ('"1.0"', '"1.1"', ["alpha 1.0", "alpha 1.1"]),
        ("shared/ours", "shared/yours", ["ours"]),
        ("revision = 5", "revision = 6", ["[revision]"]),
        ("beta", "beta", []),
    ],
)
def test_difference_is_named_by_package(old, new, named):
    pinned, fresh = (lock.digests(lock.normalise(text)) for text in (lock_text(), lock_text().replace(old, new, 1)))
    assert lock.compare_digests(pinned, fresh) == [f"{name}: lock entry differs" for name in named]


def test_normalised_lock_names_no_host():
    assert "example" not in json.dumps(lock.normalise(lock_text()))


def test_requirements_differences_are_named_by_package():
    pinned = requirement("alpha", "1.0", "01", "02") + requirement("beta", "2", "03") + requirement("same", "1", "04")
    fresh = requirement("alpha", "1.1", "05") + requirement("beta", "2", "06") + requirement("same", "1", "04")
    fresh += requirement("new", "7", "08")
    assert lock.compare_requirements(pinned, fresh) == [
        "alpha: pinned 1.0, fresh 1.1",
        "beta 2: other hashes",
        "new: pinned absent, fresh 7",
    ]


def test_package_pinned_for_two_pythons_is_compared_as_one():
    old = requirement("numpy", "2.4", "01", marker="python_version < '3.12'")
    new = requirement("numpy", "2.5", "02", marker="python_version >= '3.12'")
    assert lock.compare_requirements(old + new, old) == ["numpy: pinned 2.4, 2.5, fresh 2.4"]
    assert lock.compare_requirements(old, old.replace("3.12", "3.13")) == ["numpy 2.4: other marker"]


@pytest.mark.parametrize("line", ["alpha @ file:///x", "-i https://host.example/simple", "--find-links wheels"])
def test_committed_files_may_not_say_where_to_download(line):
    assert lock.check_committed("requirements.txt", "beta==1\n" + line) == [
        f"requirements.txt:2: names a place to download from: {line}"
    ]


def test_committed_files_may_not_be_large():
    assert "more than 500000" in lock.check_committed("requirements.txt", "a" * 500_001)[0]


@pytest.fixture
def house(tmp_path):
    (tmp_path / "shared/ours").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["shared/*"]\n')
    (tmp_path / "shared/ours/pyproject.toml").write_text('[project]\nname = "ours"\nversion = "0.1.0"\n')
    return tmp_path


@pytest.fixture
def resolved(monkeypatch):
    """Stands in for uv, which needs a registry to resolve."""
    answer = {"lock": lock_text(), "requirements": lock.HEADER + requirement("alpha", "1.0", "01", "02", "03")}
    monkeypatch.setattr(lock, "resolve", lambda root, uv: (answer["lock"], answer["requirements"]))
    monkeypatch.setenv("UV", "uv")
    return answer


def test_written_pins_pass_the_check_and_leave_nothing_else(house, resolved, capsys):
    assert lock.main(["--root", str(house), "--write"]) == 0
    assert sorted(path.name for path in (house / "tools").iterdir()) == ["lock.sha256", "requirements.txt"]
    assert (house / "uv.lock").read_text() == resolved["lock"]
    assert lock.main(["--root", str(house)]) == 0
    assert "agrees" in capsys.readouterr().out


def test_missing_pins_are_findings(house, resolved, capsys):
    assert lock.main(["--root", str(house)]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines() == ["tools/lock.sha256 is missing", "tools/requirements.txt is missing"]
    assert "--write" in output.err


def test_stale_pins_name_the_package_and_leave_the_working_lock_alone(house, resolved, capsys):
    lock.main(["--root", str(house), "--write"])
    before = (house / "uv.lock").read_text()
    resolved["lock"] = resolved["lock"].replace("beta", "gamma")
    capsys.readouterr()
    assert lock.main(["--root", str(house)]) == 1
    out = capsys.readouterr().out
    assert "alpha 1.0: lock entry differs" in out
    assert "ours" not in out
    assert (house / "uv.lock").read_text() == before


def test_refuses_to_write_a_host(house, resolved, capsys):
    resolved["requirements"] += "beta @ https://host.example/beta.whl\n"
    assert lock.main(["--root", str(house), "--write"]) == 1
    assert "names a place to download from" in capsys.readouterr().err
    assert not (house / "uv.lock").exists()


def fake_uv(folder: Path, body: str) -> str:
    path = folder / "uv"
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return str(path)


def test_resolution_sees_the_manifests_alone(house, tmp_path_factory):
    (house / "uv.lock").write_text("stale")
    (house / "shared/ours/code.py").write_text("")
    # `lock` records the files that it sees, `export` prints what `lock` left.
    uv = fake_uv(
        tmp_path_factory.mktemp("bin"),
        'if [ "$1" = lock ]; then seen=$(find . -type f | sort); echo "$seen" >uv.lock; else grep -c . uv.lock; fi\n',
    )
    lock_file, requirements = lock.resolve(house, uv)
    assert lock_file.split() == ["./pyproject.toml", "./shared/ours/pyproject.toml"]
    assert requirements == lock.HEADER + "2\n"


def test_failing_resolver_is_one_line(house, tmp_path_factory, monkeypatch, capsys):
    uv = fake_uv(tmp_path_factory.mktemp("bin"), 'echo "no solution" >&2; echo "because alpha" >&2; exit 1\n')
    monkeypatch.setenv("UV", uv)
    assert lock.main(["--root", str(house)]) == 1
    error = capsys.readouterr().err
    assert "no solution because alpha" in error
    assert error.count("\n") == 1


def test_without_uv_says_how_to_get_it(house, monkeypatch, capsys):
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", "")
    assert lock.main(["--root", str(house)]) == 1
    assert "pip install uv" in capsys.readouterr().err


def test_committed_files_of_this_repository_name_no_host():
    root = Path(lock.__file__).parent.parent
    for path in (lock.DIGEST, lock.REQUIREMENTS):
        assert lock.check_committed(str(path), (root / path).read_text()) == []
