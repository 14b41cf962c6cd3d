import re

from rlhf_core.gates import Estimate
from rlhf_core.report.whiskers import whiskers


def _numbers(drawn: str, element: str, *names: str) -> list[tuple[float, ...]]:
    """The named attributes of every such element."""
    found = re.findall(rf"<{element}([^>]*)>", drawn)
    return [tuple(float(re.search(rf' {n}="([^"]*)"', f)[1]) for n in names) for f in found]  # type: ignore[index]


def test_number_interval_and_bound_share_a_scale() -> None:
    drawn = whiskers(
        [Estimate(value=0.6, low=0.4, high=0.8)], "win rate", bound=0.5, allowed="above"
    )  # 0.4 to 0.8 over 184 points, 8 from the left: 460 a unit, so 0.5 is at 8 + 46 and 0.6 at 8 + 92.
    assert _numbers(drawn, "circle", "cx", "cy") == [(100.0, 9.0)]
    assert _numbers(drawn, "line", "x1", "x2") == [(54.0, 54.0), (8.0, 192.0)]
    assert _numbers(drawn, "rect", "x", "width") == [(54.0, 146.0)]
    assert "<title>win rate</title>" in drawn


def test_the_side_below_a_bound_is_the_left_one() -> None:
    drawn = whiskers([Estimate.exactly(0.0)], "KL", bound=40.0, allowed="below")
    assert _numbers(drawn, "rect", "x", "width") == [(0.0, 192.0)]
    assert _numbers(drawn, "circle", "cx") == [(8.0,)]


def test_two_estimates_have_a_row_each_on_one_scale() -> None:
    drawn = whiskers([Estimate.exactly(0.0), Estimate.exactly(1.0)], "gold")
    assert _numbers(drawn, "circle", "cx", "cy") == [(8.0, 9.0), (192.0, 27.0)]
    assert 'viewBox="0 0 200 36"' in drawn


def test_one_value_alone_stands_in_the_middle() -> None:
    assert _numbers(whiskers([Estimate.exactly(3.0)], "KL", bound=3.0), "circle", "cx") == [(100.0,)]
