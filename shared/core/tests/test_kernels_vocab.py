"""The kernels of the vocabulary statistics: in Triton's interpreter, or on a GPU where there is one."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separata_core import vocab
from separata_core.vocab import vocab_entropy, vocab_log_probs, vocab_statistics
from separata_testing.poison import Guarded
from separata_testing.tensors import LAYOUTS, with_layout
from torch import Tensor

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def problem(tokens: int, entries: int, dim: int, dtype: torch.dtype, *, biased: bool = False) -> dict[str, Any]:
    bias = None
    if biased:
        bias = states(entries, seed=3, dtype=dtype)
        bias[1::5] = -math.inf
    targets = torch.arange(tokens, device=DEVICE) * 5 % entries // 5 * 5  # never a masked entry
    targets[1::4] = -100
    return {
        "hidden": states(tokens, dim, seed=1, dtype=dtype),
        "weight": (states(entries, dim, seed=2) * dim**-0.5 * 2).to(dtype),
        "targets": targets,
        "bias": bias,
    }


def doubled(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}


def results(given: dict[str, Any], backend: Any, **settings: Any) -> dict[str, Tensor]:
    """All three statistics, and the gradients of a function of them."""
    given = dict(given)
    names = [name for name in ("hidden", "weight", "bias") if given[name] is not None]
    for name in names:
        given[name] = given[name].detach().requires_grad_()
    s = vocab_statistics(**given, entropy=True, backend=backend, **settings)
    factors = torch.linspace(-1, 2, len(given["hidden"]), dtype=s.entropy.dtype, device=DEVICE)
    loss = (s.log_probs * factors).sum() + (s.entropy * factors.flip(0)).sum() + s.logsumexp.square().sum() / 9
    grads = torch.autograd.grad(loss, [given[name] for name in names])
    return {"log_probs": s.log_probs, "entropy": s.entropy, "logsumexp": s.logsumexp} | {
        f"gradient of {name}": grad for name, grad in zip(names, grads, strict=True)
    }


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, right in expected.items():
        if name.startswith("gradient"):
            relative = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
            error = (got[name].double() - right).norm()
            assert error <= relative * right.norm() + 1e-7, f"{name}: {error} of {right.norm()}"
        else:
            # Whatever the type of the inputs, their products are exact in float32 and summed in it.
            torch.testing.assert_close(got[name].double(), right, rtol=1e-5, atol=1e-5, msg=name)


class TestAgainstFloat64:
    @settings(max_examples=10)  # the interpreter takes its time
    @given(
        tokens=st.sampled_from([1, 63, 129]),
        entries=st.sampled_from([1, 6, 63, 64, 130]),
        dim=st.sampled_from([1, 31, 33]),
        dtype=st.sampled_from(DTYPES),
        softcap=st.sampled_from([None, 3.0]),
        biased=st.booleans(),
        layout=st.sampled_from(LAYOUTS),
    )
    @pytest.mark.usefixtures("poison")
    def test_odd_shapes_and_layouts(
        self,
        tokens: int,
        entries: int,
        dim: int,
        dtype: torch.dtype,
        softcap: float | None,
        biased: bool,
        layout: str,
    ) -> None:
        given = problem(tokens, entries, dim, dtype, biased=biased)
        expected = results(doubled(given), "reference", logit_softcap=softcap, temperature=0.8)
        given["hidden"] = with_layout(given["hidden"], layout)
        given["weight"] = with_layout(given["weight"], layout)
        assert_same(results(given, "triton", logit_softcap=softcap, temperature=0.8), expected, dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_several_tiles_in_the_backward_pass(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vocab, "TILE_ELEMENTS", 40 * 40)
        monkeypatch.setattr(vocab, "ACCELERATOR_TILE_ELEMENTS", 40 * 40)
        given = problem(50, 90, 20, dtype, biased=True)
        assert_same(results(given, "triton"), results(doubled(given), "reference"), dtype)

    def test_large_logits(self) -> None:
        hidden = torch.tensor([[1e4], [-1e4], [1e4]], device=DEVICE)
        weight = torch.linspace(-1, 1, 70, device=DEVICE)[:, None]
        given = {"hidden": hidden, "weight": weight, "targets": torch.tensor([69, 0, 0], device=DEVICE)}
        got = vocab_statistics(**given, entropy=True, backend="triton")
        right = vocab_statistics(**doubled(given), entropy=True, backend="reference")
        torch.testing.assert_close(got.log_probs.double(), right.log_probs, rtol=1e-5, atol=1e-2)
        torch.testing.assert_close(got.entropy.double(), right.entropy, rtol=0, atol=1e-2)


class TestPieces:
    @pytest.mark.parametrize("parts", [1, 2, 3, 99])
    def test_shares_of_the_vocabulary_join(self, parts: int) -> None:
        from separata_core.kernels import vocab as kernels

        hidden, weight = states(5, 20), states(200, 20, seed=1)
        bias = torch.zeros(200, device=DEVICE)
        bias[:70] = -math.inf  # the first share is empty
        peak, total, weighted, target_logit = kernels.sums(
            hidden, weight, bias, torch.arange(100, 105, device=DEVICE), 1.0, None, entropy=True, parts=parts
        )
        logits = (hidden.double() @ weight.double().T)[:, 70:]
        distribution = torch.distributions.Categorical(logits=logits)
        torch.testing.assert_close((peak + total.log()).double(), logits.logsumexp(1), rtol=1e-5, atol=1e-5)
        entropy = total.log() - weighted / total
        torch.testing.assert_close(entropy.double(), distribution.entropy(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(target_logit.double(), logits[range(5), range(30, 35)], rtol=1e-5, atol=1e-5)

    def test_gradients_stay_inside_their_buffer(self) -> None:
        from separata_core.kernels import vocab as kernels

        out = Guarded(torch.zeros(5, 70, device=DEVICE))
        row = torch.ones(5, device=DEVICE)
        hidden, weight = Guarded(states(5, 20)), Guarded(states(70, 20, seed=1))
        kernels.logit_gradient(
            hidden.tensor,
            weight.tensor,
            None,
            torch.tensor([-70, -1, 0, 69, 70], device=DEVICE),
            1.0,
            None,
            shift=0 * row,
            flat=row,
            entropy=None,
            log_probs=2 * row,
            out=out.tensor,
        )
        out.assert_margins_untouched()
        expected = (hidden.tensor @ weight.tensor.T).exp()
        expected[2, 0] += 2
        expected[3, 69] += 2
        torch.testing.assert_close(out.tensor, expected, rtol=1e-5, atol=1e-5)


class TestRim:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_spoils_its_token_alone(self, bad: float) -> None:
        hidden = torch.ones(3, 2, device=DEVICE)
        hidden[1, 0] = bad
        got = vocab_statistics(
            hidden,
            torch.ones(70, 2, device=DEVICE),
            torch.full((3,), 4, device=DEVICE),
            entropy=True,
            backend="triton",
        )
        assert got.log_probs.isnan().tolist() == got.entropy.isnan().tolist() == [False, True, False]

    def test_nothing_left_of_the_vocabulary_is_nan(self) -> None:
        bias = torch.full((70,), -math.inf, device=DEVICE)
        got = vocab_entropy(states(2, 3), states(70, 3), bias=bias, backend="triton")
        assert got.isnan().all()

    def test_no_tokens(self) -> None:
        hidden, weight = states(0, 3).requires_grad_(), states(7, 3).requires_grad_()
        log_probs = vocab_log_probs(hidden, weight, torch.zeros(0, dtype=torch.long, device=DEVICE), backend="triton")
        log_probs.sum().backward()
        assert log_probs.shape == (0,)
        assert weight.grad.tolist() == [[0.0] * 3] * 7

    @pytest.mark.parametrize(("change", "reason"), [({"top_k": 2}, "no top-k"), ({"dtype": torch.float64}, "float64")])
    def test_what_the_kernel_cannot_do_is_said(self, change: dict[str, Any], reason: str) -> None:
        dtype = change.pop("dtype", torch.float32)
        with pytest.raises(ValueError, match=reason):
            vocab_statistics(states(2, 3, dtype=dtype), states(7, 3, dtype=dtype), backend="triton", **change)

    @pytest.mark.gpu
    def test_auto_takes_the_kernel_on_a_gpu(self) -> None:
        hidden, weight = states(9, 33, dtype=torch.bfloat16), states(500, 33, seed=1, dtype=torch.bfloat16)
        assert torch.equal(vocab_entropy(hidden, weight), vocab_entropy(hidden, weight, backend="triton"))
