import pytest

from rlhf_core.alarms import Action, MonitorRecord, WorstReading

SEEN = (WorstReading(what="KL", value=0.1, step=2, limit=0.5, side="above"),)


@pytest.mark.parametrize(
    ("known", "state"),
    [
        ({"worst": SEEN}, "ok"),
        ({}, "nothing to look at"),
        ({"worst": SEEN, "first": 2, "since": 2, "steps": 4}, "since step 2"),
        ({"worst": SEEN, "first": 2, "since": 7, "steps": 4}, "since step 7"),
        ({"worst": SEEN, "first": 2, "steps": 4}, "over; first at step 2"),
        ({"action": Action.OFF}, "off"),
    ],
)
def test_a_monitor_is_in_one_state(known: dict[str, object], state: str) -> None:
    given = {"monitor": "kl", "action": Action.WARN, "advice": "less", **known}
    assert MonitorRecord.model_validate(given).state == state
