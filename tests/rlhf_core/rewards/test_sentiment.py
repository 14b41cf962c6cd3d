import math
import subprocess
import sys

import pytest

from rlhf_core.records import Completion, StopReason
from rlhf_core.rewards.sentiment import Sentiment


def completion(text: str, prompt_text: str = "The film was") -> Completion:
    return Completion(
        id="p/0",
        prompt_id="p",
        prompt_text=prompt_text,
        prompt_ids=[1],
        response_ids=[2],
        text=text,
        stop=StopReason.EOS,
    )


def scores(*texts: str) -> list[float]:
    pytest.importorskip("vaderSentiment", reason="vaderSentiment is not installed")
    total: list[float] = Sentiment().build().score([completion(text) for text in texts]).total.tolist()
    return total


def test_sentiment_is_the_normalised_valence_of_the_words() -> None:
    # VADER's lexicon gives "good" 1.9 and "bad" -2.5; compound = v / sqrt(v^2 + 15), rounded to four places.
    assert scores("good", "bad") == pytest.approx(
        [1.9 / math.sqrt(1.9**2 + 15), -2.5 / math.sqrt(2.5**2 + 15)], abs=5e-5
    )


def test_sentiment_of_a_text_without_feeling_is_zero() -> None:
    assert scores("The table has four legs.", "", "\n") == [0, 0, 0]


def test_sentiment_stays_within_one() -> None:
    low, high = scores("terrible horrible awful " * 30, "wonderful great love " * 30)
    assert -1 <= low < -0.9 and 0.9 < high <= 1


def test_sentiment_does_not_read_the_prompt() -> None:
    pytest.importorskip("vaderSentiment", reason="vaderSentiment is not installed")
    items = [completion("It was good.", prompt_text=prompt) for prompt in ("A great day:", "A terrible day:")]
    first, second = Sentiment().build().score(items).total.tolist()
    assert first == second > 0


def test_sentiment_settings_do_not_import_vader() -> None:
    code = (
        "import sys; from rlhf_core.rewards.sentiment import Sentiment; Sentiment();"
        "sys.exit('vaderSentiment' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sentiment_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "vaderSentiment", None)
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with pytest.raises(ValueError, match=r"pip install rlhf-rounds\[quickstart\]"):
        Sentiment().build()
