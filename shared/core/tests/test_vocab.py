"""Right values, gradients, memory and behaviour at the rim of the vocabulary statistics."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separata_core import vocab
from separata_core.vocab import VocabStatistics, vocab_entropy, vocab_log_probs, vocab_statistics, vocab_topk
from separata_testing.tensors import LAYOUTS, with_layout
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TILED = pytest.mark.parametrize("backend", ["torch", "reference"])
INF = math.inf


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def head_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and a projection whose logits are exactly these."""
    return logits, torch.eye(logits.shape[1], dtype=logits.dtype)


@pytest.fixture
def tiles_of_64() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab, "TILE_ELEMENTS", 64)
        yield


def assert_near(got: VocabStatistics, expected: VocabStatistics, tolerance: float) -> None:
    for name in ("logsumexp", "log_probs", "entropy", "top_log_probs"):
        ours, right = getattr(got, name), getattr(expected, name)
        torch.testing.assert_close(ours.double(), right.double(), rtol=0, atol=tolerance, equal_nan=True, msg=name)


class TestRightValues:
    @TILED
    def test_two_entries_by_hand(self, backend: Any) -> None:
        hidden, weight = head_of(torch.tensor([[0.0, math.log(3)]], dtype=torch.float64))
        statistics = vocab_statistics(hidden, weight, torch.tensor([1]), entropy=True, top_k=2, backend=backend)
        entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
        assert statistics.logsumexp.item() == pytest.approx(math.log(4))
        assert statistics.log_probs.item() == pytest.approx(math.log(0.75))
        assert statistics.entropy.item() == pytest.approx(entropy)
        assert statistics.top_indices.tolist() == [[1, 0]]
        assert statistics.top_log_probs[0].tolist() == pytest.approx([math.log(0.75), math.log(0.25)])

    @TILED
    def test_temperature_bias_and_softcap_in_this_order(self, backend: Any) -> None:
        hidden, weight = head_of(torch.tensor([[1.0, 2.0, 5.0]], dtype=torch.float64))
        bias = torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64)
        logits = [3 * math.tanh(z / 3) / 0.7 for z in (1.5, 1.5, 5.0)]
        total = sum(math.exp(z) for z in logits)
        log_probs = vocab_log_probs(
            hidden, weight, torch.tensor([2]), bias=bias, temperature=0.7, logit_softcap=3.0, backend=backend
        )
        assert log_probs.item() == pytest.approx(logits[2] - math.log(total))

    @TILED
    @pytest.mark.parametrize("value", [0.0, 1e4, -1e4])
    def test_equal_logits_are_uniform(self, backend: Any, value: float) -> None:
        hidden, weight = torch.full((3, 1), value), torch.ones(77, 1)
        statistics = vocab_statistics(
            hidden, weight, torch.tensor([0, 40, 76]), entropy=True, top_k=77, backend=backend
        )
        torch.testing.assert_close(statistics.log_probs, torch.full((3,), -math.log(77)))
        torch.testing.assert_close(statistics.entropy, torch.full((3,), math.log(77)))
        assert statistics.top_indices.tolist() == [list(range(77))] * 3

    @TILED
    def test_vocabulary_of_one(self, backend: Any) -> None:
        statistics = vocab_statistics(
            states(4, 3), states(1, 3, seed=1), torch.zeros(4, dtype=torch.long), entropy=True, top_k=1, backend=backend
        )
        assert statistics.log_probs.tolist() == statistics.entropy.tolist() == [0.0] * 4
        assert statistics.top_indices.tolist() == [[0]] * 4


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    size = st.sampled_from([1, 2, 3, 7, 8, 9, 17, 33])
    tokens, entries, dim, seed = draw(size), draw(size), draw(st.integers(1, 9)), draw(st.integers(0, 99))
    masked = torch.rand(entries, generator=torch.Generator().manual_seed(seed)) < 0.2
    bias = states(entries, seed=seed + 1).masked_fill(masked, -INF) if draw(st.booleans()) else None
    targets = torch.randint(entries, (tokens,), generator=torch.Generator().manual_seed(seed))
    targets[:: draw(st.integers(2, 4))] = -100
    return {
        "hidden": 2 * states(tokens, dim, seed=seed + 2),
        "weight": states(entries, dim, seed=seed + 3),
        "targets": targets,
        "bias": bias,
        "temperature": draw(st.sampled_from([1.0, 0.6, 2.5])),
        "logit_softcap": draw(st.sampled_from([None, 4.0])),
        "top_k": draw(st.integers(1, entries)),
    }


