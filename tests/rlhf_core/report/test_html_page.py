import re
from dataclasses import replace

import pytest

from rlhf_core.gates import Estimate, Gate, judge
from rlhf_core.ledger import GateResult
from rlhf_core.records import LookedAt, StopReason, Token
from rlhf_core.report import RoundView, Sample
from rlhf_core.report.contents import figures
from rlhf_core.report.html_page import html_page
from rlhf_core.selection import last_step
from tests.rlhf_core.report.parsed import events
from tests.rlhf_core.report.test_page import (
    COMPARISON,
    DISTINCT,
    ENDED_EARLY,
    MONITORS,
    PLOTTED,
    SELECTION,
    VIEW,
    WIN_RATE,
)

VOID = {"meta"}


def page(view: RoundView) -> str:
    return html_page(view, list(figures(view)))


def _words(markup: str) -> str:
    """What is read, a space between any two elements."""
    shown, unread = [], 0
    for kind, content, _ in events(markup):
        unread += {"start": 1, "end": -1}.get(kind, 0) if content in ("style", "head") else 0
        shown += [content] if kind == "text" and not unread else []
    return re.sub(r"\s+", " ", " ".join(shown))


def test_the_decision_comes_first_with_the_sentence_of_every_failed_gate() -> None:
    gates = judge([WIN_RATE, DISTINCT, WIN_RATE.model_copy(update={"bound": 0.6})], COMPARISON)
    assert _words(page(replace(VIEW, outcome="rejected", gates=gates))).startswith(
        " quickstart, round 2 Rejected : the champion stays in service. Gates failed, 2 of 3: "
        "eval/distinct_2_over_initial was not measured: failed "
        "eval/win_rate is 0.61, lower end 0.53; must be above 0.6: failed Key numbers"
    )
    assert " Promoted : the candidate is the new champion. All 1 gates passed. " in _words(page(VIEW))


def test_an_end_without_a_sentence_of_its_own_is_named() -> None:
    assert "Ended as <stale> . No gate was judged." in _words(
        page(replace(ENDED_EARLY, outcome="<stale>", gates=[]))
    )


def test_key_numbers_stand_beside_their_intervals_and_missing_ones_are_said_to_be_missing() -> None:
    before_and_after = {**COMPARISON, "eval/gold_after": Estimate(value=0.3, low=0.2, high=0.4)}
    words = _words(page(replace(VIEW, comparison=before_and_after)))
    assert "Gold, champion to candidate 0.1235 → 0.3 0.1 to 0.15; 0.2 to 0.4" in words
    assert "Gold, candidate minus champion not measured" in words
    assert "Win rate against the champion 0.61 0.53 to 0.69" in words
    assert "Gold, champion to candidate not measured" in _words(page(VIEW))  # one of two is no comparison


def test_a_gate_is_drawn_with_its_bound_and_a_missing_one_is_not() -> None:
    gates = judge([WIN_RATE, DISTINCT], COMPARISON)
    markup = page(replace(VIEW, gates=gates))
    rows = re.findall(r"<tr>.*?</tr>", markup[markup.index('class="gates"') :])[1:3]
    assert [row.count("<svg") for row in rows] == [1, 0]
    assert "eval/win_rate &gt; 0.5" in rows[0] and "passed</span>" in rows[0]
    assert "not measured" in rows[1] and "failed</span>" in rows[1]
    # The interval ends at 0.53 and 0.69 and the bound is 0.5: what is above it is shaded.
    assert re.search(r'<rect x="8\.0" y="0" width="192\.0"', rows[0])


def test_a_gate_below_its_bound_is_shaded_on_the_left() -> None:
    gates = judge([Gate(metric="eval/win_rate", direction="below", bound=0.9)], COMPARISON)
    assert re.search(r'<rect x="0\.0" y="0" width="192\.0"', page(replace(VIEW, gates=gates)))


def test_every_plot_says_how_it_is_read() -> None:
    markup, plots = page(PLOTTED), list(figures(PLOTTED))
    assert len(plots) == 6 == markup.count("<figcaption>")
    for plot in plots:
        assert plot.title in _words(markup) and plot.reading in _words(markup)


def test_differences_are_marked_and_an_empty_text_is_said_to_be_empty() -> None:
    view = replace(VIEW, samples=[Sample("It", "was so good then", "was so bad then"), Sample("x", "y", "")])
    markup = page(view)
    assert "was so <del>good </del>then" in markup and "was so <ins>bad </ins>then" in markup
    assert "<i>(empty)</i>" in markup


