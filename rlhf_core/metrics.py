"""Numbers: weighted means, intervals, and the spool that a stage tells them to."""

import json
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from rlhf_core.records import LookedAt
from rlhf_core.settings import Settings

Z95 = 1.959963984540054


class Interval(NamedTuple):
    """An estimate with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(successes: float, total: float) -> Interval:
    """A share with Wilson's 95 % score interval (Wilson, 1927); `successes` may sum halves for ties."""
    if total <= 0:
        raise ValueError("a share of nothing has no interval: no pair was measured")
    if not 0 <= successes <= total:
        raise ValueError(f"{successes} of {total} is no share: it has no interval")
    p, z2 = successes / total, Z95**2
    centre = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total**2))
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def clustered_mean(
    values: Sequence[float], clusters: Sequence[str], *, seed: int, draws: int = 2000
) -> Interval:
    """The mean with its percentile-bootstrap 95 % interval, whole clusters drawn (Efron, Tibshirani, 1993).

    Items of one cluster (completions of one prompt, pairs of one prompt) are not independent: to draw them
    one by one would make the interval too narrow. With one item a cluster it is the plain bootstrap.
    """
    if not values:
        raise ValueError("a mean of nothing has no interval: no item was measured")
    if not all(map(math.isfinite, values)):
        raise ValueError(
            "a mean over values that are not finite has no interval: find out which item gave them"
        )
    sums: dict[str, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        entry = sums.setdefault(cluster, [0.0, 0.0])
        entry[0] += value
        entry[1] += 1
    cells = [sums[name] for name in sorted(sums)]
    generator = random.Random(seed)
    means = sorted(_mean_of(generator.choices(cells, k=len(cells))) for _ in range(draws))
    outside = int(0.025 * draws)
    return Interval(sum(values) / len(values), means[outside], means[-1 - outside])


def clustered_wilson(successes: Sequence[float], clusters: Sequence[str]) -> Interval:
    """Wilson's interval of a share whose items come in clusters, at the effective number of items.

    n_eff = n / deff, deff = max(1, Var_clustered / Var_independent) (Kish, 1965; Korn and Graubard, 1998):
    six pairs of the same four completions say less than six pairs of twelve. Where the items show no variance
    between clusters, because all agree or there is one cluster only, a cluster counts as one item.
    """
    total = len(successes)
    if total == 0:
        raise ValueError("a share of nothing has no interval: no item was measured")
    p = sum(successes) / total
    residuals: dict[str, float] = {}
    for value, cluster in zip(successes, clusters, strict=True):
        residuals[cluster] = residuals.get(cluster, 0.0) + value - p
    independent = p * (1 - p) / total
    groups = len(residuals)
    if groups == 1 or independent <= 0:
        deff = total / groups
    else:
        clustered = sum(r * r for r in residuals.values()) / total**2 * groups / (groups - 1)
        deff = max(1.0, clustered / independent)
    return wilson(p * total / deff, total / deff)


def _mean_of(cells: Sequence[Sequence[float]]) -> float:
    return sum(cell[0] for cell in cells) / sum(cell[1] for cell in cells)


class WeightedMeans:
    """Means over a stage or a step, each value with the weight it stands for."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, values: Mapping[str, float], weight: float = 1.0) -> None:
        """Take values in, each with `weight`; a mean over nothing (weight 0, value NaN) changes no other."""
        if not weight:
            return
        for name, value in values.items():
            total, weights = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (total + value * weight, weights + weight)

    def means(self) -> dict[str, float]:
        """The weighted mean of every name with any weight."""
        return {name: total / weight for name, (total, weight) in self._sums.items()}


class MetricSink(Protocol):
    """What a stage tells its numbers to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Say how far the stage is."""

    def alarm(self, sentence: str) -> None:
        """Say that something looks wrong without being an error."""


class SpoolEnds(Settings):
    """How long the files of a spool are, in bytes."""

    metrics: int = 0
    progress: int = 0
    samples: int = 0


class Spool:
    """A sink that appends to `metrics.jsonl`, `progress.jsonl` and `samples.jsonl` of a folder, line by line.

    A line keeps its own timestamp, so that what reads the file can be replayed and gives every point once.
    What a killed writer left of a last line is cut off, so that the next line starts on its own; with `ends`,
    all that was written after them.
    """

    def __init__(self, folder: Path, ends: SpoolEnds | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics_path = folder / "metrics.jsonl"
        self.progress_path = folder / "progress.jsonl"
        self.samples_path = folder / "samples.jsonl"
        for path in (self.metrics_path, self.progress_path, self.samples_path):
            if path.exists():
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        if ends is not None:
            self._rewind(ends)
        told = read_lines(self.progress_path)
        self.alarms = [str(line["alarm"]) for line in told if "alarm" in line]

    def ends(self) -> SpoolEnds:
        """How much was written so far; all of it is on the disk when this returns."""
        return SpoolEnds(
            metrics=_synced_size(self.metrics_path),
            progress=_synced_size(self.progress_path),
            samples=_synced_size(self.samples_path),
        )

    def _rewind(self, ends: SpoolEnds) -> None:
        """Forget what came after `ends`; a file that is shorter than that is no file to go on with."""
        for path, end in (
            (self.metrics_path, ends.metrics),
            (self.progress_path, ends.progress),
            (self.samples_path, ends.samples),
        ):
            length = path.stat().st_size if path.exists() else 0
            if length < end:
                raise ValueError(
                    f"{path} has {length} bytes, and had {end} when the stage's last checkpoint was written: "
                    f"its numbers cannot go on. Delete {path.parent / 'checkpoints'} to start the stage over."
                )
            if length:
                os.truncate(path, end)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step."""
        line = {"t": time.time_ns() // 1_000_000, "step": step, "metrics": dict(metrics)}
        _append(self.metrics_path, line)

    def samples(self, looked_at: Sequence[LookedAt]) -> None:
        """Append completions that people look at."""
        for one in looked_at:
            _append(self.samples_path, one.to_json())

    def progress(self, done: int, total: int, text: str) -> None:
        """Append how far the stage is."""
        _append(
            self.progress_path, {"t": time.time_ns() // 1_000_000, "done": done, "total": total, "text": text}
        )

    def alarm(self, sentence: str) -> None:
        """Append an alarm and keep it."""
        self.alarms.append(sentence)
        _append(self.progress_path, {"t": time.time_ns() // 1_000_000, "alarm": sentence})


def read_lines(path: Path) -> list[dict[str, object]]:
    """All whole lines of a spool file; a torn last line is left out."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds spent inside to `times[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        times[name] = times.get(name, 0.0) + time.perf_counter() - start


def _synced_size(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _append(path: Path, line: Mapping[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
