"""Opens projects and rounds: all that `auto` or an alias means is resolved here, once, and recorded."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

import yaml
from prefect.runtime import flow_run

from rlhf_core.artifacts import ArtifactRef, Store, derive_seed
from rlhf_core.ledger import ProjectRecord, RoundRecord
from rlhf_core.records import Demonstration, Prompt
from rlhf_core.settings import Json, Settings
from rlhf_core.sources import demonstrations, write_rows
from rlhf_core.stages.bootstrap import Bootstrap, BootstrapJob, Fingerprint
from tasks.context import Round, result_of
from tasks.environment import environment
from tasks.project import Project


@dataclass(frozen=True)
class Sources:
    """What a round is given from outside."""

    prompts: ArtifactRef
    """What it draws from."""
    texts: ArtifactRef | None = None
    """What its pretraining mix learns from, if it has one."""


def import_prompts(store: Store, prompts: Iterable[Prompt], kind: str = "prompt_source") -> ArtifactRef:
    """A source as an artifact, read as it is written: a changed file is another source."""
    with store.writing() as folder:
        write_rows(prompts, folder / "prompts.parquet")
        return store.commit(folder, kind, "imported")


def import_demonstrations(store: Store, records: Iterable[Demonstration]) -> tuple[ArtifactRef, str]:
    """Demonstrations as an artifact, read as it is written, and their fingerprint."""
    fingerprint = Fingerprint()
    with store.writing() as folder:
        write_rows(fingerprint.passing(records), folder / "demonstrations.parquet")
        return store.commit(folder, "demonstrations", "imported"), str(fingerprint)


def open_project(
    project: Project, bootstrap: Bootstrap, fingerprint: str, seed: int, settings: dict[str, Json]
) -> ProjectRecord:
    """The project, its trunk made if it is new; `bootstrap` has no `auto` left."""
    if project.ledger.exists:
        return project.ledger.project()
    inputs: dict[str, ArtifactRef] = {}
    shown = ""
    if bootstrap.sft is not None:
        records = demonstrations(bootstrap.sft.demonstrations)
        inputs["demonstrations"], shown = import_demonstrations(project.store, records)
    asked = BootstrapJob(**bootstrap.model_dump(), fingerprint=fingerprint).to_json()
    job, key = project.job("bootstrap", asked, inputs, derive_seed(seed, "bootstrap"))
    done = result_of(project, 0, job, key, "bootstrap")
    opened_with = {**settings, "bootstrap": bootstrap.to_json(), "execution": project.execution.to_json()}
    return project.ledger.open_project(
        ProjectRecord(
            name=project.name,
            settings=opened_with,
            base=fingerprint,
            demonstrations=shown,
            inputs={**inputs, **done.outputs},
        )
    )


def open_round(project: Project, number: int, settings: Settings, seed: int, sources: Sources) -> Round:
    """The round that is open, or a new one on the champion; its settings are fixed from here on."""
    resolved = {**settings.to_json(), "bootstrap": project.ledger.project().settings["bootstrap"]}
    known = project.ledger.round(number)
    held = known.settings if known else resolved
    flow_run_id = str(flow_run.id or "")
    champion = project.ledger.champion()
    settings_yaml = yaml.safe_dump(held, sort_keys=False)
    around = environment(project.execution.device)
    tags = {
        "prefect.flow_run_id": flow_run_id,
        "prefect.flow_run_url": str(flow_run.ui_url or ""),
        "rlhf.champion": champion.digest,
        "rlhf.trunk": project.ledger.anchor(number)["trunk"].digest,
        "rlhf.prompt_source": sources.prompts.digest,
        "rlhf.settings_sha256": hashlib.sha256(settings_yaml.encode()).hexdigest(),
        **around.tags(),
    }
    journal = project.journals.begin_round(number)
    journal.tag(tags)
    journal.parameters(key_parameters(held))
    journal.write("settings.yaml", settings_yaml)
    journal.write("environment.json", around.model_dump_json(indent=1))
    journal.write("requirements.txt", "".join(f"{package}\n" for package in around.packages))
    project.teller.settle()
    record = project.ledger.open_round(
        RoundRecord(
            round=number,
            settings=resolved,
            seed=seed,
            champion=champion,
            source=sources.prompts,
            texts=sources.texts,
            mlflow_run_id=journal.run_id,
            prefect_flow_run_id=flow_run_id,
        )
    )
    return Round(project, record)


def key_parameters(settings: dict[str, Json]) -> dict[str, str]:
    """Every setting under its dotted name, as MLflow parameters show them."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Json) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            found[prefix] = value if isinstance(value, str) else json.dumps(value)

    walk("", settings)
    return found


def close_round(project: Project, number: int) -> None:
    """Leave the MLflow run of a round that did not come to its end as FAILED; the next command reopens it."""
    if project.ledger.round(number) is not None:
        project.journals.round(number).close("FAILED")
        project.teller.settle()
