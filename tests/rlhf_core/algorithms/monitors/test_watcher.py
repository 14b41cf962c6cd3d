"""The watcher: an alarm is said once, counted, and said to be over; a resumed one says the same."""

import json
import random
from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch

from flows.settings import load_run_file
from rlhf_core.alarms import Action, Alarm
from rlhf_core.algorithms.monitors import Monitors, Watcher
from rlhf_core.algorithms.monitors.looking import Monitor
from rlhf_core.algorithms.monitors.updates import ClipFraction, EntropyCollapse, RisingKL
from tests.rlhf_core.algorithms.monitors.steps import TEXTS, Step, a_step, play, series
from tests.rlhf_core.stages.chain import RUN_FILE

CLIP = ClipFraction(share=0.5)
HIGH, LOW = 0.9, 0.1


def clipped(*values: float, monitor: Monitor = CLIP) -> list[tuple[int, bool]]:
    """(step, over) of everything said."""
    return [(alarm.step, alarm.over) for alarm in play(monitor, series("policy/clipfrac", *values))]


def test_an_alarm_is_said_when_it_begins_and_when_three_calm_steps_have_passed() -> None:
    assert clipped(LOW, HIGH, HIGH, HIGH, HIGH, LOW, LOW, LOW, LOW) == [(1, False), (7, True)]


def test_an_alarm_that_comes_and_goes_is_one_alarm() -> None:
    assert clipped(HIGH, LOW, LOW, HIGH, LOW, HIGH, LOW, LOW) == [(0, False)]


def test_an_alarm_waits_for_as_many_steps_in_a_row_as_its_setting_says() -> None:
    patient = ClipFraction(share=0.5, steps=3)
    assert clipped(HIGH, HIGH, LOW, HIGH, HIGH, monitor=patient) == []
    assert clipped(HIGH, HIGH, HIGH, HIGH, monitor=patient) == [(2, False)]


def test_the_same_alarm_is_said_three_times_and_counted_from_then_on() -> None:
    watcher = Watcher({"clip": CLIP})
    wave = [HIGH, LOW, LOW, LOW] * 50
    said = [
        alarm
        for step, (found, metrics) in enumerate(series("policy/clipfrac", *wave))
        for alarm in watcher.step(step, found, metrics)
    ]
    assert [(alarm.step, alarm.over) for alarm in said] == [
        (0, False), (3, True), (4, False), (7, True), (8, False), (11, True),
    ]  # fmt: skip
    first, again, last = (alarm.sentence for alarm in said if not alarm.over)
    assert CLIP.why in first and "learning_rate" in first
    assert again == "again, time 2: clipped share of tokens is 0.9, above 0.5."
    assert last == "again, time 3; further ones are counted only: clipped share of tokens is 0.9, above 0.5."
    (record,) = watcher.report().monitors
    assert (record.first, record.since, record.steps) == (0, None, 50)


def test_a_sentence_says_what_is_wrong_why_it_matters_and_what_to_change() -> None:
    (alarm,) = play(EntropyCollapse(steps=2), series("objective/entropy", 3.0, 1.0, 0.6))
    assert alarm.sentence == (
        "entropy over the first step's is 0.2, below 0.4, for 2 steps. A policy that is sure of every token "
        "samples nothing new, and cannot learn further. Raise `policy_update.algorithm.kl_coef`, lower "
        "`policy_update.algorithm.learning_rate` or `num_steps`, and look at what the reward pays for."
    )
    assert alarm.line.startswith("step 2: it: entropy over the first step's is 0.2")


def test_a_monitor_that_may_stop_says_so_and_ends_the_stage() -> None:
    watcher = Watcher({"clip": ClipFraction(share=0.5, action=Action.STOP), "other": CLIP})
    found, metrics = a_step({"policy/clipfrac": LOW})
    assert watcher.step(0, found, metrics) == [] and watcher.ended is None
    first, second = watcher.step(1, found, {"policy/clipfrac": HIGH})
    assert (first.severity, second.severity) == ("stop", "warn")
    assert first.sentence.endswith("The stage ends here, and its candidate is not promoted.")
    assert watcher.ended == "monitor:clip"
    assert watcher.report().ended_by == "clip"


