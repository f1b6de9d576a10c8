import copy
import hashlib
import hmac
import json
import os
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pmark.key import PMarkKey

SECRET = b"a secret of some length"
KEY = PMarkKey.generate(4, SECRET)
ID = "9d69593618be98f0"
BITS = [[True, False, True, False], [False, True, True, True]]
PIVOTS = [0.0682592216598, 0.0347873264002, -0.0838940751862, -0.0083538054946]


def test_bits_are_the_lowest_of_the_hmac():
    for t, j in [(1, 0), (7, 3), (123456, 2)]:
        digest = hmac.new(SECRET, f"bit|{t}|{j}".encode(), hashlib.sha256).digest()
        assert KEY.bits(1, t)[0, j] == bool(digest[-1] % 2)


def test_rows_depend_on_the_number_of_the_sentence_alone():
    assert (KEY.bits(10)[3:8] == KEY.bits(5, first=4)).all()
    assert KEY.bits(0).shape == (0, 4)
    with pytest.raises(ValueError, match="first=0"):
        KEY.bits(1, 0)


def test_bits_are_fair():
    assert abs(KEY.bits(10_000).mean() - 0.5) < 0.01


@pytest.mark.parametrize("dimension", [4, 384])
def test_pivots_are_orthonormal(dimension):
    pivots = KEY.pivots(dimension)
    np.testing.assert_allclose(pivots @ pivots.T, np.eye(4), atol=1e-12)
    assert pivots is KEY.pivots(dimension)
    assert not pivots.flags.writeable


def test_pivots_stay_what_they_are():
    # Marked text in the world outlives a release: these are the first values that this key ever gave.
    np.testing.assert_allclose(KEY.pivots(384)[:, 0], PIVOTS, atol=1e-12)
    assert KEY.bits(2).tolist() == BITS
    assert KEY.id == ID


def test_pivots_are_the_sign_fixed_factor():
    # A = QR with diag R > 0 has v_j . (column j of A) > 0, and the first pivot is the first column made a unit.
    stream = hashlib.shake_256(hmac.digest(SECRET, b"pivots|16|4", "sha256")).digest(8 * 64)
    uniform = (np.frombuffer(stream, "<u8") // 2**12 + 0.5) / 2**52
    columns = np.array([NormalDist().inv_cdf(each) for each in uniform]).reshape(16, 4).T
    np.testing.assert_allclose(KEY.pivots(16)[0], columns[0] / np.linalg.norm(columns[0]), atol=1e-9)
    assert ((KEY.pivots(16) * columns).sum(1) > 0).all()


@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=16, max_size=40), st.integers(0, 15), st.integers(1, 255))
def test_one_byte_changes_everything(secret, place, by):
    other = bytearray(secret)
    other[place] ^= by
    first, second = (PMarkKey.generate(4, bytes(each)) for each in (secret, other))
    assert first.id != second.id
    # 400 fair coins, five standard deviations; 16 cosines of size 1/sqrt(768), seven.
    assert abs((first.bits(100) != second.bits(100)).mean() - 0.5) < 0.125
    assert np.abs(first.pivots(768) @ second.pivots(768).T).max() < 0.26


def test_flip_probability_of_a_rotation():
    # 200 keys of 64 pivots, with 16 pairs of directions each: 204,800 signs.
    rng = np.random.default_rng(0)
    angles = np.radians([15, 30, 60])
    flips = np.zeros(3)
    for i in range(200):
        pivots = PMarkKey.generate(64, SECRET + bytes([i])).pivots(64)
        start, aside = np.moveaxis(np.linalg.qr(rng.standard_normal((16, 64, 2)))[0], -1, 0)
        a, b = start @ pivots.T, aside @ pivots.T
        rotated = np.cos(angles)[:, None, None] * a + np.sin(angles)[:, None, None] * b
        flips += ((rotated > 0) != (a > 0)).mean((1, 2)) / 200
    np.testing.assert_allclose(flips, [1 / 12, 1 / 6, 1 / 3], atol=0.003)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10))
def test_proxies_move_no_further_than_embeddings(seed, spread):
    rng = np.random.default_rng(seed)
    first = rng.standard_normal(32)
    second = first + spread * rng.standard_normal(32)
    first, second = first / np.linalg.norm(first), second / np.linalg.norm(second)
    moved = KEY.pivots(32) @ (first - second)
    assert (moved**2).sum() <= ((first - second) ** 2).sum() + 1e-12


