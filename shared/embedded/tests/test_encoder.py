import math
import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separata_embedded.encoder import SentenceEncoder, mean_pooled


@pytest.fixture(scope="module")
def encoder():
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertModel(config).eval()
    return SentenceEncoder(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]"), max_tokens=8)


def test_mean_of_two_tokens_and_unit_length():
    hidden_states = torch.tensor([[[3.0, 0.0], [3.0, 8.0], [100.0, -100.0]]])
    mask = torch.tensor([[1, 1, 0]])
    # The mean of (3, 0) and (3, 8) is (3, 4), of length 5.
    torch.testing.assert_close(mean_pooled(hidden_states, mask), torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_padding_is_never_read(poison):
    hidden_states = torch.tensor([[[3.0, 4.0], [poison, poison]]])
    torch.testing.assert_close(mean_pooled(hidden_states, torch.tensor([[1, 0]])), torch.tensor([[0.6, 0.8]]))


def test_no_token_at_all_gives_zeros():
    assert mean_pooled(torch.ones(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64)).tolist() == [[0.0, 0.0, 0.0]]


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(alphabet=string.ascii_lowercase + " ", max_size=20), max_size=9),
    batch_size=st.integers(1, 10),
)
def test_batches_and_order_change_nothing(encoder, texts, batch_size):
    vectors = encoder.encode(texts, batch_size=batch_size)
    assert vectors.shape == (len(texts), 16)
    for text, vector in zip(texts, vectors, strict=True):
        torch.testing.assert_close(encoder.encode([text])[0], vector, rtol=1e-5, atol=1e-6)
        assert vector.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_long_texts_are_cut_at_max_tokens(encoder):
    # Eight tokens are [CLS], six words, [SEP].
    cut = encoder.encode(["a b c d e f g h i j"])
    torch.testing.assert_close(cut, encoder.encode(["a b c d e f"]))
    assert not torch.allclose(cut, encoder.encode(["a b c d e"]), atol=1e-3)


def test_no_texts(encoder):
    assert encoder.encode([]).shape == (0, 16)


def test_a_bare_string_is_refused(encoder):
    with pytest.raises(TypeError, match=r"texts must be a sequence of strings, got the string 'hello'"):
        encoder.encode("hello")


def test_a_batch_of_none_is_refused(encoder):
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        encoder.encode(["a"], batch_size=0)


def test_vectors_carry_no_graph(encoder):
    assert not encoder.encode(["a"]).requires_grad
