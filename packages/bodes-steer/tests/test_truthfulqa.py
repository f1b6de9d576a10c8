import csv
import json
import math

import pytest
import torch
from bodes_steer.baselines import CAA
from bodes_steer.model import SteeredModel
from bodes_steer.steerers import ODESteer
from bodes_steer.truthfulqa import (
    AnswerScorer,
    Condition,
    Question,
    TruthfulQA,
    _Journal,
    evaluate_truthfulqa,
    read_truthfulqa,
    split_answers,
    two_halves,
)
from hypothesis import given
from hypothesis import strategies as st
from separata_testing.models import HIDDEN, tiny_model, tiny_tokenizer
from transformers import Lfm2Config, Lfm2ForCausalLM

COLUMNS = ["Type", "Category", "Question", "Best Answer", "Correct Answers", "Incorrect Answers", "Source"]
LAYER = 1


def write(path, *rows, columns=COLUMNS):
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(
            dict(zip(("Question", "Best Answer", "Correct Answers", "Incorrect Answers"), row, strict=True))
            for row in rows
        )
    return path


def test_answers_are_separated_and_each_counts_once(tmp_path):
    assert split_answers(" No;  no. ; No one;; NO ;\nNo\tone.") == ["No", "No one"]
    path = write(
        tmp_path / "q.csv",
        # "Unknown" is both; the best answer is both, too, and stays.
        ("Q1?", "Maybe.", "Yes; maybe; Unknown", "No; Unknown.; Maybe"),
        ("Q2, is it?", "Best", "Good; Better", "Bad"),
    )
    first, second = read_truthfulqa(path)
    assert first == Question("Q1?", ("Yes", "maybe"), ("No",), 1)
    assert first.prompt == "Q: Q1?\nA:"
    assert second == Question("Q2, is it?", ("Best", "Good", "Better"), ("Bad",), 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("Q?", "", "a", "b")], "line 2: Best Answer is empty"),
        ([("", "a", "a", "b")], "line 2: Question is empty"),
        ([("Q?", "a", "a", "b"), ("Q?", "c", "c", "d")], "line 3: the question of line 2 is there again"),
        ([("Q?", "a", "a; b", "b")], "has no incorrect answer"),
        ([], "holds no questions"),
    ],
)
def test_a_file_that_lacks_something_is_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        read_truthfulqa(write(tmp_path / "q.csv", *rows))


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text("Question,Answer\nQ?,a\n")
    with pytest.raises(ValueError, match="column Best Answer, Correct Answers, Incorrect Answers is missing"):
        read_truthfulqa(path)


@pytest.mark.parametrize("content", [b"Q?,b\xe9,a,c\n", b'Q?,best,"a; b,wrong\nand so on'])
def test_a_file_in_another_encoding_or_cut_off_is_refused(tmp_path, content):
    path = tmp_path / "q.csv"
    path.write_bytes(b"Question,Best Answer,Correct Answers,Incorrect Answers\n" + content)
    with pytest.raises(ValueError, match=r"q\.csv is no csv file in UTF-8, or was cut off"):
        read_truthfulqa(path)


def test_mc1_is_the_best_answers_and_mc2_the_share_of_all_correct_ones():
    question = Question("Q?", ("fair", "best"), ("wrong", "worse"), 1)
    # A correct answer above all does not help the best one.
    mc1, mc2 = question.scores([math.log(0.4), math.log(0.1), math.log(0.3), math.log(0.2)])
    assert (mc1, mc2) == (0.0, pytest.approx(0.5))
    mc1, mc2 = question.scores([-1000.0, -999.0, -1000.0, -1000.0])
    assert (mc1, mc2) == (1.0, pytest.approx((math.e + 1) / (math.e + 3)))
    assert question.scores([-9.0, -2.0, -2.0, -3.0])[0] == 0.0  # a tie is not larger
    for values in ([0.0, 0.0], [0.0, 0.0, 0.0, -math.inf]):
        with pytest.raises(ValueError, match="has 4 answers, and each needs a finite one"):
            question.scores(values)


