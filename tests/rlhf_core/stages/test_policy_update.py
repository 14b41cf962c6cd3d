"""policy_update: where candidate and critic start from, which a run at rates of zero leaves as it was."""

from pathlib import Path

import pytest

from rlhf_core.artifacts import MANIFEST, ArtifactRef
from rlhf_core.stages import run_job
from tests.rlhf_core.stages.chain import Chain

RATES = ("learning_rate", "value_learning_rate")


@pytest.fixture
def still(played: Chain, tmp_path: Path) -> dict[str, ArtifactRef]:
    """What the stage makes of the played round's policy when nothing is learned."""
    job = played.jobs["policy_update"]
    algorithm = job.settings["algorithm"]
    assert isinstance(algorithm, dict)
    settings = {**job.settings, "algorithm": {**algorithm, **dict.fromkeys(RATES, 0.0)}}
    return run_job(job.model_copy(update={"settings": settings, "work": str(tmp_path)})).outputs


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


def test_the_critic_starts_as_the_reward_model_and_the_candidate_as_the_champion(
    played: Chain, still: dict[str, ArtifactRef]
) -> None:
    reward_model = played.made["reward_modeling"]["reward_model"]
    champion = played.made["bootstrap"]["policy"]
    for made, started in ((still["critic"], reward_model), (still["policy"], champion)):
        assert contents(played.open(made)) == contents(played.open(started))
    learned = played.made["policy_update"]
    assert contents(played.open(learned["critic"])) != contents(played.open(reward_model))
    assert contents(played.open(learned["policy"])) != contents(played.open(champion))
