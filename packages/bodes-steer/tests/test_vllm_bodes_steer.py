"""A steered vLLM engine writes what the steered model writes in transformers.

Engines take half a minute each to start, so two of them, each run over the same requests, serve all the tests.
"""
# ruff: noqa: N803, N806 -- T is the paper's letter

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from bodes_steer import CAA, ODESteer, steer
from bodes_steer import vllm as serving
from bodes_steer.files import save_steerer

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.real_model, pytest.mark.slow]

KEY = serving._PREFIX
LAYER = 14
LIKED = (
    "What a lovely film, I loved every minute of it.",
    "Great acting, and a wonderful, moving story.",
    "This was the best day of my life!",
    "The food was delicious and the people were kind.",
    "A brilliant book, warm and full of hope.",
    "I am so happy that we came here together.",
)
DISLIKED = (
    "What an awful film, I hated every minute of it.",
    "Bad acting, and a terrible, boring story.",
    "This was the worst day of my life!",
    "The food was disgusting and the people were rude.",
    "A dreadful book, cold and full of hate.",
    "I am so angry that we came here together.",
)
STORY = "Once upon a time there was a fox who lived in a forest near a river, and every day it went to the water. "
PROMPTS = (
    "The capital of France is",
    "Water freezes at",
    "Chapter    10: 1, 2, 3, 4,",
    STORY * 3 + "One day, when it was so cold that the river",
    "When the old man opened the door, he saw",
)
LENGTH = 16
STEP = 32
BLOCK = 32
BLOCKS = 7
"""One is vLLM's own, and the others are one too few for all the prompts with their answers."""


def folder_of(dtype):
    from separata_embedded import smollm2_folder

    return str(smollm2_folder(dtype))


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        yield