@given(st.lists(st.floats(-50.0, 0.0), min_size=4, max_size=4), st.floats(-500.0, 500.0))
def test_scores_see_differences_of_likelihoods_only(values, shift):
    question = Question("Q?", ("fair", "best"), ("wrong", "worse"), 1)
    _, mc2 = question.scores(values)
    assert question.scores([value + shift for value in values])[1] == pytest.approx(mc2, abs=1e-9)
    turned = Question("Q?", ("wrong", "worse"), ("fair", "best"), 1)
    assert turned.scores(values[2:] + values[:2])[1] == pytest.approx(1 - mc2)


def test_halves_are_drawn_by_seed_and_share_nothing():
    first, second = two_halves(11)
    assert (len(first), len(second)) == (5, 6)
    assert sorted(first + second) == list(range(11))
    assert two_halves(11) == (first, second)
    assert two_halves(11, seed=1) != (first, second)


ANSWERS = (("it is so", "yes"), ("never", "no, it is not so at all", "x"))


def questions(count):
    return [
        Question(f"is {number} {'odd' * (number % 3)}?", (f"{number}", *ANSWERS[0]), ANSWERS[1], number % 3)
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def steerers():
    generator = torch.Generator().manual_seed(0)
    pos, neg = torch.randn(40, HIDDEN, generator=generator) + 0.5, torch.randn(40, HIDDEN, generator=generator)
    ode = ODESteer(n_components=128, C=100.0, random_state=0).fit(pos, neg)
    return [(CAA().fit(pos, neg), 1.0), (ode, 2.0), (ode, -3.0)]


def hybrid():
    sizes = {"vocab_size": 272, "hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    kinds = ["full_attention", "conv", "full_attention"]
    torch.manual_seed(0)
    return Lfm2ForCausalLM(Lfm2Config(**sizes, **heads, layer_types=kinds, pad_token_id=0)).eval()


# Separate position embeddings; windows shorter than a prompt, and capped logits; a convolution that remembers prompts
# in another way than by keys and values, so that there are no shortcuts.
@pytest.mark.parametrize(
    ("architecture", "shortcuts"),
    [("llama", None), ("llama", False), ("gpt2", None), ("gemma2", None), ("gpt_neox", None), ("hybrid", None)],
)
def test_shared_prompts_and_lower_blocks_change_no_score(architecture, shortcuts, steerers):
    model = hybrid() if architecture == "hybrid" else tiny_model(architecture)
    tokenizer = tiny_tokenizer()
    asked = questions(2)
    scorer = AnswerScorer(model, tokenizer, asked, LAYER, batch_rows=4, shortcuts=shortcuts)
    model.train()
    plain = [scorer.plain(place) for place in range(2)]
    steered = [scorer.steered(place, steerers) for place in range(2)]
    assert model.training
    model.eval()
    assert scorer.shortcuts is (architecture != "hybrid" and shortcuts is None)
    # Here, as some releases leave one of their own where hidden states are asked for.
    assert not any("forward" in block.__dict__ for block in model.modules())
    for question, (log_likelihoods, states), rows in zip(asked, plain, steered, strict=True):
        answers = [f" {answer}" for answer in question.answers]
        for (steerer, strength), found in zip(
            [(steerers[0][0], 0.0), *steerers], [log_likelihoods, *rows], strict=True
        ):
            whole = SteeredModel(model, tokenizer, steerer, layer=LAYER, T=strength)
            assert found == pytest.approx(whole.score(question.prompt, answers), abs=2e-3)
        assert rows[0] != pytest.approx(log_likelihoods, abs=0.05)
        ids = tokenizer(question.prompt + answers[-1], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states[LAYER + 1]
        torch.testing.assert_close(states[-1], hidden[0, -1], atol=1e-4, rtol=1e-4)


def test_a_question_can_be_steered_first_and_prompts_may_have_one_token(steerers):
    model = tiny_model()

    def one_token(text):
        return {"input_ids": [7, *text[len(questions(1)[0].prompt) :].encode()]}

    one_token.eos_token_id = None
    tokenizer = type("Short", (), {"eos_token_id": None, "__call__": lambda self, text: one_token(text)})()
    scorer = AnswerScorer(model, tokenizer, questions(1), LAYER)
    [found] = scorer.steered(0, steerers[:1])
    assert scorer.shortcuts
    expected = AnswerScorer(model, tokenizer, questions(1), LAYER, shortcuts=False).steered(0, steerers[:1])[0]
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_model_whose_logits_are_made_in_another_way_is_refused():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, args, output: output.flip(-1))
    with pytest.raises(ValueError, match="answers cannot be scored"):
        AnswerScorer(model, tiny_tokenizer(), questions(1), LAYER).plain(0)


def test_a_scorer_refuses_what_does_not_fit():
    for options, message in [
        ({"layer": 3}, "layer is 3; the model has blocks 0 to 2"),
        ({"layer": 1, "batch_rows": 0}, "batch_rows is 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            AnswerScorer(tiny_model(), tiny_tokenizer(), questions(1), **options)
    with pytest.raises(ValueError, match="questions is empty"):
        AnswerScorer(tiny_model(), tiny_tokenizer(), [], 1)


SETTINGS = {
    "methods": ("caa", "odesteer", "linact"),
    "params": {"odesteer": {"n_components": 64, "C": 100.0}},
    "strengths": (0.3, 0.1),
    "progress": False,
    "resamples": 50,
}


def evaluate(asked, **options):
    return evaluate_truthfulqa(tiny_model(), tiny_tokenizer(), asked, **{**SETTINGS, **options})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "scores.jsonl"
    return evaluate(questions(9), journal=path), path.read_bytes()


def test_every_question_is_scored_under_a_strength_chosen_elsewhere(finished):
    found, journal = finished
    assert found.layer == 1
    assert [each.method for each in found.conditions] == ["vanilla", *SETTINGS["methods"]]
    assert {len(each.mc1) for each in found.conditions} == {9}
    records = [json.loads(line) for line in journal.splitlines()[1:]]
    for fold, scoring in enumerate(two_halves(9)):
        stages = {
            stage: {each["question"] for each in records if each["stage"] == f"{stage} {fold}"}
            for stage in ("choose", "score")
        }
        assert stages["score"] == set(scoring)
        assert not stages["choose"] & set(scoring)
        for condition in found.conditions[1:]:
            chosen = condition.folds[fold]
            assert chosen.choice[chosen.share] == max(chosen.choice.values())
            assert sorted(chosen.choice) == [0.1, 0.3]
    assert found["linact"].folds[0].T in (0.1, 0.3)
    with pytest.raises(KeyError):
        found["repe"]


def test_what_is_scored_does_not_touch_what_is_chosen(finished):
    asked = questions(9)
    for place in two_halves(9)[0]:
        asked[place] = Question(f"why {place}?", ("because",), ("no reason", "none"), 0)
    found, _ = finished
    other = evaluate(asked)
    for method in SETTINGS["methods"]:
        before, after = found[method].folds[0], other[method].folds[0]
        assert after.share == before.share
        assert abs(after.T - before.T) < 1e-5 * before.T
        assert after.choice == pytest.approx(before.choice, abs=1e-5)
        # The other fold was fitted on them.
        assert other[method].folds[1].choice != pytest.approx(found[method].folds[1].choice, abs=1e-5)


def test_a_run_that_was_cut_off_continues(finished, tmp_path):
    found, journal = finished
    ends = [place + 1 for place, byte in enumerate(journal) if byte == ord("\n")]
    path = tmp_path / "scores.jsonl"
    path.write_bytes(journal[: ends[12] + 7])
    assert evaluate(questions(9), journal=path) == found
    assert path.read_bytes() == journal


def test_a_first_line_that_was_cut_off_is_written_again(tmp_path):
    path = tmp_path / "scores.jsonl"
    for content in (b"", b'{"schema":"bodes'):
        path.write_bytes(content)
        with _Journal(path, {"seed": 1}):
            pass
        assert json.loads(path.read_bytes())["seed"] == 1


def test_a_journal_of_something_else_is_left_alone(finished, tmp_path):
    _, journal = finished
    path = tmp_path / "scores.jsonl"
    first = journal.splitlines(keepends=True)[0]
    for content, message in [
        (b"my diary", "no journal of TruthfulQA scores"),
        (b'{"my": "diary"}\n', "no journal of TruthfulQA scores"),
        (b"my diary\n", "no journal of TruthfulQA scores"),
        (first + b'{"stage": 1}\n', "line 2, is damaged"),
        (first + b'{"stage":"choose 0","question":0,"log_likelihoods":[1]}\n', "line 2, is damaged"),
        (first + journal.splitlines(keepends=True)[1].replace(b"[[", b"[[0.5,"), "was altered"),
        (first.replace(b'"seed":42', b'"seed":43'), r"another run \(different seed\)"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            evaluate(questions(9), journal=path)
        assert path.read_bytes() == content


def test_two_runs_at_once_do_not_share_a_journal(finished, tmp_path):
    pytest.importorskip("fcntl", reason="Windows has no such locks")
    path = tmp_path / "scores.jsonl"
    path.write_bytes(finished[1])
    with _Journal(path, json.loads(finished[1].splitlines()[0])):
        with pytest.raises(OSError, match=r"scores\.jsonl is in use by another run"):
            evaluate(questions(9), journal=path)
        assert path.read_bytes() == finished[1]
    assert evaluate(questions(9), journal=path) == finished[0]


def test_an_evaluation_refuses_what_does_not_fit():
    for options, message in [
        ({"strengths": ()}, "strengths is"),
        ({"strengths": (0.1, 0.0)}, "strengths is"),
        ({"strengths": (0.1, math.nan)}, "strengths is"),
        ({"resamples": 0}, "resamples is 0"),
        ({"params": {"odestear": {}, "caa": {}}}, r"params holds \['odestear'\]; the methods are"),
        ({"methods": ("caa", "caa")}, "each once"),
        ({"methods": ()}, "methods is"),
        ({"methods": ("best",)}, "best"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate(questions(9), **options)
    with pytest.raises(ValueError, match="7 questions"):
        evaluate(questions(7))


def test_the_table_and_json_show_paired_differences(finished):
    plain = Condition("vanilla", (0.0, 1.0), (0.25, 0.5))
    better = Condition("caa", (1.0, 1.0), (0.5, 0.75))
    best = Condition("odesteer", (1.0, 1.0), (0.75, 1.0))
    found = TruthfulQA(1, (plain, better, best), 100, 0)
    lines = found.table().splitlines()
    assert lines[2] == "| vanilla |  | 50.0 |  | 37.5 |  |"
    assert lines[4].startswith("| odesteer |  | 100.0 | +50.0 [")
    assert lines[4].endswith("| 87.5 | +50.0 [+50.0, +50.0] |")
    assert lines[5] == "| odesteer - caa |  |  | +0.0 [+0.0, +0.0] |  | +25.0 [+25.0, +25.0] |"
    record = json.loads(json.dumps(finished[0].to_json()))
    assert record["questions"] == 9
    assert {(each["baseline"], each["method"]) for each in record["comparisons"]} == {
        *(("vanilla", method) for method in SETTINGS["methods"]),
        ("caa", "linact"),
        ("odesteer", "linact"),
    }
