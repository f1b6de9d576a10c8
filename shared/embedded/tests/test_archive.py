import hashlib
import io
import tarfile
import zipfile

import pytest
from separata_embedded import IntegrityError, archive
from separata_embedded.files import KnownFile

TEXTS = {
    "movie.tsv": "1\t2.5\tA fine clich\u00e9.\r\n2\t-1.25\tNot so fine.".encode(),
    "tweets.tsv": b"1\t0.4\tHello &amp; goodbye",
}


def known(content):
    return KnownFile(len(content), hashlib.sha256(content).hexdigest())


def build(texts):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as tar:
        evil = tarfile.TarInfo("../../evil")
        evil.size = 4
        tar.addfile(evil, io.BytesIO(b"evil"))
        for name, content in texts.items():
            member = tarfile.TarInfo(f"data/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w") as file:
        file.writestr("../evil", "evil")
        file.writestr("inner.tar.gz", inner.getvalue())
        file.writestr("LICENSE.txt", "free")
    return outer.getvalue(), len(inner.getvalue())


@pytest.fixture
def pretend(monkeypatch):
    """A small archive in the place of the real one."""
    content, inner_size = build(TEXTS)
    monkeypatch.setattr(archive, "ARCHIVE", known(content))
    monkeypatch.setattr(archive, "_INNER", "inner.tar.gz")
    monkeypatch.setattr(archive, "_INNER_SIZE", inner_size)
    monkeypatch.setattr(archive, "_LICENCE", "LICENSE.txt")
    monkeypatch.setattr(archive, "_MEMBERS", {name: (f"data/{name}", known(text)) for name, text in TEXTS.items()})
    return content


def test_only_named_members_are_read(pretend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert archive.read_members(pretend) == {**TEXTS, "LICENSE.txt": b"free"}
    assert list(tmp_path.iterdir()) == []
    assert not (tmp_path.parent / "evil").exists()


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: b"", lambda c: c[:100] + b"!" + c[101:]])
def test_a_wrong_archive_is_refused_before_it_is_opened(pretend, change, monkeypatch):
    monkeypatch.setattr(zipfile, "ZipFile", lambda *arguments: pytest.fail("it was opened"))
    wrong = change(pretend)
    with pytest.raises(IntegrityError) as caught:
        archive.read_members(wrong)
    for part in (hashlib.sha256(wrong).hexdigest(), hashlib.sha256(pretend).hexdigest(), "offline=True"):
        assert part in str(caught.value)


def test_a_wrong_member_is_refused(pretend, monkeypatch):
    other, inner_size = build({**TEXTS, "movie.tsv": TEXTS["movie.tsv"] + b"!"})
    monkeypatch.setattr(archive, "ARCHIVE", known(other))
    monkeypatch.setattr(archive, "_INNER_SIZE", inner_size)
    with pytest.raises(IntegrityError, match=r"data/movie\.tsv has"):
        archive.read_members(other)
