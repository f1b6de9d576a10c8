"""A tiny model with words for tokens, and a task whose labels it answers by chance."""

import json
import shutil

import torch
from separata_testing.models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
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
