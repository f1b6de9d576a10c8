"""A judge of mood that needs no model; needs the extra `demo` (vaderSentiment)."""

from collections.abc import Sequence

from bodes_steer.judges import Judge


def vader_judge() -> Judge:
    """A judge that knows nothing of the model: the compound score of the VADER lexicon, from -1 to 1.

    Returns:
        A judge as in `bodes_steer.judges`; it looks at the completion alone.

    Raises:
        ImportError: vaderSentiment is not installed; the message names the extra.
    """
    try:
        from vaderSentiment.vaderSentiment import (  # type: ignore[import-untyped]  # it ships no types
            SentimentIntensityAnalyzer,
        )
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "vaderSentiment":
            raise
        raise ImportError("the judge 'vader' needs the extra 'demo': pip install 'bodes-steer[demo]'") from None
    analyser = SentimentIntensityAnalyzer()

    def judge(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        return [float(analyser.polarity_scores(each)["compound"]) for each in completions]

    return judge
