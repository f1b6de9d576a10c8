import inspect
import subprocess
import sys
import warnings
from collections.abc import Sequence

import pytest
from separata_embedded import CacheError, FetchError, IntegrityError, RatedText, rated_texts, texts

MEMBERS = {
    # Next line and line separator do not end a line of the file.
    "movie.tsv": "1\t2.5\tA fine clich\u00e9.\r\n2\t-1.25\tNot\u0085so\u2028fine. \r\n1_3\t-.5\tx".encode(),
    "tweets.tsv": b"1\t0.4\tHello",
    "LICENSE.txt": b"free",
}


@pytest.fixture
def index(monkeypatch):
    """Stands in for the package index; `failure` is what it fails with."""

    class Index:
        failure = None
        asked = 0

        def fetch(self, timeout):
            self.asked += 1
            if self.failure:
                raise self.failure
            return b"archive"

    index = Index()
    monkeypatch.delenv("SEPARATA_OFFLINE", raising=False)
    monkeypatch.setattr(texts, "fetch_sdist", index.fetch)
    monkeypatch.setattr(texts, "read_members", lambda content: MEMBERS)
    return index


def test_fetched_once_then_from_the_cache(index, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rated_texts("movie", cache_dir=tmp_path)
        index.failure = FetchError("the network is gone")
        assert rated_texts("movie", cache_dir=tmp_path) == found
        assert rated_texts("movie", cache_dir=tmp_path, offline=True) == found
        assert rated_texts("tweets", cache_dir=tmp_path).texts == (RatedText("1", 0.4, "Hello"),)
    assert index.asked == 1
    assert found.source == "vaderSentiment==0.5"
    assert found.texts == (
        RatedText("1", 2.5, "A fine clich\u00e9."),
        RatedText("2", -1.25, "Not\u0085so\u2028fine."),
        RatedText("1_3", -0.5, "x"),
    )


def test_behaves_as_a_sequence(index, tmp_path):
    found = rated_texts(cache_dir=tmp_path)
    assert isinstance(found, Sequence)
    assert (len(found), found[0], found[-1].id, found[1:]) == (3, found.texts[0], "1_3", found.texts[1:])
    assert list(found) == list(found.texts)
    assert found.texts[1] in found


def test_unreachable_index_falls_back_loudly(index, tmp_path):
    index.failure = FetchError("the network is gone")
    with pytest.warns(UserWarning, match=r"could not be had: the network is gone\. .*built-in"):
        found = rated_texts("movie", cache_dir=tmp_path)
    assert found.source == "built-in"
    index.failure = None
    assert rated_texts("movie", cache_dir=tmp_path).source == "vaderSentiment==0.5"


def test_the_warning_points_at_the_caller(tmp_path):
    code = f"import separata_embedded\n\nseparata_embedded.rated_texts(offline=True, cache_dir={str(tmp_path)!r})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stderr.startswith("<string>:3: UserWarning: The rated texts of vaderSentiment==0.5 could not be had")


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_offline_by_environment(index, tmp_path, monkeypatch, value):
    monkeypatch.setenv("SEPARATA_OFFLINE", value)
    with pytest.warns(UserWarning, match="SEPARATA_OFFLINE"):
        assert rated_texts(cache_dir=tmp_path / "none").source == "built-in"
    assert index.asked == 0
    assert not (tmp_path / "none").exists()
    assert rated_texts(cache_dir=tmp_path, offline=False).source == "vaderSentiment==0.5"


@pytest.mark.parametrize("value", ["", "0", "False", "no", "off"])
def test_not_offline_by_environment(index, tmp_path, monkeypatch, value):
    monkeypatch.setenv("SEPARATA_OFFLINE", value)
    assert rated_texts(cache_dir=tmp_path).source == "vaderSentiment==0.5"


def test_offline_by_argument(index, tmp_path):
    with pytest.warns(UserWarning, match="offline=True"):
        assert rated_texts(cache_dir=tmp_path, offline=True).source == "built-in"
    assert index.asked == 0


def test_a_wrong_file_is_an_error_and_no_reason_to_fall_back(index, tmp_path):
    index.failure = IntegrityError("another file")
    with pytest.raises(IntegrityError, match="another file"):
        rated_texts(cache_dir=tmp_path)


def test_unwritable_cache_is_an_error(index, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="SEPARATA_CACHE"):
        rated_texts(cache_dir=tmp_path / "file")


def test_built_in_set_is_balanced_and_rated(tmp_path):
    with pytest.warns(UserWarning, match="built-in"):
        found = rated_texts(cache_dir=tmp_path, offline=True)
    ratings = [text.rating for text in found]
    assert len(found) >= 120
    assert sum(rating > 0 for rating in ratings) == sum(rating < 0 for rating in ratings) == len(found) / 2
    assert all(-4 <= rating <= 4 for rating in ratings)
    assert len({text.id for text in found}) == len({text.text for text in found}) == len(found)
    # Any even prefix is balanced too, so that a small part of it can be used.
    assert sum(rating > 0 for rating in ratings[:20]) == 10


@pytest.mark.parametrize("name", ["films", "", None, "Movie"])
def test_unknown_name(name):
    with pytest.raises(ValueError, match="name must be one of movie, tweets, amazon, nytimes, got"):
        inspect.unwrap(rated_texts)(name)  # without the tests' own check of annotations


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_unusable_timeout(timeout):
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        rated_texts(timeout=timeout)
