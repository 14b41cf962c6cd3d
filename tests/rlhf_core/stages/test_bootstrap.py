"""Bootstrap: the trunk is the base, with what it learned merged in; the first policy adds nothing."""

import json
from pathlib import Path

import pytest
import torch

from rlhf_core.algorithms.optimize import Optimizer
from rlhf_core.algorithms.sft import SFT
from rlhf_core.artifacts import ArtifactRef
from rlhf_core.batch import collate
from rlhf_core.metrics import read_lines
from rlhf_core.models import TinyModel, load_base
from rlhf_core.records import Demonstration, Message, Prompt
from rlhf_core.settings import InvalidSettings
from rlhf_core.sources import FileSource
from rlhf_core.stages import run_job
from rlhf_core.stages.bootstrap import Bootstrap, BootstrapJob, check_demonstrations, fingerprint_of
from rlhf_core.stages.context import open_trunk
from rlhf_core.trunk import Lora, Trunk
from tests.rlhf_core.stages.chain import PLAIN, Chain

BASE = TinyModel(hidden_size=32, num_layers=2, num_heads=2, context_length=128, weight_scale=0.1)
SETTINGS = SFT(
    demonstrations=FileSource(path="imported before"),
    lora=Lora(rank=8, alpha=16),
    optimizer=Optimizer(learning_rate=1e-2, schedule="linear"),
    num_epochs=1,
    demonstrations_per_minibatch=8,
    held_out_share=0.2,
)


def answers(as_chat: bool = False, ending: str = "") -> list[Demonstration]:
    """The answer to a letter and a digit is the letter, four times."""
    asked = [(letter, f"{letter}{digit}:") for letter in "abcdefgh" for digit in range(10)]
    prompts = [
        Prompt(id=text, messages=(Message(role="user", content=text),))
        if as_chat
        else Prompt(id=text, text=text)
        for _, text in asked
    ]
    return [
        Demonstration(prompt=prompt, response=letter * 4 + ending)
        for prompt, (letter, _) in zip(prompts, asked, strict=True)
    ]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def job(sft: SFT | None = SETTINGS, dtype: str = "float32") -> BootstrapJob:
    return BootstrapJob(
        base=BASE, dtype=dtype, length_bucket=32, lora=Lora(rank=4), sft=sft, fingerprint="tiny"
    )


def boot(
    chain: Chain, records: list[Demonstration], asked: BootstrapJob | None = None, seed: int = 7
) -> dict[str, ArtifactRef]:
    """Trunk and policy of a base that is tuned on these."""
    imported = chain.rows({"demonstrations": records}, "demonstrations")
    return chain.run("bootstrap", asked or job(), {"demonstrations": imported}, seed=seed)


def told(chain: Chain) -> dict[str, float]:
    metrics: dict[str, float] = run_job(chain.jobs["bootstrap"]).told["metrics"]
    return metrics


def opened(chain: Chain, made: dict[str, ArtifactRef]) -> Trunk:
    trunk = open_trunk(chain.open(made["trunk"]), made["trunk"].digest, PLAIN)
    trunk.load_role("policy", chain.open(made["policy"]))
    return trunk


def digests(made: dict[str, ArtifactRef]) -> tuple[str, str]:
    return made["trunk"].digest, made["policy"].digest


@pytest.mark.parametrize("as_chat", [False, True], ids=["plain", "chat"])
def test_the_trunk_has_learned_what_the_adapter_learned(chain: Chain, as_chat: bool) -> None:
    boot(chain, answers(as_chat))
    found = told(chain)
    assert found["sft/train_demonstrations"] + found["sft/held_out_demonstrations"] == 80
    assert found["sft/held_out_loss_after"] < 0.8 * found["sft/held_out_loss_before"]
    # In float32 merging costs rounding alone.
    assert found["sft/held_out_loss_merged"] == pytest.approx(found["sft/held_out_loss_after"], rel=1e-5)


def test_the_first_policy_changes_no_bit_of_the_merged_trunk(chain: Chain) -> None:
    trunk = opened(chain, boot(chain, answers()))
    assert trunk.is_initial("policy")
    batch = collate([[97, 48, 58], [98, 49, 58]], [[97] * 4, [98] * 4], trunk.codec.pad_id)
    found = {}
    for role in ("policy", "reference"):
        with torch.no_grad(), trunk.role(role):
            found[role], _ = trunk.logprobs(batch, 1.0)
    assert torch.equal(found["policy"], found["reference"])


def test_a_trunk_in_bfloat16_is_merged_before_it_is_cast(chain: Chain) -> None:
    made = boot(chain, answers(), job(dtype="bfloat16"))
    assert opened(chain, made).model.dtype == torch.bfloat16
    found = told(chain)
    assert found["sft/held_out_loss_merged"] == pytest.approx(found["sft/held_out_loss_after"], rel=0.02)
    assert found["sft/held_out_loss_merged"] < 0.8 * found["sft/held_out_loss_before"]


