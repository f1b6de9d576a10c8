import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from separata_testing.models import tiny_model
from separata_testing.suites import ModelUnchangedAfterExit
from zerotuning import ZeroTuningConfig, apply
from zerotuning.baselines import act, pasta, sink_tokens, spread, temperature

LAYERS, HEADS = 3, 4


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    return tiny_model("llama", attn_implementation=request.param)


@pytest.fixture
def eager():
    return tiny_model("llama", attn_implementation="eager")


def tokens(rows=2, length=10, seed=0):
    return torch.randint(4, 260, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(input_ids=ids, **kwargs).logits


@torch.no_grad()
def attentions(model, ids, **kwargs):
    return model(input_ids=ids, output_attentions=True, **kwargs).attentions


def close(a, b, atol=2e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-4)


def span(ids, first, last):
    marks = torch.zeros(ids.shape, dtype=torch.bool)
    marks[:, first:last] = True
    return marks


class TestPasta:
    def test_weights_outside_the_span_are_multiplied_and_rows_normalised(self, eager):
        ids = tokens()
        plain = attentions(eager, ids)[0]
        with pasta(eager, {0: [1, 3]}, span(ids, 2, 5), alpha=0.1):
            steered = attentions(eager, ids)[0]
        expected = plain.clone()
        outside = torch.ones(10, dtype=torch.bool)
        outside[2:5] = False
        expected[..., outside] *= 0.1
        expected /= expected.sum(-1, keepdim=True)
        close(steered[:, [1, 3]], expected[:, [1, 3]])
        assert torch.equal(steered[:, [0, 2]], plain[:, [0, 2]])

    def test_by_hand(self):
        # Four equal weights, one of them emphasised: 1 / (1 + 3 alpha), and the others alpha times that.
        model = tiny_model("llama", attn_implementation="eager")
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
        ids = tokens(1, 4)
        with pasta(model, {0: None}, span(ids, 1, 2), alpha=0.01):
            last = attentions(model, ids)[0][0, :, -1]
        close(last, torch.tensor([0.01, 1, 0.01, 0.01]).expand(4, -1) / 1.03)

    def test_the_span_itself(self, eager):
        ids = tokens()
        everything_else = ~span(ids, 2, 5)
        with pasta(eager, {0: [1]}, span(ids, 2, 5), 0.3, scale_position="include"):
            included = logits(eager, ids)
        with pasta(eager, {0: [1]}, everything_else, 0.3):
            assert torch.equal(logits(eager, ids), included)

    def test_implementations_agree(self, eager):
        ids = tokens()
        with pasta(eager, {0: [1], 2: None}, span(ids, 2, 5)):
            expected = logits(eager, ids)
        sdpa = tiny_model("llama")
        with pasta(sdpa, {0: [1], 2: None}, span(ids, 2, 5)):
            close(logits(sdpa, ids), expected)
        assert (expected - logits(eager, ids)).abs().max() > 1e-3

    def test_padding_and_decoding(self, model):
        ids = tokens(1, 8)
        padded, mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1), torch.ones(2, 11, dtype=torch.long)
        mask[0, :3] = 0
        both = torch.cat([padded, tokens(1, 11, seed=1)])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        more = tokens(2, 2, seed=2)
        with pasta(model, {0: None, 1: [0]}, span(ids, 3, 5)):
            alone = logits(model, torch.cat([ids, more[:1]], dim=1))
        with pasta(model, {0: None, 1: [0]}, span(both, 6, 8)):
            longer = torch.cat([mask, torch.ones_like(more)], dim=1)
            further = torch.cat([positions, positions[:, -1:] + torch.tensor([[1, 2]])], dim=1)
            whole = logits(model, torch.cat([both, more], dim=1), attention_mask=longer, position_ids=further)
            with torch.no_grad():
                first = model(both, attention_mask=mask, position_ids=positions, use_cache=True)
            parts = [first.logits]
            for at in range(2):
                arguments = {"attention_mask": longer[:, : 12 + at], "position_ids": further[:, 11 + at : 12 + at]}
                parts.append(
                    logits(
                        model, more[:, at : at + 1], past_key_values=first.past_key_values, use_cache=True, **arguments
                    )
                )
        stepwise = torch.cat(parts, dim=1)
        close(whole[0, 3:], alone[0])
        close(stepwise[0, 3:], alone[0])
        close(stepwise[1], whole[1])

    def test_beams_share_the_span_of_their_prompt(self):
        model, ids = tiny_model("llama"), tokens(2, 8)
        marks = torch.stack([span(ids, 2, 4)[0], span(ids, 5, 8)[1]])
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "num_beams": 2, "do_sample": False}
        with pasta(model, {0: None}, marks):
            together = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        for row in range(2):
            with pasta(model, {0: None}, marks[row : row + 1]):
                alone = model.generate(ids[row : row + 1], attention_mask=torch.ones(1, 8, dtype=torch.long), **options)
            assert torch.equal(alone[0], together[row])

    def test_alpha_one_changes_nothing(self, model):
        ids = tokens()
        before = logits(model, ids)
        with pasta(model, {0: None}, span(ids, 2, 5), alpha=1.0):
            close(logits(model, ids), before, atol=1e-6)

    def test_cache_of_another_span_is_refused(self, model):
        ids = tokens()
        with torch.no_grad(), pasta(model, {0: None}, span(ids, 2, 5)):
            cache = model(ids, use_cache=True).past_key_values
        with pasta(model, {0: None}, span(ids, 2, 6)), pytest.raises(ValueError, match="another configuration"):
            logits(model, ids[:, :1], past_key_values=cache)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"heads": {3: [0]}}, "layer 3 does not exist"),
            ({"heads": {True: [0]}}, "layer True does not exist"),
            ({"heads": {0: [4]}}, "head 4 does not exist"),
            ({"alpha": 0.0}, "alpha is 0.0"),
            ({"alpha": math.inf}, "alpha is inf"),
        ],
    )
    def test_bad_input(self, arguments, message):
        model, ids = tiny_model("llama"), tokens()
        arguments = {"heads": {0: [0]}, "emphasized": span(ids, 0, 1), **arguments}
        with pytest.raises(ValueError, match=message), pasta(model, **arguments):
            pass
        assert model.config._attn_implementation == "sdpa"