def test_ten_samples_are_shown() -> None:
    words = _words(page(replace(VIEW, samples=[Sample(f"prompt{i}", "old", "new") for i in range(12)])))
    assert "prompt9" in words and "prompt10" not in words


def test_a_round_that_ended_before_its_policy_says_what_it_lacks() -> None:
    words = _words(page(ENDED_EARLY))
    assert "Plots not measured" in words and "Samples not measured" in words
    assert "No stage is finished." in words


def test_a_stage_is_as_wide_as_it_was_long_and_a_reused_one_has_no_bar() -> None:
    markup = page(VIEW)
    assert markup.count('class="bar"') == 1 and 'style="width: 5.00rem"' in markup
    assert "measurement.champion reused" in _words(markup)


def test_alarms_are_shown_where_there_are_any() -> None:
    assert "<h2>Alarms" not in page(VIEW)
    assert "Alarms step 3: <b>" in _words(page(replace(VIEW, alarms=["step 3: <b>"])))


def test_the_monitors_are_a_table_with_those_that_raised_an_alarm_first() -> None:
    assert "<h2>Monitors" not in page(VIEW)
    markup = page(replace(VIEW, monitors=MONITORS))
    assert "6 steps watched by 4 monitors; 2 raised an alarm. The monitor kl ended the stage." in _words(
        markup
    )
    rows = re.findall(r"<tr>.*?</tr>", markup[markup.index('class="monitors"') :])[1:5]
    assert [re.sub(r"<[^>]*>", " ", row).split()[0] for row in rows] == ["kl", "phrases", "entropy", "gold"]
    assert "stop since step 5 KL: 0.6 at step 5 (limit 0.5) raise `z`" in _words(rows[0])
    tones = [re.findall(r'class="(result[^"]*)"', row)[0].strip() for row in rows]
    assert tones == ["result failed", "result failed", "result", "result passed"]
    assert "Examples phrases, step 2 : 'so <b>'" in _words(markup)


def test_the_steps_that_were_evaluated_are_a_table_with_the_chosen_one_marked() -> None:
    assert "<h2>The candidate" not in page(VIEW)
    words = _words(page(replace(VIEW, selection=SELECTION)))
    assert "The candidate is the policy after 5 of 8 steps. after steps reward KL" in words
    assert "0 +0.5 0 +0 +0 to +0 start 5 +1.5 2 +0.9 +0.25 to +1.5 chosen 8 +1.75 9 +0.8" in words
    alone = page(replace(VIEW, selection=last_step(8)))
    assert "is set to `last`." in _words(alone) and 'class="selection"' not in alone


def test_a_gate_without_an_interval_shows_the_value_it_was_judged_by() -> None:
    gate = GateResult(
        name="policy/ended_by_monitor < 1", value=1.0, bound=1.0, passed=False, sentence="it did"
    )
    assert "policy/ended_by_monitor < 1 1 failed" in _words(page(replace(VIEW, gates=[gate])))


def test_settings_keep_their_lines() -> None:
    settings = 'a: 1\nb:\n  - "</pre><x>"\n'
    assert ("text", settings, ()) in events(page(replace(VIEW, settings_yaml=settings)))


def test_every_element_is_closed_in_order() -> None:
    open_ones: list[str] = []
    for kind, name, _ in events(page(PLOTTED)):
        if kind == "start" and name not in VOID:
            open_ones.append(name)
        elif kind == "end":
            assert open_ones.pop() == name
    assert not open_ones


