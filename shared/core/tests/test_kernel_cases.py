"""What is to be compiled ahead of time names every argument of its kernel; this runs no kernel and needs no GPU."""

import pytest

pytest.importorskip("triton", reason="the cases are made of Triton's functions")

from separata_core.kernels import attention, vocab


def test_attention() -> None:
    cases = attention.compile_cases()
    assert len({c.name for c in cases}) == len(cases)
    assert {c.signature["query_ptr"] for c in cases} == {"*fp32", "*fp16", "*bf16"}
    assert {c.constexprs["head_width"] for c in cases} == {64, 128}
    for c in cases:
        assert set(c.signature) | set(c.constexprs) == set(c.fn.arg_names)
        assert not set(c.signature) & set(c.constexprs)


def test_vocab() -> None:
    cases = vocab.compile_cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        constants = {name for name, kind in case.signature.items() if kind == "constexpr"}
        assert list(case.signature) == case.fn.arg_names
        assert constants == set(case.constexprs)
    elements = {case.signature["hidden_ptr"] for case in cases}
    assert elements == {"*bf16", "*fp32"}
