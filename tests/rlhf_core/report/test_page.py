import re
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from rlhf_core.alarms import Action, Alarm, MonitorRecord, MonitorsReport, WorstReading
from rlhf_core.artifacts import ArtifactRef
from rlhf_core.gates import Estimate, Gate, judge
from rlhf_core.ledger import StageRecord
from rlhf_core.report import CalibrationPoint, RoundView, Sample, Scores, write_report
from rlhf_core.selection import Evaluation, Selection, last_step

RENDERER = MarkdownIt("commonmark", {"html": True}).enable("table")
POLICY = ArtifactRef(kind="policy", digest="0123456789ab" + "f" * 52, key="0" * 64)
CRITIC = ArtifactRef(kind="critic", digest="ba9876543210" + "f" * 52, key="0" * 64)
COMPARISON = {
    "eval/win_rate": Estimate(value=0.61, low=0.53, high=0.69),
    "eval/gold_before": Estimate(value=0.1234567, low=0.1, high=0.15),
    "eval/perplexity_over_initial": Estimate.exactly(1.25),
}
WIN_RATE = Gate(metric="eval/win_rate", direction="above", bound=0.5)
DISTINCT = Gate(metric="eval/distinct_2_over_initial", direction="above", bound=0.8)

VIEW = RoundView(
    project="quickstart",
    round=2,
    outcome="promoted",
    stages=[
        StageRecord(
            stage="policy_update", key="0" * 64, outputs={"policy": POLICY, "critic": CRITIC},
            cached=False, seconds=12.34, mlflow_run_id="1",
        ),
        StageRecord(
            stage="measurement.champion", key="0" * 64, outputs={},
            cached=True, seconds=0.0, mlflow_run_id="2",
        ),
    ],
    gates=judge([WIN_RATE], COMPARISON),
    alarms=[],
    update_steps=[],
    reward_model_metrics={"reward_model/accuracy": Estimate(value=0.7, low=0.6, high=0.8)},
    calibration=[],
    accuracy_by_round={2: Estimate.exactly(0.75), 1: Estimate(value=0.65, low=0.5, high=0.8)},
    comparison=COMPARISON,
    scores={},
    samples=[Sample("The rain", "is wet.", "")],
    links={"MLflow": "http://localhost/runs?a=1&b=2", "again": "rlhf status quickstart"},
    settings_yaml="rounds: 2\n",
)  # fmt: skip
MONITORS = MonitorsReport(
    ended_by="kl",
    steps=6,
    monitors=(
        MonitorRecord(monitor="entropy", action=Action.OFF, advice="raise `x`"),
        MonitorRecord(
            monitor="gold", action=Action.WARN, advice="raise `y`",
            worst=(WorstReading(what="trend", value=-1.5, step=4, limit=-3, side="below"),),
        ),
        MonitorRecord(
            monitor="phrases", action=Action.WARN, advice="read <them>", first=2, steps=2,
            worst=(WorstReading(what="growth", value=9.25, step=3, limit=8, side="above"),),
        ),
        MonitorRecord(
            monitor="kl", action=Action.STOP, advice="raise `z`", first=5, since=5, steps=1,
            worst=(WorstReading(what="KL", value=0.6, step=5, limit=0.5, side="above"),),
        ),
    ),
    alarms=(
        Alarm(monitor="phrases", step=2, severity="warn", sentence="too many", examples=("'so <b>'",)),
        Alarm(monitor="kl", step=5, severity="stop", sentence="too far"),
    ),
)  # fmt: skip
SELECTION = Selection(
    rule="best",
    step=5,
    steps=8,
    why="The candidate is the policy after 5 of 8 steps.",
    kl_coef=0.05,
    prompts=("a", "b"),
    evaluations=(
        Evaluation(step=0, reward=0.5, kl=0.0, objective=0.5, gain=Estimate.exactly(0.0)),
        Evaluation(step=5, reward=1.5, kl=2.0, objective=1.4, gain=Estimate(value=0.9, low=0.25, high=1.5)),
        Evaluation(
            step=8, reward=1.75, kl=9.0, objective=1.3, gain=Estimate(value=0.8, low=-0.125, high=1.75)
        ),
    ),
)
PLOTTED = replace(
    VIEW,
    update_steps=[(0, {"objective/scores": 0.1})],
    calibration=[CalibrationPoint(0.7, 0.6, 12)],
    scores={"proxy": Scores([0.0, 1.0], [1.0, 2.0])},
)
ENDED_EARLY = replace(
    VIEW,
    outcome="reward_model_rejected",
    stages=[],
    gates=judge(
        [Gate(metric="reward_model/accuracy", direction="above", bound=0.65)], VIEW.reward_model_metrics
    ),
    accuracy_by_round={},
    comparison={},
    samples=[],
    links={},
)