def cast(problem: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in problem.items()}


class TestAgainstFloat64:
    @settings(max_examples=30, deadline=None)
    @given(problem=problems(), elements=st.sampled_from([1, 5, 64, 4096]), layout=st.sampled_from(LAYOUTS))
    @pytest.mark.usefixtures("poison")
    def test_any_tiles_any_layout(self, problem: dict[str, Any], elements: int, layout: str) -> None:
        expected = vocab_statistics(**problem, entropy=True, backend="reference")
        problem["hidden"] = with_layout(problem["hidden"], layout)
        problem["weight"] = with_layout(problem["weight"], layout)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vocab, "TILE_ELEMENTS", elements)
            got = vocab_statistics(**problem, entropy=True, backend="torch")
        assert_near(got, expected, 1e-11)
        assert torch.equal(got.logsumexp.isfinite(), expected.logsumexp.isfinite())

    @settings(max_examples=20, deadline=None)
    @given(problem=problems())
    def test_float32(self, problem: dict[str, Any]) -> None:
        problem = cast(problem, torch.float32)
        expected = vocab_statistics(**cast(problem, torch.float64), entropy=True, backend="reference")
        scale = logit_scale(problem)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vocab, "TILE_ELEMENTS", 64)
            assert_near(vocab_statistics(**problem, entropy=True), expected, 1e-5 * max(1, scale))

    @settings(max_examples=20, deadline=None)
    @given(problem=problems(), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
    def test_half_precision_errs_by_a_rounding_of_the_logits(self, problem: dict[str, Any], dtype: torch.dtype) -> None:
        problem = cast(problem, dtype)
        expected = vocab_statistics(**cast(problem, torch.float64), entropy=True, backend="reference")
        got = vocab_statistics(**problem, entropy=True, backend="torch")
        assert got.logsumexp.dtype == got.entropy.dtype == got.log_probs.dtype == torch.float32
        scale = logit_scale(problem)
        unit = 2**-9 if dtype == torch.bfloat16 else 1e-6
        # Two roundings differ by at most two units; an entropy weighs its logits' errors by up to log p.
        tolerance = 2.5 * unit * scale + 1e-5 * max(1, scale)
        for name in ("logsumexp", "log_probs", "top_log_probs"):
            torch.testing.assert_close(
                getattr(got, name).double(), getattr(expected, name), rtol=0, atol=tolerance, equal_nan=True
            )
        torch.testing.assert_close(
            got.entropy.double(), expected.entropy, rtol=0, atol=tolerance * max(1, scale), equal_nan=True
        )

    def test_bfloat16_on_logits_of_a_usual_size(self) -> None:
        hidden, weight = states(64, 96, dtype=torch.bfloat16), states(700, 96, seed=1).mul(0.1).bfloat16()
        targets = torch.arange(64)
        expected = vocab_statistics(hidden.double(), weight.double(), targets, entropy=True, backend="reference")
        got = vocab_statistics(hidden, weight, targets, entropy=True)
        torch.testing.assert_close(got.log_probs.double(), expected.log_probs, rtol=0, atol=2e-2)
        torch.testing.assert_close(got.entropy.double(), expected.entropy, rtol=0, atol=2e-2)

    def test_large_logits(self, tiles_of_64: None) -> None:
        logits = states(20, 50, dtype=torch.float32) * 1e4
        logits[:, 0], logits[:, 1] = 1e4, -1e4
        targets = torch.arange(20)
        expected = vocab_statistics(*head_of(logits.double()), targets, entropy=True, top_k=5, backend="reference")
        assert_near(vocab_statistics(*head_of(logits), targets, entropy=True, top_k=5), expected, 1e-5 * 4e4)


def logit_scale(problem: dict[str, Any]) -> float:
    product = problem["hidden"].double() @ problem["weight"].double().T
    if problem["bias"] is not None:
        product = product.abs() + problem["bias"].double().nan_to_num(neginf=0).abs()
    return product.abs().max().item() / min(1.0, problem["temperature"])


class TestGradients:
    @pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.6, None), (1.7, 2.0)])
    @pytest.mark.parametrize("biased", [False, True])
    @TILED
    def test_gradcheck(
        self, tiles_of_64: None, backend: Any, temperature: float, softcap: float | None, biased: bool
    ) -> None:
        targets = torch.tensor([0, -100, 12, 6, 3])

        def function(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
            s = vocab_statistics(
                hidden,
                weight,
                targets,
                entropy=True,
                top_k=3,
                bias=bias,
                temperature=temperature,
                logit_softcap=softcap,
                backend=backend,
            )
            return s.log_probs, s.entropy, s.logsumexp

        inputs = [states(5, 4), states(21, 4, seed=1)] + [states(21, seed=2)] * biased
        assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs])

    @settings(max_examples=20, deadline=None)
    @given(problem=problems(), elements=st.sampled_from([1, 5, 64]))
    def test_masked_entries_and_any_tiles(self, problem: dict[str, Any], elements: int) -> None:
        if problem["bias"] is not None:
            problem["bias"][0] = 0.0  # with everything masked, all is NaN
        problem["targets"] = problem["targets"].where(problem["targets"] == -100, 0)
        expected = gradients(problem, "reference")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vocab, "TILE_ELEMENTS", elements)
            got = gradients(problem, "torch")
        for ours, right in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
    )
    def test_lower_precision(self, tiles_of_64: None, dtype: torch.dtype, tolerance: float) -> None:
        problem = {
            "hidden": states(30, 20, dtype=dtype),
            "weight": states(90, 20, seed=1).mul(0.3).to(dtype),
            "bias": states(90, seed=2, dtype=dtype),
            "targets": torch.arange(30),
            "top_k": 1,
        }
        for ours, right in zip(
            gradients(problem, "torch"), gradients(cast(problem, torch.float64), "reference"), strict=True
        ):
            assert ours.dtype == dtype
            assert (ours.double() - right).norm() <= tolerance * right.norm()

    def test_only_what_is_wanted(self, tiles_of_64: None) -> None:
        hidden, weight, bias = states(9, 6), states(30, 6, seed=1), states(30, seed=2)
        for wanted in ([hidden], [weight], [bias], [hidden, bias]):
            for tensor in (hidden, weight, bias):
                tensor.grad = None
                tensor.requires_grad_(any(tensor is w for w in wanted))
            vocab_entropy(hidden, weight, bias=bias).sum().backward()
            assert [t.grad is not None for t in (hidden, weight, bias)] == [
                any(t is w for w in wanted) for t in (hidden, weight, bias)
            ]

    def test_ignored_tokens_have_none(self) -> None:
        hidden = states(3, 4).requires_grad_()
        vocab_log_probs(hidden, states(5, 4, seed=1), torch.tensor([1, -100, 2])).sum().backward()
        assert hidden.grad[1].tolist() == [0.0] * 4
        assert hidden.grad[0].abs().sum() > 0

    def test_twice_is_refused(self) -> None:
        hidden = states(3, 4).requires_grad_()
        entropy = vocab_entropy(hidden, states(5, 4, seed=1), backend="torch")
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(entropy.sum(), hidden, create_graph=True)

    def test_top_k_has_none(self) -> None:
        log_probs, _ = vocab_topk(states(3, 4).requires_grad_(), states(5, 4, seed=1), 2)
        assert not log_probs.requires_grad


