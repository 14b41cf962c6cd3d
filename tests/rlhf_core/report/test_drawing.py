import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from rlhf_core.report.drawing import PALETTE, save_png, svg
from rlhf_core.report.plots import calibration, gold_and_proxy, histograms, kl
from rlhf_core.report.view import CalibrationPoint, Scores, Steps

STEPS: Steps = [(step, {"objective/scores": 0.1 * step, "objective/kl": 0.2 * step}) for step in range(3)]
FIGURES = {
    "reward": gold_and_proxy(STEPS),
    "kl": kl(STEPS),
    "scores": histograms({"proxy": Scores([0.0, 1.0], [1.0, 2.0])}),
    "calibration": calibration([CalibrationPoint(0.6, 0.5, 30)]),
}
NAMED = pytest.mark.parametrize(("name", "figure"), FIGURES.items(), ids=list(FIGURES))


def test_one_figure_gives_one_file_to_the_byte(tmp_path: Path) -> None:
    for name in ("first", "second"):
        save_png(kl(STEPS), tmp_path / name)
    first = (tmp_path / "first").read_bytes()
    assert first == (tmp_path / "second").read_bytes()
    assert b"Software" not in first


def test_one_figure_gives_one_markup_to_the_byte_and_no_date() -> None:
    assert svg(gold_and_proxy(STEPS), "reward") == svg(gold_and_proxy(STEPS), "reward")
    assert "metadata" not in svg(gold_and_proxy(STEPS), "reward")


@NAMED
def test_the_colours_are_the_pages_own_so_that_they_turn_with_it(name: str, figure: Figure) -> None:
    drawn = svg(figure, name)
    assert not re.findall(r"#[0-9a-f]{6}\b", drawn)
    used = set(re.findall(r"var\(--(\w+)\)", drawn))
    assert used and used <= set(PALETTE.values())


@NAMED
def test_text_stays_text(name: str, figure: Figure) -> None:
    root = ElementTree.fromstring(svg(figure, name))
    texts = {"".join(found.itertext()) for found in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {axes.get_title(loc="left") for axes in figure.axes} <= texts


def test_two_figures_of_a_page_share_no_id_and_style_nothing_else() -> None:
    ids = [set(re.findall(r' id="([^"]*)"', svg(figure, name))) for name, figure in FIGURES.items()]
    assert all(ids)
    assert sum(map(len, ids)) == len(set.union(*ids))
    assert not any("<style" in svg(figure, name) for name, figure in FIGURES.items())


@NAMED
def test_every_reference_stays_within_the_figure(name: str, figure: Figure) -> None:
    drawn = svg(figure, name)
    referred = set(re.findall(r'xlink:href="#([^"]*)"', drawn)) | set(re.findall(r"url\(#([^)]*)\)", drawn))
    assert referred <= set(re.findall(r' id="([^"]*)"', drawn))
    assert "href" not in re.sub(r'xlink:href="#', "", drawn)