def test_equal_seeds_give_equal_digests_and_other_demonstrations_another_trunk(
    chain: Chain, tmp_path: Path
) -> None:
    first = digests(boot(chain, answers()))
    assert digests(boot(Chain(tmp_path / "elsewhere"), answers())) == first
    others = [
        boot(chain, answers(), seed=8),
        boot(chain, answers(ending="!")),
        boot(chain, answers()[::-1]),
        boot(chain, answers(), job(SETTINGS.model_copy(update={"num_epochs": 2}))),
        chain.run("bootstrap", job(None), {}),
    ]
    assert len({first[0], *(made["trunk"].digest for made in others)}) == 6


def test_without_fine_tuning_the_trunk_is_the_base_and_nothing_is_told(chain: Chain) -> None:
    made = chain.run("bootstrap", job(None), {})
    assert told(chain) == {}
    trunk = opened(chain, made)
    base = dict(load_base(BASE, torch.float32).model.named_parameters())
    kept = {n.replace(".base_layer", ""): p for n, p in trunk.model.named_parameters() if ".lora_" not in n}
    assert kept.keys() == base.keys()
    assert all(torch.equal(kept[name], parameter) for name, parameter in base.items())


def test_packing_learns_the_same_up_to_rounding(chain: Chain) -> None:
    found = []
    for packing in (False, True):
        boot(chain, answers(), job(SETTINGS.model_copy(update={"packing": packing})))
        found.append(told(chain)["sft/held_out_loss_after"])
    assert found[1] == pytest.approx(found[0], rel=1e-3)  # rounding grows over the steps of Adam


def test_what_is_left_out_is_counted_and_said(chain: Chain) -> None:
    long = Demonstration(prompt=Prompt(id="long", text="z"), response="z" * 100)
    few = SETTINGS.model_copy(update={"max_length": 16, "drop_too_long": True})
    boot(chain, [*answers(), long], job(few))
    assert told(chain)["sft/too_long"] == 1
    (alarm,) = run_job(chain.jobs["bootstrap"]).told["alarms"]
    assert alarm == "1 of 81 demonstrations were left out: they have more than 16 tokens"


def test_the_numbers_of_fine_tuning_are_told_as_it_goes(chain: Chain) -> None:
    boot(chain, answers())
    work = Path(chain.jobs["bootstrap"].work)
    names = {name for line in read_lines(work / "metrics.jsonl") for name in line["metrics"]}
    assert {"sft/loss", "sft/lr", "sft/grad_norm", "sft/held_out_loss", "sft/tokens"} <= names
    said = [str(line["text"]) for line in read_lines(work / "progress.jsonl")]
    assert any(text.startswith("loss ") and "held out" in text for text in said)


# What is refused before a project is opened


def source(path: Path, rows: list[dict[str, str]]) -> FileSource:
    path.write_text("\n".join(map(json.dumps, rows)))
    return FileSource(path=str(path))


def rows(count: int = 80) -> list[dict[str, str]]:
    return [{"prompt": f"p{n}", "response": f"r{n}"} for n in range(count)]


@pytest.mark.parametrize(
    ("given", "update", "said"),
    [
        ([], {}, "no demonstrations in its 0 rows"),
        ([*rows(20), {"prompt": "p", "response": ""}], {}, "1 of 21 rows refused"),
        (rows(20), {"max_length": 8, "demonstrations_per_minibatch": 1}, None),
        ([*rows(), {"prompt": "p", "response": "r" * 128}], {}, "1 of 81 demonstrations have more than 128"),
        ([*rows(), {"prompt": "p", "response": "r" * 127}], {"drop_too_long": True}, None),
        (rows(6), {"held_out_share": 0.0}, "6 demonstrations to learn do not fill a minibatch of 8"),
        (rows(20), {"held_out_share": 1e-9}, "20 to learn and 0 held out"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_before_a_project_is_opened(
    tmp_path: Path, given: list[dict[str, str]], update: dict[str, object], said: str | None
) -> None:
    file = source(tmp_path / "rows.jsonl", given)
    settings = Bootstrap(base=BASE, sft=SETTINGS.model_copy(update={"demonstrations": file, **update}))
    if said is None:
        check_demonstrations(settings)
    else:
        with pytest.raises(InvalidSettings, match=f"^bootstrap.sft: .*{said}"):
            check_demonstrations(settings)


def test_a_fingerprint_is_of_the_content_in_its_order(tmp_path: Path) -> None:
    first = fingerprint_of(answers())
    assert first == fingerprint_of(answers())
    assert first != fingerprint_of(answers()[::-1])
    assert first != fingerprint_of(answers()[:-1])