def test_the_page_asks_nothing_of_the_network_and_runs_nothing() -> None:
    found = events(page(replace(PLOTTED, links={})))
    assert not {name for kind, name, _ in found if kind == "start"} & {
        *("script", "link", "img", "iframe", "object", "embed", "form", "base", "a"),
    }
    attributes = [(name, value or "") for _, _, those in found for name, value in those]
    assert not [name for name, _ in attributes if name.startswith("on") or name == "src"]
    assert all(value.startswith("#") for name, value in attributes if name.endswith("href"))
    assert "@import" not in page(PLOTTED)
    policies = [those for _, name, those in found if ("http-equiv", "Content-Security-Policy") in those]
    assert len(policies) == 1 and "default-src 'none'" in str(policies[0])


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        "</style></title></head><body onload=alert(1)>",
        "</pre></details></del></ins></p></article><h1>x",
        '" onmouseover="alert(1)',
        "' style='position:fixed",
        "&quot;&lt;script&gt;&#60;b&#62;",
        "javascript:alert(1)",
        "<!-- <![CDATA[ <?xml",
        "<svg><style>*{display:none}</style>",
        "a\u202eb\u2066c\0\x1b[31m\ud800",
    ],
)
def test_hostile_text_changes_nothing_of_the_page_but_text(hostile: str) -> None:
    def structure(written: str) -> list[tuple[str, str, object]]:
        view = replace(
            VIEW,
            project=written,
            outcome=written,
            alarms=[written],
            samples=[Sample(written, written, "other"), Sample(written, "", written)],
            gates=[GateResult(name=f"{written} > 1", value=0.0, bound=1.0, passed=False, sentence=written)],
            links={written: written},
            settings_yaml=written,
            monitors=MONITORS.model_copy(
                update={"alarms": (MONITORS.alarms[0].model_copy(update={"examples": (written,)}),)}
            ),
        )
        found = events(page(view))
        return [(kind, name, [key for key, _ in those]) for kind, name, those in found if kind != "text"]

    assert structure(hostile) == structure("harmless")
    words = _words(page(replace(VIEW, samples=[Sample(hostile, "", hostile)], alarms=[hostile])))
    assert not re.search("[\u202a-\u202e\u2066-\u2069\0\x1b\ud800-\udfff]", words)


def test_dark_and_light_name_the_same_colours_and_all_that_are_used_are_named() -> None:
    style = re.search(r"<style>(.*?)</style>", page(VIEW), re.DOTALL)
    assert style
    schemes = re.findall(r":root \{([^}]*)\}", style[1])
    light, dark, paper = (dict(re.findall(r"--(\w+): (#\w+);", scheme)) for scheme in schemes)
    assert light == paper and light.keys() == dark.keys()
    used = set(re.findall(r"var\(--(\w+)\)", page(PLOTTED)))
    assert used - {"tone", "share"} <= light.keys()


def _luminance(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_colour_of_text_is_read_on_its_ground_in_light_and_dark() -> None:
    schemes = re.findall(r":root \{([^}]*)\}", page(VIEW))
    for scheme in (dict(re.findall(r"--(\w+): (#\w+);", found)) for found in schemes):
        grounds = {ink: ("paper", "card") for ink in ("muted", "blue", "vermilion", "green")}
        for ink, behind in {**grounds, "ink": ("paper", "card", "gone", "come")}.items():
            for ground in behind:
                light, dark = sorted((_luminance(scheme[ink]), _luminance(scheme[ground])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)


def _looked_at(step: int, text: str, tokens: list[Token]) -> LookedAt:
    return LookedAt(
        step=step, prompt="<b>It", text=text, score=0.5, kl=1.25, length=2, stop=StopReason.EOS, tokens=tokens
    )


def test_tokens_are_coloured_by_their_share_of_the_largest_and_their_text_is_inert() -> None:
    tokens = [
        Token(text="<script>", kl=-0.5, advantage=2.0, value=0.0),
        Token(text="", kl=1.0, advantage=-1.0, value=0.0),
    ]
    markup = page(replace(VIEW, looked_at=[_looked_at(0, "early", []), _looked_at(7, "<i>late", tokens)]))
    assert "<script>" not in markup and "<i>late" not in markup and "<b>It" not in markup
    spans = re.findall(
        r'<span class="(up|down)" style="--share: (\d+)%" title="([^"]+)">([^<]*)</span>', markup
    )
    assert spans == [
        ("down", "50", "KL -0.500", "&lt;script&gt;"), ("up", "100", "KL +1.000", "⟨end⟩"),
        ("up", "100", "advantage +2.000", "&lt;script&gt;"), ("down", "50", "advantage -1.000", "⟨end⟩"),
        ("down", "0", "value +0.000", "&lt;script&gt;"), ("down", "0", "value +0.000", "⟨end⟩"),
    ]  # fmt: skip
    words = _words(markup)
    assert "step 7, score +0.500, KL 1.25, 2 tokens, eos" in words
    assert "0 <b>It early +0.500 1.25 2 (eos)" in words and "7 <b>It <i>late +0.500 1.25 2 (eos)" in words


def test_without_completions_that_were_kept_there_is_no_such_section() -> None:
    assert "Token by token" not in page(VIEW)
