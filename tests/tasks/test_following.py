"""What a stage writes is followed; what an earlier attempt left is not."""

from pathlib import Path

import pytest

import tasks.following
from tasks.following import Follower
from tasks.journal import Measured
from tasks.project import Project

LINE = '{"t": 1000, "step": 0, "metrics": {"loss": 2.0}}\n'
LATER = '{"t": 2000, "step": 1, "metrics": {"loss": 1.0}}\n'


def steps(follower: Follower) -> list[int]:
    return [fact.step for fact, _ in follower.journal.facts() if isinstance(fact, Measured)]


def follower_of(project: Project, work: Path) -> Follower:
    return Follower(project, project.journals.attempt(1, "rollouts", {}), "rollouts", work)


def test_a_spool_of_an_earlier_attempt_is_left_alone_until_the_stage_makes_its_own(
    project: Project, tmp_path: Path
) -> None:
    spool = tmp_path / "metrics.jsonl"
    spool.write_text(LINE + LATER)
    follower = follower_of(project, tmp_path)
    follower.look()
    assert steps(follower) == []
    spool.unlink()
    spool.write_text(LATER)
    follower.look()
    follower.look()
    assert steps(follower) == [1]


def test_a_stage_that_goes_on_with_its_spool_tells_all_of_it(project: Project, tmp_path: Path) -> None:
    spool = tmp_path / "metrics.jsonl"
    spool.write_text(LINE)
    follower = follower_of(project, tmp_path)
    with spool.open("a") as file:
        file.write(LATER)
    follower.look()
    assert steps(follower) == [0, 1]


def test_the_machine_is_looked_at_in_long_stages_only(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = follower_of(project, tmp_path)
    short.look()
    assert steps(short) == []
    monkeypatch.setattr(tasks.following, "SAMPLE_SECONDS", 0.0)
    long = follower_of(project, tmp_path)
    long.look()
    long.look()
    samples = [fact for fact, _ in long.journal.facts() if isinstance(fact, Measured)]
    assert [sample.step for sample in samples] == [0, 1]
    for sample in samples:
        assert {
            "system/cpu_utilization_percentage",
            "system/system_memory_usage_megabytes",
            "system/system_memory_usage_percentage",
        } <= sample.metrics.keys()
        assert 0 < sample.metrics["system/system_memory_usage_percentage"] < 100