def test_a_warning_ends_nothing() -> None:
    watcher = Watcher({"clip": CLIP})
    assert watcher.step(0, *a_step({"policy/clipfrac": HIGH}))
    assert watcher.ended is None and watcher.report().ended_by is None
    assert watcher.num_alarmed == 1


def test_a_monitor_that_is_off_says_nothing_and_is_shown_as_off() -> None:
    watcher = Monitors(clip_fraction=ClipFraction(action=Action.OFF)).build()
    assert watcher.step(0, *a_step({"policy/clipfrac": 1.0})) == []
    states = {record.monitor: record.state for record in watcher.report().monitors}
    assert states["clip_fraction"] == "off"
    assert states["gold"] == "nothing to look at"
    assert states["kl"] == "ok"
    assert list(states) == list(Monitors.model_fields)


def test_the_report_keeps_the_worst_value_of_each_number_and_what_is_still_on() -> None:
    watcher = Watcher({"clip": CLIP, "entropy": EntropyCollapse()})
    for step, (clip, entropy) in enumerate([(0.2, 3.0), (0.7, 1.5), (0.6, 2.0)]):
        watcher.step(step, *a_step({"policy/clipfrac": clip, "objective/entropy": entropy}))
    clip_record, entropy_record = watcher.report().monitors
    assert (clip_record.state, clip_record.worst[0].spoken) == (
        "since step 1", "clipped share of tokens: 0.7 at step 1 (limit 0.5)",
    )  # fmt: skip
    assert entropy_record.worst[0].spoken == "entropy over the first step's: 0.5 at step 1 (limit 0.4)"
    assert entropy_record.state == "ok"


def test_the_worst_value_is_one_that_could_have_been_an_alarm_where_there_is_any() -> None:
    watcher = Watcher({"kl": RisingKL(per_token=0.5, window=1)})
    for step, (kl, worst) in enumerate(
        [
            (0.9, "0.9 at step 0 (limit 0.5; the rest of the condition did not hold)"),  # it did not rise
            (0.2, "0.9 at step 0 (limit 0.5; the rest of the condition did not hold)"),
            (0.3, "0.3 at step 2 (limit 0.5)"),
            (0.4, "0.4 at step 3 (limit 0.5)"),
            (0.35, "0.4 at step 3 (limit 0.5)"),
        ]
    ):
        watcher.step(step, *a_step(log_ratio=kl))
        (record,) = watcher.report().monitors
        assert record.worst[0].spoken == f"KL to the reference in nats a token: {worst}"


@pytest.mark.parametrize("monitor", Monitors.model_fields)
def test_every_monitor_has_an_action_words_and_advice_that_names_a_setting(monitor: str) -> None:
    one = Monitors().by_name()[monitor]
    assert one.action is Action.WARN
    assert one.why and not one.why.endswith(".")
    assert "`" in one.advice and not one.advice.endswith(".")


def test_every_setting_that_an_advice_names_exists() -> None:
    known = set(json.dumps(load_run_file(RUN_FILE).to_json()).split('"'))
    for name, monitor in Monitors().by_name().items():
        for path in monitor.advice.split("`")[1::2]:
            if "/" not in path:  # a metric
                assert known.issuperset({*path.split(".")} - {"stop", "null"}), (name, path)


def test_off_in_a_run_file_is_off_and_not_false() -> None:
    settings = load_run_file(
        RUN_FILE, ["policy_update.monitors.kl.action=off", "policy_update.monitors.gold={action: stop}"]
    )
    assert settings.policy_update.monitors.kl.action is Action.OFF
    assert settings.policy_update.monitors.gold.action is Action.STOP
    assert settings.policy_update.monitors.length.action is Action.WARN


