"""How glad a completion sounds: the gold that a simulated annotator judges by in the quickstart."""

from typing import Literal

from rlhf_core.rewards.scores import PerCompletion
from rlhf_core.settings import Settings


class Sentiment(Settings):
    """The compound score of VADER for the text of the completion without its prompt, in [-1, 1].

    VADER is a lexicon with rules for negation and emphasis (Hutto and Gilbert, 2014). A text without a word
    of the lexicon, an empty one too, is neutral: 0.
    """

    type: Literal["sentiment"] = "sentiment"
    """The name of this reward."""

    def build(self) -> PerCompletion:
        """The reward source; needs the package vaderSentiment."""
        try:
            from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # type: ignore[import-untyped]
        except ImportError as error:
            raise ValueError(
                "the reward `sentiment` needs the package vaderSentiment, which is not installed: "
                "pip install rlhf-rounds[quickstart]"
            ) from error
        analyzer = SentimentIntensityAnalyzer()
        return PerCompletion(lambda item: float(analyzer.polarity_scores(item.text)["compound"]))
