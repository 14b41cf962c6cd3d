import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhf_core.artifacts import ArtifactRef
from rlhf_core.ledger import (
    DecisionRecord,
    Ledger,
    LedgerConflict,
    ProjectRecord,
    RebaseRecord,
    RoundRecord,
    StageRecord,
)


def policy(number: int) -> ArtifactRef:
    return ArtifactRef(kind="policy", digest=f"{number:064x}", key=f"key-{number}")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A ledger of a project that was opened with policy 0."""
    ledger = Ledger(tmp_path, "demo")
    ledger.open_project(project_record())
    return ledger


def project_record(base: str = "tiny") -> ProjectRecord:
    return ProjectRecord(name="demo", settings={"rounds": 2}, base=base, inputs={"policy": policy(0)})


def open_round(ledger: Ledger, number: int, seed: int = 1) -> RoundRecord:
    return ledger.open_round(
        RoundRecord(
            round=number,
            settings={},
            seed=seed,
            champion=ledger.champion(),
            source=policy(0),
            mlflow_run_id="m",
            prefect_flow_run_id="p",
        )
    )


def decide(ledger: Ledger, number: int, outcome: str, candidate: ArtifactRef | None) -> DecisionRecord:
    return ledger.decide(
        DecisionRecord(
            round=number,
            outcome=outcome,
            candidate=candidate,
            parent=ledger.champion(),
            gates=[],
            metrics={},
            alarms=[],
            decided_at="2026-01-01T00:00:00Z",
        )
    )


def stage_record(stage: str, output: ArtifactRef, seconds: float = 1.0) -> StageRecord:
    return StageRecord(
        stage=stage, key="k", outputs={"out": output}, cached=False, seconds=seconds, mlflow_run_id="m"
    )


def trunk(number: int) -> ArtifactRef:
    return ArtifactRef(kind="trunk", digest=f"{number + 256:064x}", key=f"trunk-{number}")


def rebase(ledger: Ledger, number: int, onto: int) -> RebaseRecord:
    """After a round, onto trunk `onto` with a first policy of ten times that number."""
    return ledger.rebase(
        RebaseRecord(
            round=number,
            key="k",
            trunk=trunk(onto),
            policy=policy(10 * onto),
            champion=ledger.champion(),
            old_trunk=ledger.anchor()["trunk"],
            metrics={},
            mlflow_run_id="m",
            rebased_at="2026-01-01T00:00:00Z",
        )
    )


@pytest.fixture
def twice_rebased(tmp_path: Path) -> Ledger:
    """Rejected, promoted; rebased; rejected, promoted, rejected; rebased; rejected."""
    ledger = Ledger(tmp_path, "rebased")
    inputs = {"trunk": trunk(0), "policy": policy(0)}
    ledger.open_project(ProjectRecord(name="rebased", settings={}, base="tiny", inputs=inputs))
    story = ["rejected", "promoted", "rebase", "rejected", "promoted", "rejected", "rebase", "rejected"]
    number = onto = 0
    for what in story:
        if what == "rebase":
            onto += 1
            rebase(ledger, number, onto)
        else:
            number += 1
            open_round(ledger, number)
            decide(ledger, number, what, policy(100 + number))
    return ledger


def test_a_round_keeps_the_trunk_that_was_there_when_it_was_played(twice_rebased: Ledger) -> None:
    found = {number: twice_rebased.anchor(number) for number in twice_rebased.rounds()}
    assert {number: anchor["trunk"] for number, anchor in found.items()} == {
        1: trunk(0), 2: trunk(0), 3: trunk(1), 4: trunk(1), 5: trunk(1), 6: trunk(2)
    }  # fmt: skip
    assert [found[number]["policy"] for number in (2, 3, 6)] == [policy(0), policy(10), policy(20)]
    assert twice_rebased.anchor() == {"trunk": trunk(2), "policy": policy(20)}
    assert [twice_rebased.rebase_before(number) for number in (2, 3)] == [None, twice_rebased.rebases()[0]]


def test_after_a_rebase_the_first_policy_on_the_new_trunk_is_champion_until_a_round_promotes(
    twice_rebased: Ledger,
) -> None:
    champions = [found.champion for n in twice_rebased.rounds() if (found := twice_rebased.round(n))]
    assert champions == [policy(0), policy(0), policy(10), policy(10), policy(104), policy(20)]
    assert [record.champion for record in twice_rebased.rebases()] == [policy(102), policy(104)]
    assert [record.old_trunk for record in twice_rebased.rebases()] == [trunk(0), trunk(1)]
    assert (twice_rebased.champion(), twice_rebased.won(), twice_rebased.champion_round()) == (
        policy(20),
        None,
        5,
    )
    open_round(twice_rebased, 7)
    promoted = decide(twice_rebased, 7, "promoted", policy(107))
    assert twice_rebased.won() == promoted
    assert (twice_rebased.champion(), twice_rebased.champion_round()) == (policy(107), 7)


def test_every_policy_is_at_home_on_one_trunk(twice_rebased: Ledger) -> None:
    homes = {0: 0, 101: 0, 102: 0, 10: 1, 103: 1, 104: 1, 105: 1, 20: 2, 106: 2}
    assert {number: twice_rebased.trunk_of(policy(number)) for number in homes} == {
        number: trunk(home) for number, home in homes.items()
    }


def test_no_round_that_has_begun_changes_its_trunk(twice_rebased: Ledger) -> None:
    with pytest.raises(LedgerConflict, match="a rebase after round 5, and rounds"):
        rebase(twice_rebased, 5, 3)
    open_round(twice_rebased, 7)
    with pytest.raises(LedgerConflict, match="would change its trunk"):
        rebase(twice_rebased, 7, 3)
    assert len(twice_rebased.rebases()) == 2


def test_a_rebase_stands_and_an_equal_one_adopts_it(twice_rebased: Ledger) -> None:
    first = rebase(twice_rebased, 6, 3)
    assert rebase(twice_rebased, 6, 3) == first
    with pytest.raises(LedgerConflict, match="rebased after round 6 already"):
        rebase(twice_rebased, 6, 4)
    assert twice_rebased.rebases()[-1] == first


def test_a_project_is_created_once(ledger: Ledger, tmp_path: Path) -> None:
    assert ledger.open_project(project_record(base="other")) == project_record()
    assert ledger.project() == project_record()
    assert Ledger(tmp_path, "demo").exists and not Ledger(tmp_path, "other").exists


def test_a_project_that_was_never_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no project 'other'"):
        Ledger(tmp_path, "other").project()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "Demo", "-demo", "a/b", "..", "a b", "demo\n", "a" * 64])
def test_names_that_are_no_folder_or_model_name_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="project name"):
        Ledger(tmp_path, name)


@pytest.mark.parametrize("name", ["a", "0-demo_2", "a" * 63])
def test_good_names_are_taken(tmp_path: Path, name: str) -> None:
    assert Ledger(tmp_path, name).name == name


def test_a_round_is_opened_once(ledger: Ledger) -> None:
    first = open_round(ledger, 1, seed=1)
    assert open_round(ledger, 1, seed=2) == first == ledger.round(1)
    assert ledger.round(2) is None
    assert ledger.rounds() == [1]


def test_rounds_are_in_order_of_their_numbers(ledger: Ledger) -> None:
    numbers = [7, 30, 2, 12, 9, 100, 1, 25, 4, 11]
    for number in numbers:
        open_round(ledger, number)
    assert ledger.rounds() == sorted(numbers)
    assert ledger.open_round_number() == 1


def test_the_open_round_is_the_one_without_a_decision(ledger: Ledger) -> None:
    assert ledger.open_round_number() is None
    open_round(ledger, 1)
    assert ledger.open_round_number() == 1
    decide(ledger, 1, "rejected", policy(1))
    assert ledger.open_round_number() is None
    open_round(ledger, 2)
    assert ledger.open_round_number() == 2


def test_the_champion_is_a_fold_over_the_decisions(ledger: Ledger) -> None:
    story = [
        ("rejected", policy(1), policy(0)),
        ("promoted", policy(2), policy(2)),
        ("reward_model_rejected", None, policy(2)),
        ("rejected", policy(4), policy(2)),
        ("promoted", policy(5), policy(5)),
    ]
    assert ledger.champion() == policy(0)
    for number, (outcome, candidate, champion) in enumerate(story, start=1):
        before = ledger.champion()
        open_round(ledger, number)
        assert ledger.champion() == before
        decide(ledger, number, outcome, candidate)
        assert ledger.champion() == champion
    assert [round_.champion for number in ledger.rounds() if (round_ := ledger.round(number))] == [
        policy(0), policy(0), policy(2), policy(2), policy(2)
    ]  # fmt: skip


def test_a_decision_stands(ledger: Ledger) -> None:
    open_round(ledger, 1)
    first = decide(ledger, 1, "rejected", policy(1))
    assert decide(ledger, 1, "promoted", policy(1)) == first == ledger.decision(1)
    assert ledger.champion() == policy(0)


def test_a_pinned_stage_is_kept_and_an_equal_result_adopts_it(ledger: Ledger) -> None:
    open_round(ledger, 1)
    first = ledger.pin(1, stage_record("rollouts", policy(1), seconds=1.0))
    assert ledger.pin(1, stage_record("rollouts", policy(1), seconds=9.0)) == first
    assert ledger.stage(1, "rollouts") == first
    assert ledger.stage(1, "pairing") is None and ledger.stage(2, "rollouts") is None


def test_another_result_for_a_pinned_stage_is_a_conflict(ledger: Ledger) -> None:
    open_round(ledger, 1)
    first = ledger.pin(1, stage_record("rollouts", policy(1)))
    with pytest.raises(LedgerConflict, match="round 1 already has another rollouts"):
        ledger.pin(1, stage_record("rollouts", policy(2)))
    assert ledger.stage(1, "rollouts") == first


def test_stages_are_listed_in_the_order_they_finished(ledger: Ledger) -> None:
    open_round(ledger, 1)
    names = ["rollouts", "pairing", "measurement.candidate", "measurement.champion", "comparison"]
    for second, name in enumerate(names):
        ledger.pin(1, stage_record(name, policy(1)))
        os.utime(ledger.root / "0001" / f"{name}.json", (second, second))
    decide(ledger, 1, "promoted", policy(1))
    assert [record.stage for record in ledger.stages(1)] == names
    assert ledger.stages(2) == []


def test_a_writer_killed_before_its_record_was_whole_leaves_no_record(ledger: Ledger) -> None:
    # A record becomes visible by a link; a kill before it leaves the temporary file alone.
    for folder, half in ((ledger.root / "0001", b'{"round": 1, "outco'), (ledger.root, b"")):
        folder.mkdir(exist_ok=True)
        (folder / ".new-abc123").write_bytes(half)
    assert ledger.rounds() == [] and ledger.open_round_number() is None and ledger.stages(1) == []
    open_round(ledger, 1)
    ledger.pin(1, stage_record("rollouts", policy(1)))
    assert [record.stage for record in ledger.stages(1)] == ["rollouts"]
    assert ledger.open_round_number() == 1
    decide(ledger, 1, "promoted", policy(1))
    assert ledger.champion() == policy(1)


def test_a_record_of_another_shape_is_refused(ledger: Ledger) -> None:
    (ledger.root / "0001").mkdir()
    (ledger.root / "0001" / "opened.json").write_text('{"round": 1, "surprise": true}')
    with pytest.raises(ValidationError, match="surprise"):
        ledger.round(1)
