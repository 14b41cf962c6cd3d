import json
from pathlib import Path

import pytest

from rlhf_core.records import Choice, ImportedPreference
from rlhf_core.sources import FileSource, InvalidSource, preferences

USER = {"role": "user", "content": "?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def talk(*turns: str) -> str:
    """A transcript in which the human begins."""
    return "".join(f"\n\n{('Human', 'Assistant')[n % 2]}: {said}" for n, said in enumerate(turns))


def shown(found: ImportedPreference) -> tuple[str, str, str, str]:
    return found.prompt.shown, found.completion_a, found.completion_b, found.choice.value


@pytest.mark.parametrize(
    ("row", "schema", "expected"),
    [
        (
            {"chosen": talk("Hi", "Yo", "?", "good"), "rejected": talk("Hi", "Yo", "?", "bad")},
            "chosen/rejected transcripts",
            ("user: Hi\nassistant: Yo\nuser: ?", "good", "bad", "a"),
        ),
        (
            {"chosen": [USER, answer("good")], "rejected": [USER, answer("bad")]},
            "chosen/rejected messages",
            ("user: ?", "good", "bad", "a"),
        ),
        (
            {"prompt": "?", "chosen": "good", "rejected": "bad"},
            "prompt/chosen/rejected",
            ("?", "good", "bad", "a"),
        ),
        (
            {"prompt": [USER], "chosen": [answer("good")], "rejected": [answer("bad")]},
            "prompt/chosen/rejected",
            ("user: ?", "good", "bad", "a"),
        ),
        (
            # UltraFeedback: the prompt once as text and once at the head of both sides.
            {"prompt": "?", "chosen": [USER, answer("good")], "rejected": [USER, answer("bad")]},
            "prompt/chosen/rejected",
            ("user: ?", "good", "bad", "a"),
        ),
        (
            {
                "conversations": [{"from": "system", "value": "Be"}, {"from": "human", "value": "?"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            "conversations/chosen/rejected",
            ("system: Be\nuser: ?", "good", "bad", "a"),
        ),
        (
            {"input": "?", "output_1": "bad", "output_2": "good", "label": 2},
            "input/output_1/output_2/label",
            ("?", "bad", "good", "b"),
        ),
        (
            {"prompt": "?", "completion_a": "x", "completion_b": "y", "choice": "Tie"},
            "prompt/completion_a/completion_b/choice",
            ("?", "x", "y", "tie"),
        ),
        (
            {
                "conversation_a": [USER, answer("x"), USER, answer("more")],
                "conversation_b": [USER, answer("y"), USER, answer("else")],
                "winner": "tie (inconsistent)",
                "turn": 1,
            },
            "conversation_a/conversation_b/winner",
            ("user: ?", "x", "y", "tie"),
        ),
    ],
)
def test_the_common_schemas_are_recognised(jsonl, row: dict[str, object], schema: str, expected) -> None:
    reading = preferences(jsonl(row))
    assert [shown(found) for found in reading] == [expected]
    assert reading.recognised == {"rows.jsonl": schema}


def test_a_mapping_finds_the_fields_and_the_annotator_and_margin_are_told(jsonl) -> None:
    row = {"q": "?", "good": "x", "bad": "y", "who": "ann", "by": 2}
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad", "annotator": "who", "margin": "by"}
    (found,) = preferences(jsonl(row, columns=columns))
    assert shown(found) == ("?", "x", "y", "a")
    assert (found.annotator, found.margin, found.file, found.row) == ("ann", 2.0, "rows.jsonl", 1)


def test_the_margin_is_the_difference_of_scores_where_there_are_some(jsonl) -> None:
    row = {"prompt": "?", "chosen": "x", "rejected": "y", "score_chosen": 8.5, "score_rejected": 3}
    assert [found.margin for found in preferences(jsonl(row))] == [5.5]


def test_a_judge_is_the_annotator_of_two_conversations(jsonl) -> None:
    row = {"conversation_a": [USER, answer("x")], "conversation_b": [USER, answer("y")], "winner": "model_b"}
    judges = ["expert_1", ["gpt-4", "pair-v2"], None]
    found = preferences(jsonl(*(row | {"judge": judge} for judge in judges)))
    assert [one.annotator for one in found] == ["expert_1", "gpt-4/pair-v2", "unnamed"]


GOOD = {"chosen": talk("?", "x"), "rejected": talk("?", "y")}


@pytest.mark.parametrize(
    ("row", "mistake"),
    [
        (GOOD | {"rejected": talk("?", "x")}, "chosen, rejected: both completions are the same text"),
        (GOOD | {"chosen": talk("?", " ")}, "chosen: empty: there is nothing to learn from"),
        (GOOD | {"rejected": talk("!", "y")}, "chosen, rejected: their turns differ from turn 1 on"),
        (
            GOOD | {"rejected": talk("?", "a", "b", "y")},
            "chosen, rejected: their turns differ from turn 2 on",
        ),
        (GOOD | {"chosen": talk("?", "x", "?")}, "chosen: does not end with the assistant's turn"),
        (GOOD | {"chosen": "x"}, "chosen: not a transcript"),
        (GOOD | {"chosen": [USER, answer("x")]}, "chosen: must be text"),
        (GOOD | {"chosen": None}, "chosen: missing; the row has chosen, rejected"),
        (GOOD | {"rejected": talk("?", "y\0")}, "rejected: a null byte at character 2"),
        (GOOD | {"rejected": talk("\0", "y"), "chosen": talk("\0", "x")}, "chosen.0.content: a null byte"),
        ("\n\nHuman: x", "chosen: missing; the row has text"),
    ],
)
def test_a_bad_transcript_is_named_by_row_and_column(jsonl, row: object, mistake: str) -> None:
    reading = preferences(jsonl(GOOD, json.dumps(row), GOOD, max_bad_share=0.5))
    assert len(list(reading)) == 2
    assert str(reading.mistakes[0]).startswith(f"rows.jsonl, row 2: {mistake}")


@pytest.mark.parametrize("label", [0, "x", True, 1.5, None])
def test_a_label_that_is_none_is_refused(jsonl, label: object) -> None:
    row = {"input": "?", "output_1": "x", "output_2": "y", "label": 1}
    reading = preferences(jsonl(row, row | {"label": label}, max_bad_share=0.5))
    assert len(list(reading)) == 1
    assert reading.mistakes[0].field == "label"


def test_the_second_turn_of_two_conversations_does_not_answer_one_prompt(jsonl) -> None:
    row = {
        "conversation_a": [USER, answer("x"), USER, answer("more")],
        "conversation_b": [USER, answer("y"), USER, answer("else")],
        "winner": "model_a",
        "turn": 2,
    }
    with pytest.raises(
        InvalidSource, match="conversation_a, conversation_b: their turns differ from turn 2 on"
    ):
        list(preferences(jsonl(row)))


def test_messages_that_do_not_begin_with_the_prompt_are_refused(jsonl) -> None:
    row = {"prompt": [USER], "chosen": [{"role": "user", "content": "!"}, answer("x")]}
    row["rejected"] = [{"role": "user", "content": "!"}, answer("y")]
    with pytest.raises(InvalidSource, match="prompt, chosen: the messages do not begin with the prompt"):
        list(preferences(jsonl(row)))


def reply(text: str, rank: int | None = None, *replies: object, **more: object) -> dict[str, object]:
    return {"text": text, "role": "assistant", "rank": rank, "replies": list(replies), **more}


def test_a_tree_gives_all_pairs_of_ranked_siblings(jsonl) -> None:
    again = {
        "text": "And?",
        "role": "prompter",
        "replies": [reply("p", 1), reply("q", 0), reply("gone", 2, deleted=True)],
    }
    root = {
        "text": "?",
        "role": "prompter",
        "replies": [reply("second", 1, again), reply("first", 0), reply("third", 2), reply("unranked")],
    }
    # Ranks 0 < 1 < 2 give three pairs; below `second` there is one more.
    assert [
        (*shown(found), found.margin)
        for found in preferences(jsonl({"message_tree_id": "t", "prompt": root}))
    ] == [
        ("user: ?", "first", "second", "a", 1.0),
        ("user: ?", "second", "third", "a", 1.0),
        ("user: ?", "first", "third", "a", 2.0),
        ("user: ?\nassistant: second\nuser: And?", "q", "p", "a", 1.0),
    ]


def test_equal_texts_and_equal_ranks_of_a_tree_are_no_pair(jsonl) -> None:
    root = {"text": "?", "role": "prompter", "replies": [reply("x", 0), reply("x", 1), reply("y", 1)]}
    found = preferences(jsonl({"message_tree_id": "t", "prompt": root}))
    assert [shown(one)[1:3] for one in found] == [("x", "y")]


def test_equal_prompts_have_one_id_whatever_the_rows_are_called(jsonl) -> None:
    row = {"prompt": "?", "chosen": "x", "rejected": "y", "kind": 1, "prompt_id": "p"}
    rows = row | {"id": 1}, row | {"id": "two", "chosen": "z"}
    # printf '"?"' | sha256sum | cut -c1-16
    assert [found.prompt.id for found in preferences(jsonl(*rows))] == ["15c5e748338b7ecd"] * 2
    mapped = preferences(jsonl(*rows, columns={"id": "prompt_id"}))
    assert [found.prompt.id for found in mapped] == ["p", "p"]


def test_swapping_twice_is_the_same_preference(jsonl) -> None:
    (found,) = preferences(jsonl(GOOD))
    assert found.swap().choice == Choice.B and found.swap().completion_a == found.completion_b
    assert found.swap().swap() == found


def test_bad_rows_of_preferences_may_be_two_of_a_hundred(jsonl) -> None:
    assert len(list(preferences(jsonl(*[GOOD] * 98, "{", "{")))) == 98
    with pytest.raises(InvalidSource, match=r"3 of 101 rows refused, and 2\.00% may be"):
        list(preferences(jsonl(*[GOOD] * 98, "{", "{", "{")))


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("hh-rlhf/helpful-base", 2339, 15),
        ("hh-rlhf/helpful-online", 1130, 7),
        ("hh-rlhf/helpful-rejection-sampled", 2714, 35),
        ("hh-rlhf/harmless-base", 2303, 9),
        ("llmbar", 419, 0),
        ("mt-bench/human_pairs_200.json", 200, 0),
        ("dpo-en-demo", 300, 0),
        ("hhh-alignment", 221, 0),
    ],
)
def test_the_shared_data_sets_have_their_preferences(shared, path: str, good: int, bad: int) -> None:
    reading = preferences(shared(path))
    assert (sum(1 for _ in reading), reading.num_bad) == (good, bad)


def test_the_trees_of_oasst_give_the_pairs_that_were_made_of_them_before(shared) -> None:
    trees, pairs = shared("oasst/en_100_tree.jsonl"), shared("oasst/ranked_pairs.jsonl")
    found = [shown(one) for one in preferences(trees)]
    assert len(found) == 754
    assert sorted(found) == sorted(shown(one) for one in preferences(pairs))


def test_a_folder_of_two_schemas_is_recognised_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / "b.csv").write_text('prompt,chosen,rejected\n"a\nb",x,y\n')
    reading = preferences(FileSource(path=str(tmp_path)))
    assert [one.prompt.shown for one in reading] == ["user: ?", "a\nb"]
    assert reading.recognised == {
        "a.jsonl": "chosen/rejected transcripts",
        "b.csv": "prompt/chosen/rejected",
    }
