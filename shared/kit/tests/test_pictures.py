import os
import sys

import pytest
from separata_kit import pictures
from separata_kit.extras import load

HOW = {"size": (3, 2), "name": "pack", "extra": "pack[plot]"}


def line(axes):
    axes.plot([0, 1], [1, 3], label="a")
    axes.legend()


@pytest.mark.parametrize("ending", [".png", ".SVG"])
def test_the_same_contents_give_the_same_bytes(tmp_path, ending):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    one, two = tmp_path / f"1{ending}", tmp_path / f"2{ending}"
    pictures.draw_on(one, line, **HOW)
    pictures.save_picture(str(two), lambda figure: line(figure.subplots()), **HOW)
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes()[1:4] == (b"PNG" if ending == ".png" else b"?xm")
    assert len(list(tmp_path.iterdir())) == 2


def test_axes_are_drawn_into():
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed").Figure()
    axes = figure.subplots()
    pictures.draw_on(axes, line, **HOW)
    assert len(axes.lines) == 1
    assert "matplotlib.pyplot" not in sys.modules


def test_a_failed_picture_leaves_the_old_one(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "a.png").write_text("old")
    with pytest.raises(ZeroDivisionError):
        pictures.save_picture(tmp_path / "a.png", lambda figure: 1 / 0, **HOW)
    assert (tmp_path / "a.png").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_bad_places(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name in ("a.pdf", "a", ".png"):
        with pytest.raises(ValueError, match=rf"{name} must end in \.png or \.svg"):
            pictures.check_picture(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        pictures.check_picture(tmp_path / "no" / "a.png")
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(OSError, match="is a device"):
        pictures.save_picture(tmp_path / "a.png", print, **HOW)


def test_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    for act in (
        lambda: pictures.check_picture(tmp_path / "a.png", extra="pack[plot]"),
        lambda: pictures.draw_on(tmp_path / "a.png", line, **HOW),
    ):
        with pytest.raises(ImportError, match=r"^pictures need the extra 'plot': pip install 'pack\[plot\]'$"):
            act()
    with pytest.raises(ImportError, match=r"^pictures need matplotlib: pip install matplotlib$"):
        pictures.check_picture(tmp_path / "a.png")


def test_optional_libraries():
    assert load("json.decoder", "this needs") is sys.modules["json.decoder"]
    # A part that an installed library lacks is told as the library's absence is: it is too old.
    with pytest.raises(ImportError, match=r"this needs the extra 'x': pip install 'pack\[x\]'"):
        load("json.nothing", "this needs", "pack[x]")
