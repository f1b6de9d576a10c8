"""Watermarks LLM text sentence by sentence, without distortion."""

from pmark.paper import PAPER, Paper

__all__ = ["PAPER", "Paper"]