def test_authors_table(tmp_path):
    table = np.random.default_rng(1).integers(0, 2, 1002).tolist()
    key = PMarkKey.from_authors(table)
    assert (key.bits(3) == np.array(table[4:16]).reshape(3, 4)).all()
    q = np.linalg.qr(np.random.default_rng(42).normal(size=(384, 4)))[0]
    assert (key.pivots(384) == q.T).all()
    assert key.bits(249).shape == (249, 4)
    with pytest.raises(ValueError, match="ends at sentence 249"):
        key.bits(250)
    path = tmp_path / "bits.json"
    path.write_text(json.dumps(table))
    assert PMarkKey.from_authors(path).id == key.id != PMarkKey.from_authors(table, seed=1).id
    for text, message in [
        ("[1, 0", r"bits\.json: not a JSON list"),
        ("[[0, 1], [1, 1]]", "flat"),
        ('{"0": 1}', "flat"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            PMarkKey.from_authors(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1, 2, 1], 2), "zeros and ones"),
        (([0, 1, 1], 2), "at least 4"),
        (([0, 1, 1], 0), "channels=0"),
        (([0, 1, 1], 1, -1), "seed=-1"),
    ],
)
def test_bad_tables(arguments, message):
    with pytest.raises(ValueError, match=message):
        PMarkKey.from_authors(*arguments)


def test_bad_arguments():
    with pytest.raises(ValueError, match="channels=0"):
        PMarkKey.generate(0)
    with pytest.raises(ValueError, match="at least 16") as caught:
        PMarkKey.generate(secret=b"short")
    assert "short" not in str(caught.value)
    with pytest.raises(TypeError, match="bytes"):
        PMarkKey.generate(secret="a secret of some length")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ValueError, match="4 channels, but embeddings of dimension 3"):
        KEY.pivots(3)


def test_keys_are_new_each_time():
    assert PMarkKey.generate().id != PMarkKey.generate().id


def test_nothing_shows_the_secret():
    for text in (repr(KEY), str(KEY), f"{KEY}", KEY.id, repr(copy.deepcopy([KEY]))):
        assert SECRET.decode() not in text
        assert SECRET.hex() not in text
    assert repr(KEY) == f"PMarkKey(id='{KEY.id}', channels=4)"
    assert copy.copy(KEY) is KEY
    assert not hasattr(KEY, "__dict__")
    with pytest.raises(TypeError, match="not pickled"):
        KEY.__reduce_ex__(4)
    with pytest.raises(AttributeError, match="channels cannot be set"):
        KEY.channels = 5


def test_file(tmp_path):
    path = tmp_path / "key.json"
    for key in (KEY, PMarkKey.from_authors([0, 1] * 20, 4, 7)):
        key.save(path, overwrite=True)
        again = PMarkKey.load(path)
        assert again.id == key.id
        assert (again.bits(4) == key.bits(4)).all()
        assert (again.pivots(32) == key.pivots(32)).all()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        KEY.save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["key.json"]


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_permissions(tmp_path):
    path = tmp_path / "key.json"
    before = os.umask(0)
    try:
        KEY.save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.warns(UserWarning, match="others may read"):
        PMarkKey.load(path)


def altered(value):
    return value | {"secret": value["secret"][:-2] + ("00" if value["secret"][-2:] != "00" else "11")}


@pytest.mark.parametrize(
    "change",
    [
        altered,
        lambda value: value | {"channels": 5},
        lambda value: value | {"channels": "4"},
        lambda value: value | {"secret": 4},
        lambda value: value | {"secret": "zz"},
        lambda value: value | {"schema": "other"},
        lambda value: value | {"version": 99},
        lambda value: {name: each for name, each in value.items() if name != "secret"},
        lambda value: {name: each for name, each in value.items() if name != "id"},
        lambda value: value | {"bits": "01x0"},
    ],
)
def test_damaged_files(tmp_path, change):
    path = tmp_path / "key.json"
    KEY.save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=r"key\.json") as caught:
        PMarkKey.load(path)
    assert SECRET.hex()[:8] not in str(caught.value)
    path.write_text(path.read_text()[:40])
    with pytest.raises(ValueError, match=r"key\.json"):
        PMarkKey.load(path)
