"""Talking to the policies of a project: which one is meant, and what it says."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.artifacts import ArtifactRef, Store
from rlhf_core.ledger import PROJECT_NAME, Ledger
from rlhf_core.records import Prompt
from rlhf_core.settings import InvalidSettings
from rlhf_core.sources import read_rows
from tasks.project import execution_of
from tasks.registry import Registry
from tasks.tracking import Tracker

if TYPE_CHECKING:
    from rlhf_core.generation import Sampling
    from rlhf_core.trunk import Trunk

ALIASES = "champion, previous, candidate, initial, round-N"
_NAME = re.compile(rf"({PROJECT_NAME.pattern})(?:@([a-z]+|round-\d+)|:(\d+))?")


@dataclass(frozen=True)
class Policy:
    """One policy of a project, found."""

    name: str
    """As it was asked for, with the alias written out."""
    project: str
    ref: ArtifactRef


def find_policy(home: Path, text: str) -> Policy:
    """The policy that `PROJECT`, `PROJECT@ALIAS` or `PROJECT:VERSION` names; PROJECT alone is its champion.

    Aliases are read from the ledger, versions from MLflow's registry. Raises `InvalidSettings` for a name
    that is none, and says which there are.
    """
    found = _NAME.fullmatch(text)
    if found is None:
        raise InvalidSettings(
            f"{text!r} names no policy: write PROJECT, PROJECT@ALIAS ({ALIASES}) or PROJECT:VERSION"
        )
    project, alias, version = found.groups()
    ledger = Ledger(home / "projects", project)
    ledger.project()
    if version is not None:
        ref = Registry(Tracker(home, project)).ref_of("policy", int(version))
        if ref is None:
            raise InvalidSettings(
                f"project {project!r} has no policy version {version} in MLflow; its champion is "
                f"{project}@champion"
            )
        return Policy(f"{project}:{version}", project, ref)
    alias = alias or "champion"
    return Policy(f"{project}@{alias}", project, _by_alias(ledger, alias))


def _by_alias(ledger: Ledger, alias: str) -> ArtifactRef:
    rounds = ledger.rounds()
    candidates = {n: d.candidate for n in rounds if (d := ledger.decision(n)) and d.candidate}
    if alias == "champion":
        return ledger.champion()
    if alias == "initial":
        return ledger.anchor()["policy"]
    if alias == "previous" and (before := _previous(ledger)):
        return before
    if alias == "candidate" and candidates:
        return candidates[max(candidates)]
    number = int(alias.removeprefix("round-")) if alias.startswith("round-") else 0
    if number in candidates:
        return candidates[number]
    known = [f"round-{n}" for n in candidates]
    promoted = ["previous"] if _previous(ledger) else []
    latest = ["candidate"] if candidates else []
    raise InvalidSettings(
        f"project {ledger.name!r} has no policy @{alias}; it has: "
        f"{', '.join(['champion', 'initial', *promoted, *latest, *known])}"
    )


def _previous(ledger: Ledger) -> ArtifactRef | None:
    """The champion before the present one: what it was compared with, or what was merged into its trunk."""
    won, rebased = ledger.won(), ledger.rebases()
    return won.parent if won else rebased[-1].champion if rebased else None


def held_out_prompts(home: Path, project: str, limit: int) -> list[Prompt]:
    """The first held-out prompts of the newest round that has drawn any."""
    ledger, store = Ledger(home / "projects", project), Store(home / "store")
    for number in reversed(ledger.rounds()):
        drawn = ledger.stage(number, "prompts")
        if drawn is not None:
            return read_rows(store.open(drawn.outputs["held_out_prompts"]) / "prompts.parquet", Prompt)[
                :limit
            ]
    return []


class Speakers:
    """Policies in memory: those of one trunk share it."""

    def __init__(self, home: Path, policies: Sequence[Policy]) -> None:
        from rlhf_core.stages.context import open_trunk

        store = Store(home / "store")
        trunks: dict[str, Trunk] = {}
        self._roles: list[tuple[Trunk, str]] = []
        for number, policy in enumerate(policies):
            ledger = Ledger(home / "projects", policy.project)
            trunk_ref = ledger.trunk_of(policy.ref)
            if trunk_ref.digest not in trunks:
                folder = store.open(trunk_ref)
                trunks[trunk_ref.digest] = open_trunk(folder, trunk_ref.digest, execution_of(ledger))
            trunk, role = trunks[trunk_ref.digest], f"policy-{number}"
            trunk.load_role(role, store.open(policy.ref))
            self._roles.append((trunk, role))

    def answer(self, prompts: Sequence[Prompt], sampling: "Sampling", seed: int) -> list[str]:
        """What each policy says to its own prompt, all with the same random numbers."""
        from rlhf_core.generation import complete
        from rlhf_core.generation.hf import HFGenerator

        return [
            complete(HFGenerator(), trunk, role, [prompt], [[seed]], sampling)[0].text
            for (trunk, role), prompt in zip(self._roles, prompts, strict=True)
        ]