class TestAct:
    def test_two_steps_by_hand(self):
        # Later rows give token 1 (0.6 + 0.4) / 2 and token 2 0.1; beta takes 0.6 of it for the others.
        rows = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.3, 0.6, 0.1, 0], [0.2, 0.4, 0.1, 0.3]]
        weights = torch.tensor(rows, dtype=torch.float64)[None, None]
        first = torch.tensor([[True, False, False, False]])
        sinks = sink_tokens(weights, 0.1, first)
        assert sinks[0, 0].tolist() == [False, True, False, False]
        result = spread(weights, sinks, 0.4)[0, 0]
        expected = [0.2 * (1 + 0.24 / 0.6), 0.4 * 0.4, 0.1 * (1 + 0.24 / 0.6), 0.3 * (1 + 0.24 / 0.6)]
        assert result[3].tolist() == pytest.approx(expected)
        assert result[0].tolist() == [1, 0, 0, 0]

    @given(st.integers(0, 2**31), st.floats(0, 1))
    def test_rows_keep_their_sum_and_the_others_their_proportions(self, seed, beta):
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(1, 2, 5, 5, generator=generator, dtype=torch.float64).softmax(-1)
        sinks = torch.rand(1, 2, 5, generator=generator) < 0.4
        sinks[..., 0] = False
        result = spread(weights, sinks, beta)
        torch.testing.assert_close(result.sum(-1), weights.sum(-1))
        others = ~sinks[:, :, None].expand_as(weights)
        ratio = (result / weights).masked_fill(~others, 1)
        close(ratio.amax(-1), ratio.masked_fill(~others, math.inf).amin(-1), atol=1e-9)

    def test_row_of_sinks_is_left_alone(self):
        weights = torch.tensor([[[[0.0, 0.5, 0.5]]]])
        assert torch.equal(spread(weights, torch.tensor([[[False, True, True]]]), 0.4), weights)

    def test_padding_rows_do_not_count(self):
        weights = torch.tensor([[[[1.0, 0, 0], [0.2, 0.8, 0], [0.9, 0.05, 0.05]]]])
        first = torch.tensor([[False, False, False]])
        assert sink_tokens(weights, 0.5, first)[0, 0].tolist() == [True, False, False]
        real = torch.tensor([[True, True, False]])
        assert sink_tokens(weights, 0.5, first, real)[0, 0].tolist() == [False, False, False]

    def test_in_the_model(self, eager):
        ids = tokens()
        plain = attentions(eager, ids)
        first = torch.zeros(2, 10, dtype=torch.bool)
        first[:, 0] = True
        with act(eager, {0: [0, 2]}, threshold=0.1, beta=0.4):
            changed = attentions(eager, ids)[0]
        sinks = sink_tokens(plain[0], 0.1, first)
        assert sinks[:, [0, 2]].any()
        expected = spread(plain[0], sinks, 0.4)
        close(changed[:, [0, 2]], expected[:, [0, 2]])
        assert torch.equal(changed[:, [1, 3]], plain[0][:, [1, 3]])
        assert (changed[:, [0, 2]] - plain[0][:, [0, 2]]).abs().max() > 1e-3

    def test_every_layer_equals_loops_written_out(self, eager, monkeypatch):
        import transformers.models.llama.modeling_llama as modeling

        def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
            key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
            length = key.shape[2]
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            weights = (query @ key.transpose(2, 3) * scaling).masked_fill(hidden, -math.inf).softmax(-1)
            for table in weights.flatten(0, 1):
                means = {j: sum(table[j + 1 :, j]) / (length - 1 - j) for j in range(1, length - 1)}
                sinks = [j for j, mean in means.items() if mean > 0.1]
                for row in table:
                    freed = sum(0.6 * row[j] for j in sinks)
                    kept = sum(row[j] for j in range(length) if j not in sinks)
                    if kept > 0:
                        changed = [0.4 * w if j in sinks else w + freed * w / kept for j, w in enumerate(row)]
                        row.copy_(torch.stack(changed))
            return (weights @ value).transpose(1, 2).contiguous(), weights

        ids = tokens()
        plain = logits(eager, ids)
        with act(eager, dict.fromkeys(range(LAYERS))):
            changed = logits(eager, ids)
        monkeypatch.setattr(modeling, "eager_attention_forward", attention)
        close(changed, logits(eager, ids))
        assert (changed - plain).abs().max() > 1e-3

    def test_padding(self, eager):
        ids = tokens(1, 8)
        padded, mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1), torch.ones(2, 11, dtype=torch.long)
        mask[0, :3] = 0
        both = torch.cat([padded, tokens(1, 11, seed=1)])
        with act(eager, {0: None, 1: None}):
            alone = logits(eager, ids)
            together = logits(eager, both, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
        close(together[0, 3:], alone[0])

    def test_sinks_of_the_prompt_stay_while_decoding(self, eager):
        ids, more = tokens(2, 9), tokens(2, 1, seed=1)
        plain = attentions(eager, torch.cat([ids, more], dim=1))[0]
        first = torch.zeros(2, 9, dtype=torch.bool)
        first[:, 0] = True
        with torch.no_grad(), act(eager, {0: None}):
            cache = eager(ids, use_cache=True).past_key_values
            step = eager(more, past_key_values=cache, use_cache=True, output_attentions=True).attentions[0]
        known = torch.nn.functional.pad(sink_tokens(plain[:, :, :9, :9], 0.1, first), (0, 1))
        close(step, spread(plain[:, :, 9:], known, 0.4))

    def test_prompt_that_was_left_is_refused(self, eager):
        ids = tokens()
        with torch.no_grad(), act(eager, {0: None}):
            cache = eager(ids, use_cache=True).past_key_values
            eager(tokens(seed=1), use_cache=True)
            with pytest.raises(ValueError, match="before the one that was run last"):
                eager(ids[:, :1], past_key_values=cache)

    def test_layers_by_default(self):
        deep = tiny_model("llama", attn_implementation="eager", num_hidden_layers=5)
        ids = tokens()
        plain = deep(input_ids=ids, output_hidden_states=True).hidden_states
        with act(deep):
            changed = deep(input_ids=ids, output_hidden_states=True).hidden_states
        # Layers 2 and 3 of 5: what leaves layer 1 is the same, what leaves layer 2 is not.
        assert torch.equal(plain[2], changed[2])
        assert not torch.equal(plain[3], changed[3])

    def test_bad_input(self, eager):
        with (
            pytest.raises(ValueError, match=r"'sdpa' does not give.*attn_implementation=\"eager\""),
            act(tiny_model("llama")),
        ):
            pass
        for arguments, message in (({"beta": 2.0}, "beta is 2.0"), ({"threshold": -0.1}, "threshold is -0.1")):
            with pytest.raises(ValueError, match=message), act(eager, **arguments):
                pass
        with act(eager, {0: None}), pytest.raises(ValueError, match="ACT takes one sequence per row"):
            logits(eager, tokens(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)


class TestTemperature:
    def test_is_a_query_configuration(self):
        model = tiny_model("llama")
        assert temperature(model, 2.0, [1]) == ZeroTuningConfig.uniform(model, 2.0, [1], mode="query")

    def test_sharpens_and_flattens(self, eager):
        ids = tokens()
        plain = attentions(eager, ids)[0]
        with apply(eager, temperature(eager, 2.0)):
            sharp = attentions(eager, ids)[0]
        expected = plain**2
        close(sharp, expected / expected.sum(-1, keepdim=True))


def test_one_at_a_time():
    model, ids = tiny_model("llama"), tokens()
    with (
        apply(model, ZeroTuningConfig.uniform(model, 2.0)),
        pytest.raises(RuntimeError, match="already attached"),
        pasta(model, {0: None}, span(ids, 0, 1)),
    ):
        pass
    assert model.config._attn_implementation == "sdpa"


class TestPastaComesOff(ModelUnchangedAfterExit):
    def context(self, model):
        return pasta(model, {0: [0], 1: None}, torch.eye(2, 4, dtype=torch.bool)[:1])


class TestActComesOff(ModelUnchangedAfterExit):
    def model(self):
        return tiny_model("llama", attn_implementation="eager")

    def context(self, model):
        return act(model, {0: None, 1: None}, threshold=0.0)
