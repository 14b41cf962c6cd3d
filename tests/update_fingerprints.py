"""Records that results of the stages are known not to differ: `python -m tests.update_fingerprints "why"`.

`fingerprints.json` holds, for each stage, its VERSION and the fingerprint of the code it was last raised at.
Code that changed since and gives the same results stands under `no_effect`, with the sentence that says why.
A raised VERSION is recorded without a sentence, and so is a new stage.
"""

import json
import sys
from pathlib import Path
from typing import TypedDict

from rlhf_core.stages import STAGES, stage
from rlhf_core.stages.fingerprint import fingerprint

FILE = Path(__file__).parent / "fingerprints.json"
COMMAND = 'python -m tests.update_fingerprints "why it has no effect"'


class Code(TypedDict):
    version: int
    fingerprint: str


class NoEffect(TypedDict):
    why: str
    fingerprints: list[str]


class Recorded(TypedDict):
    stages: dict[str, Code]
    no_effect: list[NoEffect]


def code_of_today() -> dict[str, Code]:
    """Version and fingerprint of every stage as the code is now."""
    return {
        name: {"version": stage(name).VERSION, "fingerprint": fingerprint(f"rlhf_core.stages.{name}")}
        for name in STAGES
    }


def recorded() -> Recorded:
    """What the file says; nothing where there is none."""
    return json.loads(FILE.read_text()) if FILE.exists() else {"stages": {}, "no_effect": []}


def unexplained(known: Recorded, now: dict[str, Code]) -> dict[str, str]:
    """What is wrong with each stage whose code of today the record does not explain."""
    harmless = {one for entry in known["no_effect"] for one in entry["fingerprints"]}
    found = {}
    for name, code in now.items():
        before = known["stages"].get(name)
        if before is None or before["version"] != code["version"]:
            found[name] = f"version {code['version']} is not recorded"
        elif code["fingerprint"] not in {before["fingerprint"], *harmless}:
            found[name] = f"its code changed, and its VERSION is still {code['version']}"
    return found


def updated(known: Recorded, now: dict[str, Code], why: str) -> Recorded:
    """The record with today's code explained: new versions as they are, the rest by `why`."""
    before = known["stages"]
    stages = {
        name: before[name] if name in before and before[name]["version"] == code["version"] else code
        for name, code in now.items()
    }
    entries = list(known["no_effect"])
    changed = sorted(
        now[name]["fingerprint"] for name in unexplained({"stages": stages, "no_effect": entries}, now)
    )
    if changed:
        if not why.strip():
            raise ValueError(
                f"{', '.join(unexplained(known, now))}: code changed and VERSION did not. Raise it where "
                f"results differ; where they do not, say why: {COMMAND}"
            )
        entries.append({"why": why.strip(), "fingerprints": changed})
    current = {code["fingerprint"] for code in now.values()}
    return {"stages": stages, "no_effect": [e for e in entries if current.intersection(e["fingerprints"])]}


if __name__ == "__main__":
    try:
        found = updated(recorded(), code_of_today(), " ".join(sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
    FILE.write_text(json.dumps(found, indent=1) + "\n")