def gradients(problem: dict[str, Any], backend: Any) -> list[Tensor]:
    problem = dict(problem)
    names = [name for name in ("hidden", "weight", "bias") if problem[name] is not None]
    for name in names:
        problem[name] = problem[name].clone().requires_grad_()
    s = vocab_statistics(**problem, entropy=True, backend=backend)
    factors = torch.linspace(-1, 2, len(s.entropy), dtype=s.entropy.dtype)
    loss = (s.log_probs * factors).sum() + (s.entropy * factors.flip(0)).sum() + s.logsumexp.square().sum() / 9
    return list(torch.autograd.grad(loss, [problem[name] for name in names]))


class Operators(TorchDispatchMode):
    """What torch's operators are called and how many elements they return, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            self.names.append(func.overloadpacket.__name__)
            self.sizes.append(tensor.numel() if isinstance(tensor, Tensor) else 0)
        return result

    @property
    def products(self) -> int:
        return sum(name in ("mm", "addmm", "addmm_") for name in self.names)


class TestMemory:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_nothing_is_larger_than_a_tile(self, dtype: torch.dtype) -> None:
        hidden = states(200, 4, dtype=dtype).requires_grad_()
        weight = states(500, 4, seed=1, dtype=dtype).requires_grad_()
        with pytest.MonkeyPatch.context() as patch, Operators() as operators:
            patch.setattr(vocab, "TILE_ELEMENTS", 2500)
            s = vocab_statistics(hidden, weight, torch.arange(200), entropy=True, top_k=3)
            (s.log_probs + s.entropy).sum().backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert max(operators.sizes) <= 2500

    def test_frozen_inputs_cost_no_product(self, tiles_of_64: None) -> None:
        def products(*wanted: bool) -> int:
            inputs = [x.requires_grad_(w) for x, w in zip((states(11, 6), states(41, 6, seed=1)), wanted, strict=True)]
            log_probs = vocab_log_probs(*inputs, torch.arange(11), backend="torch")
            with Operators() as operators:
                log_probs.sum().backward()
            return operators.products

        tiles = 2 * 5  # of 6 tokens by 10 entries
        assert products(True, True) == 3 * tiles
        assert products(True, False) == products(False, True) == 2 * tiles


class TestTopK:
    @settings(max_examples=60, deadline=None)
    @given(
        logits=st.lists(st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0]), min_size=13, max_size=13),
        k=st.integers(1, 13),
        elements=st.sampled_from([1, 30, 169, 4096]),
    )
    def test_ties_go_to_the_lower_index(self, logits: list[float], k: int, elements: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vocab, "TILE_ELEMENTS", elements)
            _, indices = vocab_topk(torch.zeros(2, 1), torch.zeros(13, 1), k, bias=torch.tensor(logits))
        assert indices.tolist() == [sorted(range(13), key=lambda i: (-logits[i], i))[:k]] * 2

    def test_values_are_log_probabilities(self, tiles_of_64: None) -> None:
        hidden, weight = states(9, 5), states(60, 5, seed=1)
        log_probs, indices = vocab_topk(hidden, weight, 4)
        every = torch.log_softmax(hidden @ weight.T, -1)
        torch.testing.assert_close(log_probs, every.topk(4).values)
        torch.testing.assert_close(every.gather(1, indices), log_probs)

    def test_all_of_the_vocabulary(self, tiles_of_64: None) -> None:
        log_probs, indices = vocab_topk(states(3, 5), states(40, 5, seed=1), 40)
        assert indices.sort(dim=1).values.tolist() == [list(range(40))] * 3
        torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(3, dtype=torch.float64))


class TestRim:
    @TILED
    @pytest.mark.parametrize("softcap", [None, 5.0])
    def test_masked_vocabulary(self, backend: Any, softcap: float | None) -> None:
        hidden, weight = states(4, 3), states(10, 3, seed=1)
        bias = torch.zeros(10, dtype=torch.float64)
        bias[[0, 1, 2, 7]] = -INF
        keep = [3, 4, 5, 6, 8, 9]
        got = vocab_statistics(
            hidden, weight, torch.tensor([3, 9, 7, 0]), entropy=True, bias=bias, logit_softcap=softcap, backend=backend
        )
        alone = vocab_statistics(
            hidden, weight[keep], torch.tensor([0, 5, 0, 0]), entropy=True, logit_softcap=softcap, backend=backend
        )
        torch.testing.assert_close(got.entropy, alone.entropy)
        torch.testing.assert_close(got.logsumexp, alone.logsumexp)
        torch.testing.assert_close(got.log_probs[:2], alone.log_probs[:2])
        assert got.log_probs[2:].tolist() == [-INF, -INF]

    @TILED
    def test_nothing_left_of_the_vocabulary_is_nan(self, backend: Any) -> None:
        bias = torch.full((6,), -INF)
        got = vocab_statistics(
            torch.ones(2, 3), torch.ones(6, 3), torch.tensor([0, 1]), entropy=True, bias=bias, backend=backend
        )
        assert got.log_probs.isnan().all()
        assert got.entropy.isnan().all()
        assert got.logsumexp.tolist() == [-INF, -INF]

    @TILED
    @pytest.mark.parametrize("bad", [math.nan, INF])
    def test_what_is_not_finite_spoils_its_token_alone(self, tiles_of_64: None, backend: Any, bad: float) -> None:
        hidden = torch.ones(3, 2)
        hidden[1, 0] = bad
        got = vocab_statistics(
            hidden, torch.ones(50, 2), torch.tensor([4, 4, 4]), entropy=True, top_k=2, backend=backend
        )
        for tensor in (got.log_probs, got.entropy, got.top_log_probs[:, 0]):
            assert tensor.isnan().tolist() == [False, True, False]

    @TILED
    def test_ignored_targets_are_zero(self, backend: Any) -> None:
        got = vocab_log_probs(
            states(3, 2), states(5, 2, seed=1), torch.tensor([-7, 1, -7]), ignore_index=-7, backend=backend
        )
        assert got[0] == got[2] == 0
        assert got[1] < 0

    @TILED
    def test_an_entry_can_be_ignored(self, backend: Any) -> None:
        got = vocab_log_probs(states(2, 2), states(5, 2, seed=1), torch.tensor([0, 1]), ignore_index=0, backend=backend)
        assert got[0] == 0
        assert got[1] < 0

    @TILED
    @pytest.mark.parametrize("leading", [(), (2, 3), (0,), (2, 0), (1, 1, 1)])
    def test_leading_dimensions(self, backend: Any, leading: tuple[int, ...]) -> None:
        hidden = states(*leading, 4).requires_grad_()
        weight = states(6, 4, seed=1).requires_grad_()
        targets = torch.ones(leading, dtype=torch.int32)
        got = vocab_statistics(hidden, weight, targets, entropy=True, top_k=2, backend=backend)
        assert got.log_probs.shape == got.entropy.shape == got.logsumexp.shape == leading
        assert got.top_log_probs.shape == got.top_indices.shape == (*leading, 2)
        (got.log_probs.sum() + got.entropy.sum()).backward()
        assert hidden.grad.shape == hidden.shape
        assert weight.grad.isfinite().all()

    def test_only_what_was_asked_for(self) -> None:
        got = vocab_statistics(states(2, 3), states(4, 3, seed=1))
        assert got.log_probs is got.entropy is got.top_log_probs is got.top_indices is None

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.uint16, torch.uint64])
    def test_targets_of_any_integer_type(self, dtype: torch.dtype) -> None:
        hidden, weight = states(3, 4), states(300, 4, seed=1)
        targets = torch.tensor([0, 100, 7])
        got = vocab_log_probs(hidden, weight, targets.to(dtype))
        assert torch.equal(got, vocab_log_probs(hidden, weight, targets))

    def test_states_without_width(self) -> None:
        got = vocab_statistics(torch.zeros(3, 0), torch.zeros(8, 0), entropy=True)
        torch.testing.assert_close(got.entropy, torch.full((3,), math.log(8)))

    def test_autocast_does_not_apply(self) -> None:
        hidden, weight = states(5, 8, dtype=torch.float32).requires_grad_(), states(9, 8, seed=1, dtype=torch.float32)
        plain = vocab_entropy(hidden, weight)
        (expected,) = torch.autograd.grad(plain.sum(), hidden)
        with torch.autocast("cpu", torch.bfloat16):
            inside = vocab_entropy(hidden, weight)
            reference = vocab_entropy(hidden, weight, backend="reference")
            (got,) = torch.autograd.grad(inside.sum(), hidden)
        assert torch.equal(inside, plain)
        assert torch.equal(got, expected)
        torch.testing.assert_close(reference, plain)


GOOD = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(6, 4), "targets": torch.tensor([0, 1, 5])}
META = {"weight": torch.zeros(6, 4, device="meta"), "targets": None}


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (
                {"targets": torch.tensor([0, 6, 1])},
                ValueError,
                r"targets contains 6; .*0 to 5 or ignore_index \(-100\)",
            ),
            ({"targets": torch.tensor([0, -1, 1])}, ValueError, "targets contains -1"),
            ({"targets": torch.tensor([0, 1])}, ValueError, r"targets must be \[3\]"),
            ({"targets": torch.zeros(3)}, TypeError, "targets must be integers"),
            ({"targets": torch.zeros(3, dtype=torch.bool)}, TypeError, "targets must be integers"),
            ({"targets": torch.zeros(3, dtype=torch.long, device="meta")}, ValueError, "targets is on meta"),
            ({"hidden": torch.zeros(3, 4, dtype=torch.long)}, TypeError, "hidden must be float16, bfloat16"),
            ({"hidden": torch.zeros(3, 4).to(torch.float8_e4m3fn)}, TypeError, "hidden must be .*got torch.float8"),
            ({"hidden": torch.zeros(3, 4, device="meta"), **META}, ValueError, "hidden is on the device meta"),
            ({"weight": torch.zeros(6, 5)}, ValueError, r"weight must be \[vocab, dim\]"),
            ({"weight": torch.zeros(4)}, ValueError, r"weight must be \[vocab, dim\]"),
            ({"weight": torch.zeros(0, 4)}, ValueError, "weight has no rows"),
            (
                {"weight": torch.zeros(6, 4).bfloat16()},
                TypeError,
                "weight has type torch.bfloat16, hidden",
            ),
            ({"bias": torch.zeros(5)}, ValueError, r"bias must be \[6\]"),
            ({"bias": torch.zeros(6).double()}, TypeError, "bias has type"),
            ({"top_k": 7}, ValueError, "k must be at most 6"),
            ({"top_k": -1}, ValueError, "not negative, got -1"),
            ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, got 0.0"),
            ({"temperature": math.nan}, ValueError, "temperature"),
            ({"temperature": INF}, ValueError, "temperature"),
            ({"logit_softcap": 0.0}, ValueError, "logit_softcap must be positive and finite, or None, got 0.0"),
            ({"backend": "fast"}, ValueError, "backend must be \"auto\".*got 'fast'"),
        ],
    )
    def test_refused(self, change: dict[str, Any], error: type[Exception], message: str) -> None:
        # Without the run-time check of annotations, which would be the first to object in a test.
        function: Callable[..., Any] = inspect.unwrap(vocab_statistics)
        with pytest.raises(error, match=message):
            function(**{**GOOD, **change})

    def test_no_entries_wanted(self) -> None:
        with pytest.raises(ValueError, match="k must be at least 1, got 0"):
            vocab_topk(GOOD["hidden"], GOOD["weight"], 0)

    def test_kernel_where_it_cannot_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(ValueError, match='backend="triton" cannot run'):
            vocab_entropy(GOOD["hidden"], GOOD["weight"], backend="triton")
