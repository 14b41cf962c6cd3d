"""What each knob of PPO does to reward, KL and variety: one knob at a time, a real small model, three seeds.

    python -m tests.benchmarks.sensitivity [--stories DIR] [--openings FILE] [--processes 2]

The policy is stories260k, a Llama of 260,032 parameters that writes stories for children. It continues the
first ten words of stories, and the reward is how glad that sounds (VADER), straight, so that what is seen is
PPO's doing and no reward model's. Writes `sensitivity.json` (every run), `sensitivity.png` and
`sensitivity.md` (its table). Minutes on two cores; the same numbers in every run on one machine.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.algorithms.ppo import PPO
from rlhf_core.generation import Sampling
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.metrics import Spool, read_lines
from rlhf_core.models import FolderModel, load_base
from rlhf_core.records import Prompt
from rlhf_core.report.plots import BLUE, FAINT, GREY, VERMILION
from rlhf_core.rewards.sentiment import Sentiment
from rlhf_core.trunk import Lora, Trunk

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "data"
SEEDS = (1, 2, 3)
SAMPLING = Sampling(max_new_tokens=32)
LORA = Lora(rank=16, alpha=32.0)
BASE = PPO(
    num_steps=20,
    rollouts_per_step=64,
    num_epochs=2,
    num_minibatches=2,
    learning_rate=1e-3,
    value_learning_rate=3e-3,
    kl_coef=0.05,
    critic="policy",
    kl_budget=1e6,
    target_kl=1e6,
)
"""Where all studies meet; budget and target are out of the way, so that a knob's own effect is seen."""
STUDIES: dict[str, tuple[float, ...]] = {
    "kl_coef": (0.0, 0.02, 0.05, 0.15, 0.5),
    "learning_rate": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "clip_range": (0.02, 0.05, 0.2, 0.5, 0.9),
    "num_epochs": (1, 2, 4, 8),
    "rollouts_per_step": (16, 32, 64, 128),
}
"""Knob by knob; the base's own value is among them."""
LAST_STEPS = 4
"""Steps at the end that a run's numbers are means over."""
SHOWN = {
    "objective/scores": "reward",
    "objective/kl_sequence": "KL a completion, nats",
    "rollout/distinct_2": "distinct-2",
    "policy/approxkl_max": "largest approximate KL, nats a token",
}


class Run(NamedTuple):
    """One run: a knob at a value, a seed, and its numbers at the end."""

    knob: str
    value: float
    seed: int
    numbers: dict[str, float]


def prompts(openings: Path) -> list[Prompt]:
    """The first ten words of every story, each once."""
    rows = (json.loads(line)["text"].split()[:10] for line in openings.read_text().splitlines())
    texts = dict.fromkeys(" ".join(words) for words in rows)
    return [Prompt(id=f"story-{number}", text=text) for number, text in enumerate(texts)]


def jobs() -> Iterator[tuple[str, float, int]]:
    """Every run; the base's is one run, that all knobs share."""
    for seed in SEEDS:
        yield "base", 0.0, seed
        for knob, values in STUDIES.items():
            yield from ((knob, value, seed) for value in values if value != getattr(BASE, knob))


def play(knob: str, value: float, seed: int, stories: Path, openings: Path) -> Run:
    """PPO with one knob changed."""
    torch.set_num_threads(1)
    changed = {} if knob == "base" else {knob: value}
    settings = PPO.model_validate({**BASE.model_dump(), **changed})
    trunk = Trunk(load_base(FolderModel(path=str(stories)), torch.float32), digest="stories260k")
    trunk.add_role("policy", LORA, seed)
    settings.start_critic(trunk)
    with tempfile.TemporaryDirectory() as folder:
        sink = Spool(Path(folder))
        data = PolicyData(
            prompts=prompts(openings),
            reward=Sentiment().build(),
            generator=HFGenerator(),
            seed=seed,
            from_reference=True,
        )
        settings.build(SAMPLING).train(trunk, data, sink)
        lines = read_lines(Path(folder) / "metrics.jsonl")
    numbers: dict[str, float] = {}
    for name in SHOWN:
        found = [float(line["metrics"][name]) for line in lines if name in line["metrics"]]
        numbers[name] = max(found) if name.endswith("_max") else statistics.fmean(found[-LAST_STEPS:])
    return Run(knob, value, seed, numbers)


