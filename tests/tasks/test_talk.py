"""Which policy a name means."""

from pathlib import Path

import pytest

from rlhf_core.artifacts import ArtifactRef
from rlhf_core.ledger import DecisionRecord, Ledger, ProjectRecord, RebaseRecord, RoundRecord
from rlhf_core.settings import InvalidSettings
from tasks.talk import find_policy, held_out_prompts


def policy(name: str) -> ArtifactRef:
    return ArtifactRef(kind="policy", digest=name * 64, key=name)


INITIAL, FIRST, SECOND, FOURTH = map(policy, "0124")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Promoted, promoted, reward model rejected, rejected."""
    ledger = Ledger(tmp_path / "projects", "demo")
    ledger.open_project(ProjectRecord(name="demo", settings={}, base="none", inputs={"policy": INITIAL}))
    played = [
        ("promoted", FIRST, INITIAL),
        ("promoted", SECOND, FIRST),
        ("reward_model_rejected", None, SECOND),
        ("rejected", FOURTH, SECOND),
    ]
    for number, (outcome, candidate, champion) in enumerate(played, 1):
        ledger.open_round(
            RoundRecord(
                round=number,
                settings={},
                seed=0,
                champion=champion,
                source=INITIAL,
                mlflow_run_id="m",
                prefect_flow_run_id="p",
            )
        )
        ledger.decide(
            DecisionRecord(
                round=number,
                outcome=outcome,
                candidate=candidate,
                parent=champion,
                gates=[],
                metrics={},
                alarms=[],
                decided_at="now",
            )
        )
    return tmp_path


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("demo", SECOND),
        ("demo@champion", SECOND),
        ("demo@previous", FIRST),
        ("demo@candidate", FOURTH),
        ("demo@initial", INITIAL),
        ("demo@round-1", FIRST),
        ("demo@round-4", FOURTH),
    ],
)
def test_an_alias_is_read_from_the_ledger(home: Path, name: str, meant: ArtifactRef) -> None:
    found = find_policy(home, name)
    assert (found.ref, found.project) == (meant, "demo")
    assert found.name == (name if "@" in name else "demo@champion")


def test_after_a_rebase_initial_and_champion_are_the_first_policy_on_the_new_trunk(home: Path) -> None:
    ledger = Ledger(home / "projects", "demo")
    ledger.rebase(
        RebaseRecord(
            round=4,
            key="k",
            trunk=ArtifactRef(kind="trunk", digest="b" * 64, key="k"),
            policy=policy("5"),
            champion=SECOND,
            old_trunk=ArtifactRef(kind="trunk", digest="a" * 64, key="k"),
            metrics={},
            mlflow_run_id="m",
            rebased_at="now",
        )
    )
    meant = {alias: find_policy(home, f"demo@{alias}").ref for alias in ("champion", "initial", "previous")}
    assert meant == {"champion": policy("5"), "initial": policy("5"), "previous": SECOND}
    assert find_policy(home, "demo@candidate").ref == FOURTH
    assert find_policy(home, "demo@round-1").ref == FIRST


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("demo@best", "it has: champion, initial, previous, candidate, round-1, round-2, round-4"),
        ("demo@round-3", "it has: champion"),
        ("demo@round-9", "it has: champion"),
        ("other", "no project 'other'"),
        ("demo@", "names no policy"),
        ("../demo", "names no policy"),
        ("demo:two", "names no policy"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_what_there_is(home: Path, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_policy(home, name)


def test_before_any_round_there_is_the_initial_policy_only(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "projects", "new")
    ledger.open_project(ProjectRecord(name="new", settings={}, base="none", inputs={"policy": INITIAL}))
    assert find_policy(tmp_path, "new").ref == INITIAL
    with pytest.raises(InvalidSettings, match=r"it has: champion, initial$"):
        find_policy(tmp_path, "new@previous")
    assert held_out_prompts(tmp_path, "new", 3) == []
