"""A tiny model with words for tokens, and a task whose labels it answers by chance."""

import json
import shutil

import torch
from separata_testing.models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from zerotuning import Example, TaskSpec, ZeroTuningConfig
from zerotuning.scoring import Predictions

WORDS = [f"w{index}" for index in range(200)]
TASK = TaskSpec("tiny", "one two three four five six seven eight nine {text} Answer:", ("yes", "no"))


def word_tokenizer() -> PreTrainedTokenizerFast:
    known = [
        "<pad>",
        "<bos>",
        "<eos>",
        "<unk>",
        "yes",
        "no",
        "negative",
        "positive",
        "Answer:",
        *TASK.template.split()[:9],
        *WORDS,
    ]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(known)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")


def examples(count: int = 24, seed: int = 0) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = int(torch.randint(1, 9, (), generator=generator))
        words = torch.randint(0, len(WORDS), (length,), generator=generator).tolist()
        made.append(Example(" ".join(WORDS[word] for word in words), index % 2))
    return made


def answers(parsed, constrained=None, labels=2):
    """Answers made up: what was read, and what was likeliest; the same where it is not given."""
    constrained = parsed if constrained is None else constrained
    rows = tuple(tuple(-1.0 if label == each else -3.0 for label in range(labels)) for each in constrained)
    return Predictions(tuple(parsed), rows, (1.0,) * len(parsed))


def talkative_model(architecture: str = "llama"):
    """A random model that often says one of the two label words, for no reason."""
    model = tiny_model(architecture)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        # Among the other words nothing is likely.
        head[6:] *= 0.02
    return model


def sink_model(lines, text):
    """A model whose answers depend on nothing but the weight `s` that the last token gives to the first one.

    Attention is uniform, so of the 13 tokens of a prompt the first has `s = gamma / (gamma + 12)`. `lines` gives the
    logit of words as `at_0 + slope * s`. A text of three "w0" adds `text * (1 - s)` to the logit of "yes" and takes it
    from that of "no", three "w1" the other way round.
    """
    size, width = 8, 10.0
    config = LlamaConfig(
        vocab_size=len(word_tokenizer()),
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    # What is asked is on axis 0 and hardly changes the norm; the first token is on axis 1, texts are on axis 2.
    embedding, head = torch.zeros(config.vocab_size, size), torch.full((config.vocab_size, size), 0.0)
    embedding[:, 0] = width
    first, yes_text, no_text = word_tokenizer().convert_tokens_to_ids(["one", "w0", "w1"])
    for token, axis, sign in ((first, 1, 1), (yes_text, 2, 1), (no_text, 2, -1)):
        embedding[token] = sign * width * torch.eye(size)[axis]
    head[:, 0] = -20 / size**0.5
    for word, (at_0, slope) in lines.items():
        token = word_tokenizer().convert_tokens_to_ids(word)
        head[token, :2] = torch.tensor([at_0, slope * width]) / size**0.5
        head[token, 2] = {"yes": 4, "no": -4}.get(word, 0) * text * width / size**0.5
    layer = model.model.layers[0]
    with torch.no_grad():
        for weight in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.down_proj):
            weight.weight.zero_()
        # After the norm an axis is sqrt(size) long.
        layer.self_attn.v_proj.weight.copy_(torch.diag(torch.tensor([0.0, 1, 1, 0, 0, 0, 0, 0])) / size**0.5)
        layer.self_attn.o_proj.weight.copy_(torch.eye(size))
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
    return model


def write_files(place):
    """What the command line needs: a model, a damaged copy of it, labelled texts and a configuration."""
    model = talkative_model()
    model.save_pretrained(place / "model")
    word_tokenizer().save_pretrained(place / "model")
    rows = [{"text": each.text, "label": TASK.labels[each.label]} for each in examples()]
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ZeroTuningConfig.per_head(model, {1: 3.0}).save(place / "config.json")
    shutil.copytree(place / "model", place / "cut")
    weights = place / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return place
