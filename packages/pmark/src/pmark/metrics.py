"""What a watermark costs and what it gives: numbers over texts and over detection scores.

Quality: `perplexity` (extra `transformers`), `rep_n`, `distinct_n`, `semantic_entropy` (extra `evaluation`). Power:
`auc`, `tpr_at_fpr`. `bootstrap` puts an interval over texts around any of them.
"""

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float64
from separata_kit.extras import load

# Scripts that leave no space between words count each character as a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+(?:['\u2019\-][^\W{_UNSPACED}]+)*")
"""A word: letters and digits with inner apostrophes and hyphens; one character of a script without spaces."""

_Scores = Sequence[float] | np.ndarray


class Interval(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


def n_grams(text: str, n: int) -> list[tuple[str, ...]]:
    """Return the overlapping n-grams of a text's words in lower case, in order.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    words = WORD.findall(text.lower())
    return list(zip(*(words[start:] for start in range(n)), strict=False))


def rep_n(text: str, n: int = 3) -> float:
    """Return the share of a text's n-grams that repeat an earlier one (Rep-n, 0 to 1; 0 where there are none)."""
    grams = n_grams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Return different n-grams over all n-grams of all texts together (distinct-n, 0 to 1; NaN where there are none).

    It falls with the number of texts: compare it only between equally many texts of equal length.
    """
    grams = [gram for text in texts for gram in n_grams(text, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def semantic_entropy(embeddings: Float[np.ndarray, "texts dim"], *, clusters: int = 50, seed: int = 0) -> float:
    """Return the entropy (nats) of the shares of k-means clusters, at most `log(clusters)`; high is diverse.

    Args:
        embeddings: Unit embeddings, finite.
        clusters: Number of clusters, at most the number of different rows.
        seed: Of the k-means starts.

    Raises:
        ValueError: `clusters` is not in 1 to the number of texts.
        ImportError: The extra `evaluation` is not installed.
    """
    if not 1 <= clusters <= len(embeddings):
        raise ValueError(f"clusters must lie in 1 to the number of texts, {len(embeddings)}, not {clusters}")
    k_means = load("sklearn.cluster", "semantic_entropy needs", "pmark[evaluation]").KMeans
    labels = k_means(clusters, n_init=4, random_state=seed).fit_predict(embeddings)
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    return float(-(shares * np.log(shares)).sum())


def perplexity(
    texts: Sequence[str], model: Any, tokenizer: Any, *, prompts: Sequence[str] | None = None, batch_size: int = 4
) -> Float64[np.ndarray, " texts"]:
    """Return each text's perplexity under a causal model of transformers (extra `transformers`).

    Args:
        texts: What is judged, prompts included.
        model: A causal language model.
        tokenizer: Its tokenizer.
        prompts: Beginning of each text that is read but not judged; none if not given.
        batch_size: Texts run together; texts of similar length share a batch.

    Returns:
        exp of the mean negative log-likelihood (nats) per judged token; NaN where a text has none. A text beyond the
        model's positions is judged by what fits, with a warning.

    Raises:
        ValueError: A text does not begin with its prompt, or there are not as many prompts as texts.
    """
    torch = load("torch", "perplexity needs", "pmark[transformers]")
    prompts = [""] * len(texts) if prompts is None else prompts
    limit = getattr(model.config, "max_position_embeddings", None) or math.inf
    rows = []
    for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        if not text.startswith(prompt):
            raise ValueError(f"texts[{index}] does not begin with its prompt")
        head = tokenizer(prompt)["input_ids"] if prompt else []
        if not head and tokenizer.bos_token_id is not None:
            head = [tokenizer.bos_token_id]
        body = tokenizer(text[len(prompt) :], add_special_tokens=False)["input_ids"]
        if len(head) + len(body) > limit:
            warnings.warn(f"texts[{index}] is longer than the model's {limit} positions and was cut", stacklevel=2)
        rows.append(((head + body)[: int(min(limit, len(head) + len(body)))], max(len(head), 1)))
    found = np.full(len(texts), np.nan)
    order = sorted((i for i, (ids, judged) in enumerate(rows) if len(ids) > judged), key=lambda i: len(rows[i][0]))
    for start in range(0, len(order), batch_size):
        some = order[start : start + batch_size]
        width = max(len(rows[i][0]) for i in some)
        ids = torch.zeros(len(some), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(some):
            ids[row, : len(rows[i][0])] = torch.tensor(rows[i][0])
            mask[row, : len(rows[i][0])] = 1
        with torch.no_grad():
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
        for row, i in enumerate(some):
            length, first = len(rows[i][0]), rows[i][1]
            # One row at a time: float32 copies of a whole batch over the vocabulary would be large.
            loss = torch.nn.functional.cross_entropy(
                logits[row, first - 1 : length - 1].float(), ids[row, first:length].to(logits.device)
            )
            found[i] = math.exp(float(loss))
    return found


def auc(positive: _Scores, negative: _Scores) -> float:
    """Return the area under the ROC curve: P(a positive scores above a negative), ties counting one half.

    Raises:
        ValueError: A list is empty or holds NaN.
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped]  # scipy ships no types

    marked, unmarked = scores_of("positive", positive), scores_of("negative", negative)
    ranks = rankdata(np.concatenate([marked, unmarked]))[: len(marked)].sum()
    return float((ranks - len(marked) * (len(marked) + 1) / 2) / (len(marked) * len(unmarked)))


def tpr_at_fpr(positive: _Scores, negative: _Scores, fpr: float) -> float:
    """Return the share of positives above the lowest threshold that at most a share `fpr` of the negatives exceeds.

    No interpolation: with fewer than `1/fpr` negatives the threshold is their largest score.

    Raises:
        ValueError: A list is empty or holds NaN, or `fpr` is not in 0 to 1.
    """
    if not 0 <= fpr <= 1:
        raise ValueError(f"fpr must lie in 0 to 1, not {fpr}")
    marked, unmarked = scores_of("positive", positive), np.sort(scores_of("negative", negative))[::-1]
    # The small term keeps floor(0.29 * 100) at 29.
    allowed = math.floor(fpr * len(unmarked) + 1e-9)
    return 1.0 if allowed == len(unmarked) else float((marked > unmarked[allowed]).mean())


def bootstrap(statistic: Callable[..., float], *samples: _Scores, draws: int = 1000, seed: int = 0) -> Interval:
    """Return a statistic with its percentile bootstrap interval of 95 %; every sample is drawn anew by itself.

    Args:
        statistic: Takes as many arrays as there are samples.
        samples: Values, one for each text.
        draws: Number of resamples.
        seed: Of the resamples.
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    rng = np.random.default_rng(seed)
    found = [statistic(*(each[rng.integers(len(each), size=len(each))] for each in arrays)) for _ in range(draws)]
    low, high = np.quantile(found, [0.025, 0.975])
    return Interval(float(statistic(*arrays)), float(low), float(high))


def scores_of(name: str, values: _Scores) -> Float64[np.ndarray, " n"]:
    """Return a list of scores as an array.

    Raises:
        ValueError: It is empty or holds NaN; `name` says which one.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or np.isnan(array).any():
        raise ValueError(f"{name} must be a list of at least one score without NaN, not of shape {array.shape}")
    return array