def of(runs: list[Run], knob: str, value: float) -> list[Run]:
    """The runs of a knob at a value, one a seed."""
    own = [run for run in runs if run.knob == knob and run.value == value]
    return own or [run for run in runs if run.knob == "base"]


def picture(runs: list[Run]) -> Figure:
    """A row a number, a column a knob; a point a seed, a line through their means, the base marked."""
    figure = Figure(figsize=(3.2 * len(STUDIES), 2.3 * len(SHOWN)), layout="constrained")
    grid = figure.subplots(len(SHOWN), len(STUDIES), sharey="row", squeeze=False)
    for row, (name, label) in zip(grid, SHOWN.items(), strict=True):
        for axes, (knob, values) in zip(row, STUDIES.items(), strict=True):
            places = range(len(values))
            found = [[run.numbers[name] for run in of(runs, knob, value)] for value in values]
            axes.axvline(values.index(getattr(BASE, knob)), color=FAINT, linewidth=6)
            for place, points in zip(places, found, strict=True):
                axes.plot([place] * len(points), points, "o", color=GREY, markersize=3)
            colour = VERMILION if name == "objective/kl_sequence" else BLUE
            axes.plot(places, [statistics.fmean(points) for points in found], color=colour)
            axes.set_xticks(places, [f"{value:g}" for value in values])
            if name.endswith(("_sequence", "_max")):
                axes.set_yscale("symlog", linthresh=0.1)
            if name == list(SHOWN)[-1]:
                axes.set_xlabel(knob)
        row[0].set_ylabel(label)
    return figure


def page(runs: list[Run]) -> str:
    """The table: means over the seeds, lowest and highest in brackets."""
    lines = [
        "# What each knob of PPO does",
        "",
        f"stories260k, {BASE.num_steps} steps, VADER as reward, one knob at a time around the base (bold), "
        f"seeds {', '.join(map(str, SEEDS))}: mean of the seeds (lowest to highest), each a mean of the last "
        f"{LAST_STEPS} steps, and the largest of all steps for approximate KL. Distinct-2 is over all of a "
        "step's completions together, so that it falls with their number. "
        "Made by `python -m tests.benchmarks.sensitivity`; every run is in `sensitivity.json`.",
        "",
        "![One column a knob, one row a number](sensitivity.png)",
        "",
        f"| knob | value | {' | '.join(SHOWN.values())} |",
        f"|---|---|{'---|' * len(SHOWN)}",
    ]
    for knob, values in STUDIES.items():
        for value in values:
            shown = f"**{value:g}**" if value == getattr(BASE, knob) else f"{value:g}"
            cells = []
            for name in SHOWN:
                points = [run.numbers[name] for run in of(runs, knob, value)]
                low, high = min(points), max(points)
                cells.append(f"{statistics.fmean(points):.3g} ({low:.3g} to {high:.3g})")
            lines.append(f"| `{knob}` | {shown} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Play all runs, or draw those that were played."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", type=Path, default=SHARED / "stories260k" / "hf")
    parser.add_argument(
        "--openings", type=Path, default=SHARED / "tinystories" / "tinystories_train_sample.jsonl"
    )
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    todo = list(jobs())
    runs: list[Run] = []
    with ProcessPoolExecutor(asked.processes, get_context("spawn")) as pool:
        futures = [pool.submit(play, *job, asked.stories, asked.openings) for job in todo]
        for number, future in enumerate(futures, 1):
            runs.append(run := future.result())
            print(f"{number}/{len(todo)} {run.knob} {run.value:g} seed {run.seed}: {run.numbers}", flush=True)
    kept = [run._asdict() for run in runs]
    (HERE / "sensitivity.json").write_text(json.dumps(kept, indent=1) + "\n")
    picture(runs).savefig(HERE / "sensitivity.png", dpi=80, metadata={"Software": None})
    (HERE / "sensitivity.md").write_text(page(runs))


if __name__ == "__main__":
    main()
