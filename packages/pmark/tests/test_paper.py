"""The paper is named, and cannot be changed by accident."""

import dataclasses

import pytest
from pmark import PAPER, Paper


def test_paper_can_be_found():
    assert PAPER.title
    assert PAPER.url.startswith("https://")


def test_paper_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PAPER.title = "Another"
    assert Paper("A", "https://b.example") == Paper("A", "https://b.example")
