import json
from collections import Counter

import pytest

from rlhf_core import prompts_data
from rlhf_core.records import Prompt


def prompts(name: str) -> list[Prompt]:
    with prompts_data.path(name).open(encoding="utf-8") as lines:
        return [Prompt.model_validate(json.loads(line)) for line in lines]


def openings() -> list[str]:
    return [prompt.text or "" for prompt in prompts("openings.jsonl")]


@pytest.mark.parametrize("name", ["openings.jsonl", "chats.jsonl"])
def test_ids_are_unique_and_every_prompt_has_a_kind(name: str) -> None:
    rows = prompts(name)
    assert len({row.id for row in rows}) == len(rows)
    assert all(row.kind for row in rows)


def test_openings_are_many_of_many_kinds() -> None:
    kinds = Counter(prompt.kind for prompt in prompts("openings.jsonl"))
    assert sum(kinds.values()) >= 640
    assert len(kinds) >= 8
    assert min(kinds.values()) >= 64


def test_openings_are_short_and_end_inside_a_sentence() -> None:
    for text in openings():
        assert 4 <= len(text.split()) <= 11, text
        assert text == text.strip() and "\n" not in text and "  " not in text, text
        assert text[-1].isalpha() or text[-1] == ",", text


def test_openings_differ_from_each_other() -> None:
    texts = [text.casefold() for text in openings()]
    assert len(set(texts)) == len(texts)
    starts = Counter(tuple(text.split()[:4]) for text in texts)
    assert max(starts.values()) <= 6, starts.most_common(3)


def test_openings_carry_no_sentiment_of_their_own() -> None:
    vader = pytest.importorskip("vaderSentiment.vaderSentiment", reason="vaderSentiment is not installed")
    analyzer = vader.SentimentIntensityAnalyzer()
    compounds = {text: analyzer.polarity_scores(text)["compound"] for text in openings()}
    assert {text for text, compound in compounds.items() if abs(compound) >= 0.3} == set()
    assert sum(compound == 0 for compound in compounds.values()) >= 0.95 * len(compounds)


def test_chats_are_questions_of_four_kinds_some_with_a_system_message_or_several_turns() -> None:
    chats = prompts("chats.jsonl")
    kinds = Counter(prompt.kind for prompt in chats)
    assert len(chats) >= 80
    assert sorted(kinds) == ["advise", "explain", "plan", "write"]
    assert min(kinds.values()) >= 20
    roles = Counter(tuple(message.role for message in prompt.messages or ()) for prompt in chats)
    assert roles["system", "user"] >= 8
    assert roles["user", "assistant", "user"] >= 8
    for turns in roles:
        talk = turns[turns[0] == "system" :]
        assert talk == ("user", "assistant") * (len(talk) // 2) + ("user",), turns


def test_an_unknown_file_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ValueError, match=r"'\.\./records\.py'; there are chats\.jsonl, openings\.jsonl"):
        prompts_data.path("../records.py")
