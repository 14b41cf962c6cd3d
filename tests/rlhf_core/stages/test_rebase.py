"""Rebase: the new trunk says what the champion said, and its first policy adds nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rlhf_core.artifacts import ArtifactRef
from rlhf_core.batch import collate
from rlhf_core.evals.held_out import HeldOut
from rlhf_core.generation import Sampling
from rlhf_core.models import TinyModel
from rlhf_core.records import Prompt
from rlhf_core.roles import merge
from rlhf_core.settings import Weights
from rlhf_core.stages import run_job
from rlhf_core.stages.bootstrap import BootstrapJob
from rlhf_core.stages.context import open_trunk
from rlhf_core.stages.rebase import Rebase
from rlhf_core.trunk import Lora, Trunk
from tests.rlhf_core.stages.chain import PLAIN, Chain

BASE = TinyModel(hidden_size=32, num_layers=2, num_heads=2, context_length=128, weight_scale=0.1)
LORA = Lora(rank=4, alpha=8)
ROWS = [[97, 48, 58], [98, 49]], [[97] * 6, [98, 99, 100]]
BOTH = pytest.mark.parametrize("weights", ["lora", "full"])


@dataclass
class Served:
    """A project's trunk with a champion on it that was moved by hand, and what was measured of that."""

    chain: Chain
    trunk: ArtifactRef
    first: ArtifactRef
    champion: ArtifactRef
    measured: ArtifactRef

    def inputs(self) -> dict[str, ArtifactRef]:
        return {"trunk": self.trunk, "policy": self.champion, "measured": self.measured}

    def rebased(self) -> dict[str, ArtifactRef]:
        return self.chain.run("rebase", Rebase(lora=LORA), self.inputs())

    def opened(self, trunk: ArtifactRef, policy: ArtifactRef) -> Trunk:
        opened = open_trunk(self.chain.open(trunk), trunk.digest, PLAIN)
        opened.load_role("policy", self.chain.open(policy))
        return opened


def logprobs(trunk: Trunk, role: str) -> torch.Tensor:
    with torch.no_grad(), trunk.role(role):
        return trunk.logprobs(collate(*ROWS, trunk.codec.pad_id), 1.0)[0]


@pytest.fixture
def serve(tmp_path: Path, stir: Callable[..., None]) -> Callable[..., Served]:
    """Makes a project with a champion, in a store of its own."""

    def serve(weights: Weights, dtype: str = "float32", where: str = "first") -> Served:
        chain = Chain(tmp_path / where)
        asked = BootstrapJob(
            base=BASE, dtype=dtype, length_bucket=32, weights=weights, lora=LORA, fingerprint="tiny"
        )
        made = chain.run("bootstrap", asked, {})
        trunk = chain.trunk()
        trunk.load_role("policy", chain.open(made["policy"]))
        stir(trunk, "policy")
        with chain.store.writing() as folder:
            trunk.save_role("policy", folder)
            champion = chain.store.commit(folder, "policy", "by hand")
        prompts = [Prompt(id=f"p{n}", text=f"The number {n}") for n in range(12)]
        measured = chain.run(
            "measurement",
            HeldOut(sampling=Sampling(max_new_tokens=8)),
            {
                "trunk": made["trunk"],
                "policy": champion,
                "held_out_prompts": chain.rows({"prompts": prompts}, "prompts"),
            },
        )["measurements"]
        return Served(chain, made["trunk"], made["policy"], champion, measured)

    return serve


@BOTH
def test_the_new_trunk_says_what_the_champion_said(serve: Callable[..., Served], weights: Weights) -> None:
    served = serve(weights)
    made = served.rebased()
    before = served.opened(served.trunk, served.champion)
    after = served.opened(made["trunk"], made["policy"])
    torch.testing.assert_close(logprobs(after, "reference"), logprobs(before, "policy"), rtol=1e-5, atol=1e-5)
    # The champion is far from its trunk: nothing merged would be seen.
    assert (logprobs(before, "policy") - logprobs(before, "reference")).abs().max() > 0.1


@BOTH
def test_the_first_policy_on_it_changes_no_bit_and_all_but_the_weights_stays(
    serve: Callable[..., Served], weights: Weights
) -> None:
    served = serve(weights)
    made = served.rebased()
    after = served.opened(made["trunk"], made["policy"])
    assert after.is_initial("policy")
    assert torch.equal(logprobs(after, "policy"), logprobs(after, "reference"))
    old, new = (served.chain.open(ref) for ref in (served.trunk, made["trunk"]))
    files = {path.relative_to(old) for path in old.rglob("*") if path.is_file()}
    assert files == {path.relative_to(new) for path in new.rglob("*") if path.is_file()}
    changed = {path.name for path in files if (old / path).read_bytes() != (new / path).read_bytes()}
    assert changed == {"model.safetensors", "artifact.json"}


@BOTH
def test_the_same_champion_gives_the_same_digests_wherever_it_lies(
    serve: Callable[..., Served], weights: Weights
) -> None:
    first, second = serve(weights).rebased(), serve(weights, where="second").rebased()
    assert {role: ref.digest for role, ref in first.items()} == {r: ref.digest for r, ref in second.items()}


@BOTH
def test_how_well_it_was_merged_is_measured_on_what_the_champion_said(
    serve: Callable[..., Served], weights: Weights
) -> None:
    served = serve(weights)
    served.rebased()
    told = run_job(served.chain.jobs["rebase"]).told["metrics"]
    assert told["rebase/completions"] == 12
    assert abs(told["rebase/kl_to_champion"]) <= told["rebase/max_log_ratio"] < 1e-4
    # What another policy said would be seen: here the trunk's own first one.
    other = served.chain.run(
        "measurement",
        HeldOut(sampling=Sampling(max_new_tokens=8)),
        {**served.chain.jobs["measurement"].inputs, "policy": served.first},
    )["measurements"]
    served.chain.run("rebase", Rebase(lora=LORA), {**served.inputs(), "measured": other})
    assert run_job(served.chain.jobs["rebase"]).told["metrics"]["rebase/max_log_ratio"] > 0.1


def test_an_adapter_is_merged_before_the_weights_are_cast(serve: Callable[..., Served]) -> None:
    served = serve("lora", "bfloat16")
    made = served.rebased()
    before = served.opened(served.trunk, served.champion)
    after = open_trunk(served.chain.open(made["trunk"]), made["trunk"].digest, PLAIN).model
    wanted = open_trunk(served.chain.open(served.trunk), served.trunk.digest, PLAIN).model.float()
    merge(wanted, before.parameters("policy"), LORA)
    for (name, weight), (_, exact) in zip(after.named_parameters(), wanted.named_parameters(), strict=True):
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, exact.bfloat16()), name


def test_a_policy_that_changes_nothing_is_refused(serve: Callable[..., Served]) -> None:
    served = serve("lora")
    with pytest.raises(ValueError, match="changes nothing of its trunk"):
        served.chain.run("rebase", Rebase(lora=LORA), {**served.inputs(), "policy": served.first})