class Reference:
    """The model in transformers."""

    def __init__(self):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = folder_of("float32")
        self.model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    @torch.no_grad()
    def activations(self, texts):
        found = []
        handle = self.model.model.layers[LAYER].register_forward_hook(
            lambda block, arguments, output: found.append((output[0] if isinstance(output, tuple) else output)[0, -1])
        )
        for text in texts:
            self.model(**self.tokenizer(text, return_tensors="pt"))
        handle.remove()
        return torch.stack(found)

    def fit(self, steerer):
        return steerer.fit(self.activations(LIKED), self.activations(DISLIKED))

    @torch.no_grad()
    def greedy(self, prompt, steerer, T):
        """Tokens, their log-probabilities, and how far the second best is behind."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        with steer(self.model, steerer, layer=LAYER, T=T):
            answer = self.model.generate(
                **inputs,
                max_new_tokens=LENGTH,
                do_sample=False,
                eos_token_id=None,
                output_scores=True,
                return_dict_in_generate=True,
            )
        best, second = torch.cat(answer.scores).log_softmax(dim=-1).topk(2, dim=-1).values.unbind(dim=-1)
        return answer.sequences[0, inputs["input_ids"].shape[1] :].tolist(), best, (best - second).min()


@pytest.fixture(scope="module")
def reference():
    return Reference()


def answers_of(engine, asked):
    import vllm

    sampling = [
        vllm.SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logprobs=1, extra_args=extra)
        for extra in asked
    ]
    return [
        (
            list(answer.outputs[0].token_ids),
            [
                step[token].logprob
                for token, step in zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True)
            ],
            len(answer.prompt_token_ids),
        )
        for answer in engine.generate(list(PROMPTS), sampling, use_tqdm=False)
    ]


def serve(steerer, path, asked, strengths, **options):
    """What an engine answers to the prompts in one batch, to wrong requests, and to the prompts again."""
    import vllm
    from vllm.exceptions import VLLMValidationError

    save_steerer(steerer, path, layer=LAYER)
    engine = vllm.LLM(
        folder_of("float32"),
        dtype="float32",
        max_model_len=4 * BLOCK,
        num_gpu_blocks_override=BLOCKS,
        max_num_seqs=4,
        max_num_batched_tokens=STEP,
        block_size=BLOCK,
        disable_log_stats=False,
        **serving.engine_arguments(path, **options),
    )
    try:
        answers = answers_of(engine, asked)
        [report] = engine.collective_rpc("steering_report")
        [preemptions] = [m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions"]
        errors = []
        for wrong in ({"T": "much"}, {"T": float("nan")}, {"strength": 1.0}, 5.0):
            try:
                answers_of(engine, [None, {KEY: wrong}, None, None, None])
            except VLLMValidationError as error:
                errors.append(str(error))
        again = answers_of(engine, asked)
    finally:
        # Left to the interpreter's exit, the engine's process would be killed after a wait.
        engine.llm_engine.engine_core.shutdown()
    return SimpleNamespace(
        steerer=steerer,
        strengths=strengths,
        answers=answers,
        again=again,
        report=report,
        preemptions=preemptions,
        errors=errors,
    )


@pytest.fixture(scope="module")
def caa(reference, tmp_path_factory):
    """Every request is steered, unless it says otherwise."""
    path = tmp_path_factory.mktemp("caa") / "steerer.safetensors"
    asked = [None, {KEY: False}, {KEY: {"T": 3.0}}, {KEY: {"T": -2.0}}, {KEY: True}]
    return serve(reference.fit(CAA()), path, asked, [1.5, 0.0, 3.0, -2.0, 1.5], T=1.5)


@pytest.fixture(scope="module")
def ode(reference, tmp_path_factory):
    """No request is steered, unless it says so."""
    path = tmp_path_factory.mktemp("ode") / "steerer.safetensors"
    asked = [{KEY: "on"}, None, {KEY: {"T": 35.0}}, {KEY: "-30"}, {KEY: {"T": 0}}]
    steerer = reference.fit(ODESteer(T=25.0, n_components=1000, random_state=0))
    return serve(steerer, path, asked, [25.0, 0.0, 35.0, -30.0, 0.0], default_on=False)


@pytest.fixture(params=["caa", "ode"])
def served(request):
    return request.getfixturevalue(request.param)


def test_greedy_tokens_are_those_of_transformers(reference, served):
    changed = 0
    for prompt, T, (tokens, log_probs, _) in zip(PROMPTS, served.strengths, served.answers, strict=True):
        expected, best, margin = reference.greedy(prompt, served.steerer, T)
        # No choice is so close that equality would be luck.
        assert margin > 2e-3, (prompt, T)
        assert tokens == expected, (prompt, T)
        torch.testing.assert_close(torch.tensor(log_probs), best, atol=1e-3, rtol=0)
        changed += T != 0 and tokens != reference.greedy(prompt, served.steerer, 0.0)[0]
    assert changed >= 2


def test_a_long_prompt_was_computed_in_chunks(served):
    # No step computes more than STEP tokens, and the last of the prompt is not the last of a step.
    lengths = [length for _, _, length in served.answers]
    assert max(lengths) > 2 * STEP
    assert len(set(lengths)) == len(PROMPTS)


def test_a_sequence_gave_its_blocks_to_another_and_was_computed_again(served):
    assert served.preemptions >= 1
    steered = sum(T != 0 for T in served.strengths)
    assert served.report["steered_tokens"] >= steered * LENGTH


def test_a_wrong_request_fails_alone(served):
    assert len(served.errors) == 4
    assert all(f"extra_args['{KEY}'] is" in error for error in served.errors)
    assert [tokens for tokens, _, _ in served.again] == [tokens for tokens, _, _ in served.answers]


def test_the_engine_reports_what_it_does(caa, ode):
    assert {**caa.report, "steered_tokens": 0} == {
        "method": "caa",
        "layer": LAYER,
        "module": f"model.layers.{LAYER}",
        "T": 1.5,
        "default_on": True,
        "steered_tokens": 0,
    }
    assert ode.report["method"] == "odesteer"
    assert ode.report["T"] == 25.0
    assert not ode.report["default_on"]


def engine_config(**options):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(folder_of("float32"), max_model_len=256, **options).create_engine_config()


@pytest.fixture(scope="module")
def file(reference, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "steerer.safetensors"
    save_steerer(reference.fit(CAA()), path, model=reference.model, layer=LAYER)
    return path


def test_an_engine_that_is_not_covered_is_refused(file):
    from bodes_steer import load_steerer

    steerer = load_steerer(file)
    arguments = serving.engine_arguments(file)
    serving.check_engine(engine_config(**arguments), steerer, LAYER)
    for change, told in (
        ({"enforce_eager": False}, "compilation or CUDA graphs"),
        ({"enable_prefix_caching": True}, "the prefix cache"),
        ({"logits_processors": None}, "does not check its requests"),
    ):
        with pytest.raises(ValueError, match=told):
            serving.check_engine(engine_config(**{**arguments, **change}), steerer, LAYER)
    draft = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with pytest.raises(ValueError, match="speculative decoding"):
        serving.check_engine(engine_config(**arguments, speculative_config=draft), steerer, LAYER)


def test_the_worker_refuses_before_it_loads_anything(file, reference):
    from bodes_steer import load_steerer

    other = load_steerer(file)
    other.origin_ = dataclasses.replace(other.origin_, model_type="qwen2", num_layers=24)
    path = file.with_name("other.safetensors")
    save_steerer(other, path)
    vllm_config = engine_config(**serving.engine_arguments(path))
    assert vllm_config.parallel_config.worker_cls == f"{serving.__name__}.Worker"
    with pytest.raises(ValueError, match=r"another model: model type 'qwen2' .*'llama'.*, layers 24 .*30"):
        serving.Worker(vllm_config, local_rank=0, rank=0, distributed_init_method="")


def test_what_a_server_is_sent_reaches_the_check():
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for sent, strength in (("2.5", 2.5), ("off", 0.0), ("on", 4.0)):
        request = CompletionRequest(prompt="x", vllm_xargs={KEY: sent})
        assert serving.request_strength(request.to_sampling_params(8, {}).extra_args, 4.0) == strength
    # It would arrive as 1.
    request = CompletionRequest(prompt="x", vllm_xargs={KEY: True})
    with pytest.raises(ValueError, match="true or false that a server took for one"):
        serving.request_strength(request.to_sampling_params(8, {}).extra_args, 4.0)


def test_the_second_model_runner_takes_the_check_and_has_what_is_needed():
    """It needs Triton to run, so that here no more can be seen than its parts."""
    import vllm
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors_params_validator

    check = build_custom_logits_processors_params_validator([f"{serving.__name__}:RequestCheck"])
    check(vllm.SamplingParams(extra_args={KEY: {"T": 1.0}}))
    with pytest.raises(VLLMValidationError, match="must be True, False or"):
        check(vllm.SamplingParams(extra_args={KEY: 1.0}))
    assert {"req_ids", "num_computed_tokens_np"} <= {field.name for field in dataclasses.fields(InputBatch)}
    assert "InputBatch" in str(GPUModelRunner.prepare_inputs.__annotations__["return"])
    assert not hasattr(GPUModelRunner, "input_batch")
