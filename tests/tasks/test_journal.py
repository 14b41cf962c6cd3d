"""A journal keeps every fact in order and with its time, whatever ends the process that writes it."""

import json
import math
from pathlib import Path

import pytest

from tasks.journal import Closed, Journal, Journals, Measured, Opened, Parameters


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.begin(tmp_path / "0001" / "round.jsonl", "round-0001", {"a": "b"})


def spool_line(milliseconds: int, step: int, **metrics: float) -> str:
    return json.dumps({"t": milliseconds, "step": step, "metrics": metrics}) + "\n"


def test_a_spool_is_taken_over_line_by_line_with_its_times(journal: Journal, tmp_path: Path) -> None:
    spool = tmp_path / "metrics.jsonl"
    first, second = spool_line(1000, 0, loss=2.0), spool_line(2000, 1, kl=float("nan"))
    spool.write_text(first + second[:-1])
    offset = journal.copy_spool(spool)
    assert offset == len(first)
    spool.write_text(first + second)
    assert journal.copy_spool(spool, offset) == len(first + second)
    opened, one, two = (fact for fact, _ in journal.facts())
    assert isinstance(opened, Opened) and opened.tags == {"a": "b"}
    assert one == Measured(t=1000, step=0, metrics={"loss": 2.0})
    assert isinstance(two, Measured) and (two.t, two.step) == (2000, 1) and math.isnan(two.metrics["kl"])


def test_a_spool_that_is_not_there_yet_is_an_empty_one(journal: Journal, tmp_path: Path) -> None:
    assert journal.copy_spool(tmp_path / "metrics.jsonl", 7) == 7


def test_facts_are_read_from_any_offset_and_a_torn_one_waits(journal: Journal) -> None:
    (_, after_first), *_ = journal.facts()
    journal.tag({"c": "d"})
    whole = journal.size
    with journal.path.open("ab") as file:
        file.write(b'{"fact": "clo')
    assert [end for _, end in journal.facts(after_first)] == [whole]


def test_a_journal_left_open_is_closed_at_its_last_sign_of_life_and_once(journal: Journal) -> None:
    journal.add(Measured(t=5000, step=0, metrics={"loss": 1.0}))
    with journal.path.open("ab") as file:
        file.write(b'{"fact": "clo')
    assert [journal.mend(), journal.mend()] == [True, False]
    assert journal.closed == Closed(t=5000, status="KILLED")
    journal.reopen()
    assert journal.closed is None


def test_a_parameter_keeps_its_first_value(journal: Journal) -> None:
    journal.parameters({"rate": "1e-4"})
    journal.parameters({"rate": "2e-4", "device": "cpu"})
    journal.parameters({"rate": "3e-4"})
    given = [fact.parameters for fact, _ in journal.facts() if isinstance(fact, Parameters)]
    assert given == [{"rate": "1e-4"}, {"device": "cpu"}]


def test_attempts_at_a_stage_are_counted_and_a_round_comes_before_them(tmp_path: Path) -> None:
    journals = Journals(tmp_path, "demo")
    for _ in range(2):
        journals.attempt(1, "measurement.initial", {})
    journals.attempt(1, "measurement.champion", {})
    journals.begin_round(1)
    assert [journal.path.name for journal in journals.all()] == [
        "round.jsonl",
        "measurement.champion.1.jsonl",
        "measurement.initial.1.jsonl",
        "measurement.initial.2.jsonl",
    ]
    stage = journals.all()[1]
    assert journals.parent(stage) == journals.round(1)
    assert journals.parent(journals.round(1)) is None
