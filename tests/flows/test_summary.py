"""What people read at the end of a run, and when they ask for the status."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from flows.summary import show
from rlhf_core.artifacts import ArtifactRef
from rlhf_core.ledger import DecisionRecord, GateResult, Ledger, ProjectRecord, RoundRecord

REF = ArtifactRef(kind="policy", digest="a" * 64, key="k")


def decide(ledger: Ledger, number: int, gates: list[GateResult], alarms: list[str]) -> None:
    ledger.open_round(
        RoundRecord(
            round=number,
            settings={},
            seed=0,
            champion=REF,
            source=REF,
            mlflow_run_id="m",
            prefect_flow_run_id="p",
        )
    )
    ledger.decide(
        DecisionRecord(
            round=number,
            outcome="rejected",
            candidate=REF,
            parent=REF,
            gates=gates,
            metrics={},
            alarms=alarms,
            decided_at="now",
        )
    )


def test_the_last_round_says_which_gates_failed_and_what_alarmed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "projects", "demo")
    ledger.open_project(ProjectRecord(name="demo", settings={}, base="b", inputs={"policy": REF}))
    failed = GateResult(name="win", value=0.4, bound=0.5, passed=False, sentence="win is 0.4: failed")
    passed = failed.model_copy(update={"passed": True, "sentence": "length is fine: passed"})
    decide(ledger, 1, [failed], ["step 0: of an earlier round"])
    decide(ledger, 2, [failed, passed], ["step 3: phrases: [bold] \x1b[2J said. Raise `kl_coef`."])
    written = StringIO()
    show(tmp_path, "demo", Console(file=written, width=200))
    lines = written.getvalue().splitlines()
    assert "failed    round 2: win is 0.4: failed" in lines
    assert "alarm     round 2: step 3: phrases: [bold] ⟨U+001B⟩[2J said. Raise `kl_coef`." in lines
    assert not any("fine" in line or "earlier" in line for line in lines)