def _page(view: RoundView, folder: Path) -> str:
    return write_report(view, folder).read_text()


def _row(page: str, first: str) -> list[str]:
    """The other cells of the one row that starts with `first`."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_the_decision_is_the_first_sentence(tmp_path: Path) -> None:
    title, _, decision, *_ = _page(VIEW, tmp_path).splitlines()
    assert title == "# quickstart, round 2"
    assert decision == "**Promoted**: the candidate is the new champion. All 1 gates passed."


def test_a_rejection_names_every_gate_that_failed_and_no_other(tmp_path: Path) -> None:
    gates = judge([WIN_RATE, DISTINCT, WIN_RATE.model_copy(update={"bound": 0.6})], COMPARISON)
    page = _page(replace(VIEW, outcome="rejected", gates=gates), tmp_path)
    assert page.splitlines()[2:6] == [
        "**Rejected**: the champion stays in service. Gates failed, 2 of 3:",
        "",
        r"- eval/distinct\_2\_over\_initial was not measured: failed",
        r"- eval/win\_rate is 0.61, lower end 0.53; must be above 0.6: failed",
    ]
    assert _row(page, r"eval/win\_rate &gt; 0.6") == ["0.53", "**failed**"]
    assert _row(page, r"eval/win\_rate &gt; 0.5") == ["0.53", "passed"]
    assert _row(page, r"eval/distinct\_2\_over\_initial &gt; 0.8") == ["not measured", "**failed**"]


def test_a_round_that_ended_before_its_policy_says_what_it_lacks(tmp_path: Path) -> None:
    page = _page(ENDED_EARLY, tmp_path)
    assert page.splitlines()[2].startswith("**Reward model rejected**: no policy was trained")
    policy_table = page[page.index("## The policy") : page.index("## The reward model")]
    cells = [line.split("|")[2].strip() for line in policy_table.splitlines() if line.startswith("| ")][2:]
    assert len(cells) > 10 and set(cells) == {"not measured"}
    for heading in ("Plots", "Samples"):
        assert f"## {heading}\n\nnot measured\n" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]


def test_a_round_after_a_rebase_says_what_its_initial_policy_is(tmp_path: Path) -> None:
    said = "The project was rebased after round 3: the initial policy is the champion of then"
    page = _page(replace(VIEW, rebased_after=3), tmp_path)
    assert page.splitlines()[4].startswith(said)
    assert said in (tmp_path / "report.html").read_text()
    assert "rebased" not in _page(VIEW, tmp_path) + (tmp_path / "report.html").read_text()


def test_an_end_without_a_sentence_of_its_own_is_named(tmp_path: Path) -> None:
    page = _page(replace(ENDED_EARLY, outcome="stale", gates=[]), tmp_path)
    assert page.splitlines()[2] == "Ended as **stale**. No gate was judged."


def test_numbers_stand_beside_their_intervals_and_a_missing_one_is_said_to_be_missing(tmp_path: Path) -> None:
    page = _page(VIEW, tmp_path)
    assert _row(page, "win rate against the champion") == ["0.61", "0.53 to 0.69"]
    assert _row(page, "gold, champion (before)") == ["0.1235", "0.1 to 0.15"]
    assert _row(page, "perplexity of its text, over the initial policy's") == ["1.25", ""]
    assert _row(page, "gold, candidate (after)") == ["not measured", ""]
    assert _row(page, "accuracy on held-out pairs") == ["0.7", "0.6 to 0.8"]
    assert _row(page, "the same pairs, the longer one taken") == ["not measured", ""]
    assert _row(page, "accuracy on labels of round 1") == ["0.65", "0.5 to 0.8"]
    assert page.index("labels of round 1") < page.index("labels of round 2")


def test_stages_are_shown_with_seconds_and_short_digests(tmp_path: Path) -> None:
    page = _page(VIEW, tmp_path)
    assert _row(page, r"policy\_update") == ["no", "12.3", "critic ba9876543210, policy 0123456789ab"]
    assert _row(page, "measurement.champion".replace(".", "\u2060.\u2060")) == ["yes", "0.0", ""]


def test_every_image_is_a_file_beside_the_page(tmp_path: Path) -> None:
    page = _page(PLOTTED, tmp_path)
    names = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert {*names, "report.md", "report.html"} == {path.name for path in tmp_path.iterdir()}
    assert len(names) == 6


def test_links_and_commands_are_told_apart(tmp_path: Path) -> None:
    html = RENDERER.render(_page(VIEW, tmp_path))
    assert '<a href="http://localhost/runs?a=1&amp;b=2">MLflow</a>' in html
    assert "again: <code>rlhf status quickstart</code>" in html


def test_ten_samples_are_shown_and_an_empty_text_is_said_to_be_empty(tmp_path: Path) -> None:
    samples = [Sample(f"prompt{i}", f"old{i}", "") for i in range(12)]
    page = _page(replace(VIEW, samples=samples), tmp_path)
    assert "**10.** prompt9\n\n- before: old9\n- after: *(empty)*" in page
    assert "prompt10" not in page


def test_alarms_are_shown_where_there_are_any(tmp_path: Path) -> None:
    assert "## Alarms" not in _page(VIEW, tmp_path)
    assert "## Alarms\n\n- step 3: KL\n- &lt;b&gt;\n" in _page(
        replace(VIEW, alarms=["step 3: KL", "<b>"]), tmp_path
    )


def test_every_monitor_has_a_row_and_what_to_change_stands_beside_those_that_raised_an_alarm(
    tmp_path: Path,
) -> None:
    assert "## Monitors" not in _page(VIEW, tmp_path)
    page = _page(replace(VIEW, monitors=MONITORS), tmp_path)
    said = "6 steps watched by 4 monitors; 2 raised an alarm. The monitor kl ended the stage."
    assert f"## Monitors\n\n{said}" in page
    assert _row(page, "kl") == ["stop", "since step 5", "KL: 0.6 at step 5 (limit 0.5)", r"raise \`z\`"]
    over = ["warn", "over; first at step 2", "growth: 9.25 at step 3 (limit 8)", "read &lt;them&gt;"]
    assert _row(page, "phrases") == over
    assert _row(page, "gold") == ["warn", "ok", "trend: -1.5 at step 4 (limit -3)", ""]
    assert _row(page, "entropy") == ["off", "off", "", ""]
    order = [page.index(f"| {name} |") for name in ("kl", "phrases", "entropy", "gold")]
    assert order == sorted(order)  # what is on, what was on, then the rest as the settings have them
    assert "- **phrases, step 2**: 'so &lt;b&gt;'\n" in page


@pytest.mark.parametrize(
    "hostile",
    [
        "</td></table><script>alert(1)</script>",
        "![x](http://evil.example/x.png)",
        "\n\n# heading\n\n| a | b |\n|---|---|\n",
        "``` \n```\n<iframe>",
        "[x]: http://evil.example\n\n[MLflow]: http://evil.example",
        "a\u202eb" * 1000,
    ],
)
def test_hostile_text_changes_nothing_of_the_page_but_text(hostile: str, tmp_path: Path) -> None:
    def structure(sample: str) -> list[str]:
        alarm = MONITORS.alarms[0].model_copy(update={"examples": (sample,)})
        seen = MONITORS.model_copy(update={"alarms": (alarm,)})
        view = replace(VIEW, samples=[Sample(sample, sample, sample)], alarms=[sample], monitors=seen)
        blocks = RENDERER.parse(_page(view, tmp_path))
        kinds = [kind for block in blocks for kind in (block.type, *(t.type for t in block.children or []))]
        return [kind for kind in kinds if kind not in ("text", "softbreak")]

    assert structure(hostile) == structure("harmless")


def test_the_same_view_gives_the_same_files(tmp_path: Path) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        write_report(PLOTTED, folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_the_steps_that_were_evaluated_are_shown_with_the_one_that_was_chosen(tmp_path: Path) -> None:
    assert "## The candidate" not in _page(VIEW, tmp_path)
    page = _page(replace(VIEW, selection=SELECTION), tmp_path)
    assert "## The candidate\n\nThe candidate is the policy after 5 of 8 steps.\n" in page
    assert _row(page, "0") == ["+0.5", "0", "+0", "+0 to +0", "start"]
    assert _row(page, "5") == ["+1.5", "2", "+0.9", "+0.25 to +1.5", "chosen"]
    assert _row(page, "8") == ["+1.75", "9", "+0.8", "-0.125 to +1.75", ""]


def test_where_nothing_was_evaluated_the_sentence_stands_alone(tmp_path: Path) -> None:
    page = _page(replace(VIEW, selection=last_step(8)), tmp_path)
    assert "policy after 8 of 8 steps: \\`candidate\\` is set to \\`last\\`.\n\n## Plots" in page