# Going on


def stormy(num_steps: int, seed: int) -> list[Step]:
    """Steps that make every kind of monitor speak now and then."""
    draw = random.Random(seed)
    names = (
        "policy/clipfrac",
        "policy/approxkl_max",
        "objective/scores",
        "objective/gold",
        "objective/entropy",
    )
    names += ("value/error", "value/explained_variance", "rollout/response_length", "rollout/duplicates")
    steps = []
    for step in range(num_steps):
        glad = [f"{text} so happy" if draw.random() < step / num_steps else text for text in TEXTS]
        metrics = {name: draw.choice((0.01, 0.5, 1.0, 9.0)) for name in names}
        metrics |= {"value/explained_variance": draw.uniform(-2, 0.2), "rollout/stop.length": draw.random()}
        metrics |= {"objective/scores": step + draw.random(), "objective/gold": -step + draw.random()}
        scores = [draw.choice((0.0, 0.1, 5.0)) for _ in glad]
        steps.append(a_step(metrics, texts=glad, scores=scores, log_ratio=draw.uniform(-0.4, 1.5)))
    return steps


def watched(watcher: Watcher, steps: Sequence[Step], first: int = 0) -> list[Alarm]:
    return [
        alarm for n, (found, metrics) in enumerate(steps, first) for alarm in watcher.step(n, found, metrics)
    ]


@pytest.mark.parametrize("cut", [0, 1, 5, 11, 23])
def test_a_watcher_that_goes_on_from_a_checkpoint_says_what_an_undisturbed_one_says(cut: int) -> None:
    steps = stormy(24, seed=3)
    straight = Monitors().build()
    whole = watched(straight, steps)
    assert len({alarm.monitor for alarm in whole}) >= 10 and any(alarm.over for alarm in whole)

    before = Monitors().build()
    said = watched(before, steps[:cut])
    kept = json.dumps(before.state_dict(), allow_nan=False)
    resumed = Monitors().build()
    resumed.load_state_dict(json.loads(kept))
    assert said + watched(resumed, steps[cut:], cut) == whole
    assert resumed.report() == straight.report()
    assert resumed.state_dict() == straight.state_dict()


def test_a_state_does_not_change_with_the_watcher_it_was_taken_from() -> None:
    steps, watcher = stormy(8, seed=1), Monitors().build()
    watched(watcher, steps[:4])
    state = watcher.state_dict()
    copy = deepcopy(state)
    watched(watcher, steps[4:], 4)
    assert state == copy != watcher.state_dict()


def test_the_state_of_other_monitors_is_refused() -> None:
    state = Monitors(kl=Monitors().kl.model_copy(update={"action": Action.OFF})).build().state_dict()
    with pytest.raises(ValueError, match="a resumed stage would alarm otherwise"):
        Monitors().build().load_state_dict(state)
    with pytest.raises(ValueError, match="schema 7"):
        Monitors().build().load_state_dict({**Monitors().build().state_dict(), "schema": 7})
    with pytest.raises(ValueError, match="no state of monitors"):
        Monitors().build().load_state_dict({"weights": 3})


def test_watching_changes_no_tensor_and_draws_no_random_number() -> None:
    steps = stormy(6, seed=2)
    tensors = [
        {k: v.clone() for k, v in vars(found.batch).items() if isinstance(v, torch.Tensor)}
        for found, _ in steps
    ]
    metrics = [dict(those) for _, those in steps]
    python, pytorch = random.getstate(), torch.get_rng_state()
    watched(Monitors().build(), steps)
    assert random.getstate() == python and torch.equal(torch.get_rng_state(), pytorch)
    for (found, now), before, then in zip(steps, tensors, metrics, strict=True):
        assert now == then
        assert all(torch.equal(getattr(found.batch, name), tensor) for name, tensor in before.items())
