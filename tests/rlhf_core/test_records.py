import pytest
from pydantic import ValidationError

from rlhf_core.records import Choice, Comparison, Completion, Message, Preference, Prompt, StopReason, compare


def preference(choice: Choice) -> Preference:
    pair = compare("p", "p/0", "p/1")
    return Preference(
        comparison_id=pair.id,
        prompt_id=pair.prompt_id,
        completion_a=pair.completion_a,
        completion_b=pair.completion_b,
        choice=choice,
        annotator="ann",
        round=2,
    )


@pytest.mark.parametrize("choice", list(Choice))
def test_swapping_twice_is_the_identity(choice: Choice) -> None:
    assert choice.swap().swap() is choice
    assert preference(choice).swap().swap() == preference(choice)
    pair = compare("p", "p/0", "p/1")
    assert pair.swap().swap() == pair


def test_a_swapped_comparison_by_hand() -> None:
    assert compare("p", "p/0", "p/1").swap() == Comparison(
        id="p/1|p/0", prompt_id="p", completion_a="p/1", completion_b="p/0"
    )


@pytest.mark.parametrize("choice", list(Choice))
def test_swapping_changes_the_order_and_not_the_judgement(choice: Choice) -> None:
    before, after = preference(choice), preference(choice).swap()
    assert (before.chosen, before.rejected) == (after.chosen, after.rejected)
    assert (after.completion_a, after.completion_b) == (before.completion_b, before.completion_a)
    assert after.comparison_id == compare("p", "p/0", "p/1").swap().id
    assert (after.annotator, after.round, after.prompt_id) == ("ann", 2, "p")


@pytest.mark.parametrize(
    ("choice", "chosen", "rejected"),
    [(Choice.A, "p/0", "p/1"), (Choice.B, "p/1", "p/0"), (Choice.TIE, None, None)],
)
def test_chosen_and_rejected_by_hand(choice: Choice, chosen: str | None, rejected: str | None) -> None:
    assert (preference(choice).chosen, preference(choice).rejected) == (chosen, rejected)


def test_a_prompt_has_one_form() -> None:
    message = Message(role="user", content="Hello?")
    for values in ({}, {"text": "Once", "messages": (message,)}):
        with pytest.raises(ValidationError, match="`text` or `messages`, and not both"):
            Prompt(id="p", **values)


@pytest.mark.parametrize(
    "values",
    [
        {"text": ""},
        {"text": " \n"},
        {"messages": ()},
        {"messages": ({"role": "system", "content": "Be kind."}, {"role": "user", "content": " "})},
    ],
)
def test_a_prompt_asks_something(values: dict) -> None:
    with pytest.raises(ValidationError, match="nothing to continue or to answer"):
        Prompt(id="p", **values)


def test_a_prompt_does_not_end_with_its_answer() -> None:
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}]
    with pytest.raises(ValidationError, match="ends with the assistant's turn"):
        Prompt.model_validate({"id": "p", "messages": turns})
    asked_on = Prompt.model_validate({"id": "p", "messages": [*turns, {"role": "user", "content": "And?"}]})
    assert asked_on.shown == "user: Hello?\nassistant: Hi.\nuser: And?"


def test_a_plain_prompt_is_shown_as_it_is() -> None:
    assert Prompt(id="p", text=" Once upon").shown == " Once upon"


def test_a_completion_has_tokens_on_both_sides() -> None:
    good = {"prompt_ids": [1], "response_ids": [2]}
    for empty in good:
        values = good | {empty: []}
        with pytest.raises(ValidationError, match=empty):
            Completion(
                id="p/0", prompt_id="p", prompt_text="Once", text="upon", stop=StopReason.EOS, **values
            )
