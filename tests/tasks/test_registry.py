"""Versions are made once, with their files, and aliases name them."""

from pathlib import Path

import pytest

from tasks.journal import Opened
from tasks.mlflow_store import TrackingUnavailable
from tasks.registry import Registry
from tasks.tracking import Tracker

DIGEST = "d" * 64


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    (folder / "head").mkdir(parents=True)
    (folder / "adapter.safetensors").write_bytes(b"weights")
    (folder / "head" / "head.json").write_text("{}")
    return folder


def register(tracker: Tracker, folder: Path, round: int = 1, digest: str = DIGEST, **metrics: float) -> int:
    return Registry(tracker).register(
        "policy",
        folder,
        run_id=tracker.make_run(Opened(t=1, id=f"j{round}", name=f"round-{round:04d}", tags={}), None),
        tags={"rlhf.digest": digest, "rlhf.round": str(round), "rlhf.outcome": "rejected"},
        description="Round 1.",
        metrics=metrics,
    )


def logged_models(tracker: Tracker) -> list[str]:
    return [model.model_id for model in tracker.client.search_logged_models([tracker.experiment_id])]


def test_a_version_is_made_once_for_a_digest_and_a_round(tracker: Tracker, adapter: Path) -> None:
    assert [register(tracker, adapter), register(tracker, adapter)] == [1, 1]
    assert len(logged_models(tracker)) == 1
    assert register(tracker, adapter, round=2) == 2
    assert register(tracker, adapter, round=2, digest="e" * 64) == 3
    registry = Registry(tracker)
    assert [registry.version_of("policy", digest) for digest in (DIGEST, "e" * 64, "f" * 64)] == [2, 3, None]
    assert registry.version_of("reward-model", DIGEST) is None


def test_a_version_holds_its_files_its_tags_and_the_way_to_its_model(tracker: Tracker, adapter: Path) -> None:
    number = register(tracker, adapter, gold=0.25, kl=float("nan"))
    version = tracker.client.get_model_version(f"{tracker.project}.policy", str(number))
    (model_id,) = logged_models(tracker)
    files = Path(
        tracker.client.get_model_version_download_uri(version.name, str(number)).removeprefix("file://")
    )
    model = tracker.client.get_logged_model(model_id)

    assert files.name == "artifacts"
    assert [file.path for file in tracker.client.list_logged_model_artifacts(model_id, "head")] == [
        "head/head.json"
    ]
    assert version.tags == {"rlhf.digest": DIGEST, "rlhf.round": "1", "rlhf.outcome": "rejected"}
    assert (version.source, version.status, version.description) == (
        f"models:/{model_id}",
        "READY",
        "Round 1.",
    )
    assert model.status == "READY"
    assert {metric.key: metric.value for metric in model.metrics} == {"gold": 0.25, "kl_nonfinite": 1.0}
    assert f'"name": "{tracker.project}.policy"' in model.tags["mlflow.modelVersions"]
    run = tracker.client.get_run(version.run_id)
    assert [output.model_id for output in run.outputs.model_outputs] == [model_id]


def test_a_registration_that_was_cut_off_is_finished(tracker: Tracker, adapter: Path) -> None:
    tags = {"rlhf.digest": DIGEST, "rlhf.round": "1"}
    begun = tracker.client.create_logged_model(tracker.experiment_id, "policy", tags=tags)
    assert begun.status == "PENDING"
    assert register(tracker, adapter) == 1
    assert logged_models(tracker) == [begun.model_id]
    assert tracker.client.get_logged_model(begun.model_id).status == "READY"


def test_a_version_without_files_is_not_made(tracker: Tracker, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrackingUnavailable, match="without its files"):
        register(tracker, tmp_path / "empty")
    assert Registry(tracker).version_of("policy", DIGEST) is None


def test_a_version_that_could_not_be_told_from_another_is_refused(tracker: Tracker, adapter: Path) -> None:
    with pytest.raises(ValueError, match="made twice"):
        Registry(tracker).register(
            "policy", adapter, run_id="r", tags={"rlhf.digest": DIGEST}, description=""
        )


def test_an_alias_names_one_version_and_moves(tracker: Tracker, adapter: Path) -> None:
    registry = Registry(tracker)
    assert registry.alias("policy", "champion") is None
    first, second = register(tracker, adapter), register(tracker, adapter, round=2)
    assert registry.alias("policy", "champion") is None
    for version in (first, second, second, first):
        registry.set_alias("policy", "champion", version)
        assert registry.alias("policy", "champion") == version
    registry.tag_version("policy", second, {"rlhf.outcome": "promoted"})
    found = tracker.client.get_model_version(f"{tracker.project}.policy", str(second))
    assert (found.tags["rlhf.outcome"], found.aliases) == ("promoted", [])
