"""PPO's numbers beside those of TRL's PPOTrainer on one batch: where they must agree, and where they differ.

    pip install rlhf-rounds[bench]
    python -m tests.benchmarks.against_trl

Runs TRL's trainer (`trl_run.py`) and computes the same from the very token rows that it sampled. Prints the
table, writes it to `against_trl.md`, and ends with 1 where something that must agree does not. TRL 1.12.0 is
the last with PPO. Speed is not looked at.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from trl.experimental.ppo import ppo_trainer

from rlhf_core.advantages import gae, token_rewards, token_scores
from rlhf_core.batch import TextBatch, collate
from rlhf_core.kl import KLEstimator, approx_kl, kl_per_token
from rlhf_core.losses import ppo_policy_loss, value_loss
from rlhf_core.tensors import logprobs_from_logits, masked_mean, masked_whiten
from rlhf_core.trunk import Trunk
from tests.benchmarks.trl_run import (
    CLIP,
    GAMMA,
    KL_COEF,
    LAM,
    MAX_GRAD_NORM,
    NUM_PARTS,
    RESPONSE,
    ROWS,
    TEMPERATURE,
    Run,
    our_trunk,
    run_trl,
)  # fmt: skip

PAGE = Path(__file__).with_suffix(".md")
AGREE = 2e-4  # float32 through two layers of large weights, log-probabilities of several nats


# Ours, from the rows that TRL sampled


@dataclass
class Ours:
    """Our numbers for TRL's rows, all [B, T] as wide as TRL's."""

    text: TextBatch
    numbers: dict[str, Tensor]
    ended: Tensor
    """[B] rows that end with the end token."""
    clean: Tensor
    """[B] rows in which the pad was not sampled as a token, which TRL takes for the end."""


def ours(trunk: Trunk, seen: Run, estimator: KLEstimator) -> Ours:
    """Everything that PPO computes of a batch, with TRL's one end token."""
    pad, end = trunk.codec.pad_id, trunk.codec.tokenizer.eos_token_id
    queries = [[token for token in row if token != pad] for row in seen.batch["queries"].tolist()]
    rows = seen.batch["responses"].tolist()
    responses = [row[: row.index(end) + 1] if end in row else row for row in rows]
    text = collate(queries, responses, pad)
    with torch.no_grad():
        with trunk.role("policy"):
            logprobs, _ = trunk.logprobs(text, TEMPERATURE)
        with trunk.role("reference"):
            ref_logprobs, _ = trunk.logprobs(text, TEMPERATURE)
        with trunk.role("value"):
            values = trunk.values(text)
        with trunk.role("reward"):
            scores = trunk.scores(text)
    mask = text.response_mask
    kl = kl_per_token(logprobs, ref_logprobs, mask, estimator)
    rewards = token_rewards(token_scores(scores, None, mask), kl, mask, KL_COEF)
    advantages, returns = gae(rewards, values, mask, GAMMA, LAM)
    numbers = {
        "mask": mask, "logprobs": logprobs, "ref_logprobs": ref_logprobs, "values": values, "kl": kl,
        "rewards": rewards, "advantages": advantages, "returns": returns,
        "white": masked_whiten(advantages, mask),
    }  # fmt: skip
    width = RESPONSE - mask.shape[1]
    return Ours(
        text,
        {name: torch.nn.functional.pad(x, (0, width)) for name, x in numbers.items()} | {"scores": scores},
        torch.tensor([end in row for row in responses]),
        torch.tensor([pad not in row for row in responses]),
    )


def off(a: Tensor, b: Tensor, where: Tensor) -> float:
    """The largest difference, where it counts."""
    return float((a - b)[where].abs().max())


# Where the definitions agree


def agreements(seen: Run, our: Ours) -> dict[str, float]:
    """Largest differences of what is defined alike, each on the same rows."""
    trl, n, mask, longer = seen.batch, our.numbers, seen.mask, seen.longer
    rows = our.clean[:, None] & mask
    cut = (our.clean & ~our.ended)[:, None] & mask  # the score stands on the last token in both
    advantages, returns = gae(trl["rewards"], trl["values"], longer, GAMMA, LAM)
    count = int(mask.sum())
    policy, value = [], []
    for part in seen.parts:
        m, more = mask[part["rows"]], longer[part["rows"]]
        old, new, better = part["mb_logprobs"], part["new_logprobs"], part["mb_advantage"]
        policy.append(ppo_policy_loss(new, old, better, m, CLIP, int(m.sum()))[0] - part["pg_loss"])
        found, known, wanted = part["vpred"], part["mb_values"], part["mb_return"]
        value.append(value_loss(found, known, wanted, more, CLIP, int(more.sum()))[0] - part["vf_loss"])
    return {
        "tokens that one counts and the other does not": float((n["mask"] != mask)[our.clean].sum()),
        "log-probabilities of the policy, at temperature 0.7": off(n["logprobs"], trl["logprobs"], rows),
        "log-probabilities of the reference": off(n["ref_logprobs"], trl["ref_logprobs"], rows),
        "values of the state before each token": off(n["values"], trl["values"], rows),
        "scores": off(n["scores"], trl["scores"], our.clean),
        "KL penalty": off(-KL_COEF * n["kl"], trl["non_score_reward"], rows),
        "rewards, rows that are cut off": off(n["rewards"], trl["rewards"], cut),
        "advantages, rows that are cut off": off(n["advantages"], trl["advantages"], cut),
        "returns, rows that are cut off": off(n["returns"], trl["returns"], cut),
        "GAE of TRL's rewards and values: advantages": off(advantages, trl["advantages"], longer),
        "GAE of TRL's rewards and values: returns": off(returns, trl["returns"], longer),
        "whitening of TRL's advantages, Bessel's correction undone": off(
            masked_whiten(trl["advantages"], mask), trl["white"] * math.sqrt(count / (count - 1)), mask
        ),
        "policy loss of TRL's inputs, each micro-batch of two epochs": float(torch.stack(policy).abs().max()),
        "value loss of TRL's inputs, each micro-batch of two epochs": float(torch.stack(value).abs().max()),
    }


# Where they differ

Difference = tuple[str, str, str, str]
"""What, TRL's, ours, and who is right."""


def of_scores(seen: Run, our: Ours) -> list[Difference]:
    """What differs between sampling and the losses."""
    trl, n, mask, longer = seen.batch, our.numbers, seen.mask, seen.longer
    ended = our.ended & our.clean
    placed = (trl["rewards"] - trl["non_score_reward"]).abs() > 1e-6
    late = int((placed & ~mask)[ended].any(1).sum())
    rows, last = torch.arange(ROWS), our.text.response_lengths - 1
    apart = (n["advantages"] - trl["advantages"])[rows, last][ended].abs().mean()
    size = n["advantages"][rows, last][ended].abs().mean()
    deviations = [trl["white"][mask].std(correction=0), n["white"][n["mask"]].std(correction=0)]
    lost = int((our.text.response_lengths - mask.sum(1))[~our.clean].sum())
    return [
        (
            "place of the score",
            f"the first pad, one past the end token, in {late} of {int(ended.sum())} rows that end",
            "the last response token, in all rows",
            "Here. The state after the end is no state of the episode: TRL learns a value for it, and "
            f"discounts the score once more. The end token's advantage is off by {apart:.2f} on average, "
            f"where it is {size:.2f} (trl#3750)",
        ),
        (
            "tokens that the value loss counts",
            f"{int(longer.sum())}: a pad more in each row that ends",
            f"{int(mask.sum())} of the same rows: response tokens",
            "Here, for the same reason",
        ),
        (
            "a pad that the policy sampled",
            f"ends the response: {lost} sampled tokens of {int((~our.clean).sum())} rows are lost",
            "is a token like others",
            "Here: masks come from lengths, never from ids. These rows are left out above",
        ),
        (
            "deviation of whitened advantages",
            f"{float(deviations[0]):.5f}, by Bessel's correction",
            f"{float(deviations[1]):.5f}",
            "Either: one factor near 1 of the whole loss",
        ),
        (
            "fill of masked log-probabilities",
            f"INVALID_LOGPROB = {ppo_trainer.INVALID_LOGPROB}, which no log-probability can be",
            "0, and a mask in every mean",
            "Here. KL and ratios survive the fill, since both sides get it; means without the mask do not",
        ),
    ]  # fmt: skip


def of_whitening() -> Difference:
    """Whitened rewards, by both functions."""
    rewards = 0.4 + torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    full = torch.ones(8, 8, dtype=torch.bool)
    shown = []
    for whiten in (ppo_trainer.masked_whiten, masked_whiten):
        shifted, unshifted = (whiten(rewards, full, shift_mean=shift).mean() for shift in (True, False))
        shown.append(f"{float(shifted.abs()):.3f} with, {float(unshifted):.3f} without")
    before = float(rewards.mean())
    return (
        f"mean of whitened rewards, {before:.3f} before, with and without the shift",
        *shown,
        "Both: rewards are whitened without the shift, so that the mean keeps its sign",
    )  # type: ignore[return-value]


def of_means(seen: Run) -> list[Difference]:
    """What differs in the means that are logged."""
    masks = [seen.mask[part["rows"]] for part in seen.parts]
    log_ratios = [part["new_logprobs"] - part["mb_logprobs"] for part in seen.parts]

    def mean(numbers: list[Tensor]) -> float:
        return float(torch.stack([masked_mean(x, m) for x, m in zip(numbers, masks, strict=True)]).mean())

    squares = mean([x.square() / 2 for x in log_ratios])
    k3 = torch.stack([approx_kl(x, torch.zeros_like(x), m) for x, m in zip(log_ratios, masks, strict=True)])
    found = [logprobs_from_logits(p["logits"], p["mb_responses"], 1.0, with_entropy=True) for p in seen.parts]
    entropy = mean([entropies for _, entropies in found if entropies is not None])
    padding = f"{1 - float(seen.mask.float().mean()):.0%} of the places are padding"
    told = seen.metrics
    return [
        (
            "approximate KL of an update",
            f"{told['policy/approxkl_avg']:.6f}: half the squared log ratio, all ({squares:.6f} masked)",
            f"{float(k3.mean()):.6f}: k3 over response tokens",
            f"Here: {padding}, and count as no change, so that a limit on it would stop too late",
        ),
        (
            "mean ratio",
            f"{told['val/ratio']:.6f} over all places",
            f"{mean([x.exp() for x in log_ratios]):.6f}",
            "Here, for the same reason",
        ),
        (
            "entropy a token",
            f"{told['policy/entropy_avg']:.4f} over all places",
            f"{entropy:.4f}",
            "Here: what the model would say after the end is not the policy's entropy",
        ),
    ]  # fmt: skip


def of_steps(seen: Run, at_end: Run, our: Ours) -> list[Difference]:
    """What differs in a step of the optimiser."""
    mask = seen.mask
    counts = [int(mask[part["rows"]].sum()) for part in seen.parts]
    losses = [float(part["pg_loss"]) for part in seen.parts]
    second = slice(NUM_PARTS, 2 * NUM_PARTS)
    of_parts = sum(losses[second]) / NUM_PARTS
    of_tokens = sum(x * c for x, c in zip(losses[second], counts[second], strict=True)) / sum(counts[second])
    same = sum(a == b for a, b in zip(seen.order, at_end.order, strict=True))
    clean = our.clean[:, None] & mask
    drift = max(off(p["new_logprobs"], p["mb_logprobs"], clean[p["rows"]]) for p in seen.parts[:NUM_PARTS])
    return [
        (
            f"loss of a minibatch of {NUM_PARTS} micro-batches, second epoch",
            f"{of_parts:.6f}: mean of the micro-batches' means",
            f"{of_tokens:.6f}: sum over the minibatch's tokens",
            "Here: the cut must not change the gradient (trl#6024)",
        ),
        (
            "steps in two epochs of one minibatch",
            f"{len(seen.norms)}; on the last batch of the data set {len(at_end.norms)}, one a micro-batch, "
            "since accelerate stops accumulating there",
            "2, on every batch",
            "Here",
        ),
        (
            "order of the rows in an epoch",
            f"NumPy's global generator: {same} of {ROWS} rows in the same place, in two runs of one seed",
            "drawn from the seed and the epoch",
            "Here: a run can be repeated",
        ),
        (
            f"largest gradient norm at a step, max_grad_norm {MAX_GRAD_NORM}",
            f"{max(seen.norms):.2f}: never clipped",
            f"{MAX_GRAD_NORM} at most, each role by itself",
            "Here (trl#3961)",
        ),
        (
            "log ratio before the first step",
            f"up to {drift:.1e}: the sampler's logits, cached, against a forward pass",
            "0 to the bit, in bf16 too: both are the trainer's forward pass",
            "Here: a ratio that starts at 1 can be checked in every step",
        ),
    ]  # fmt: skip


def of_ends(trunk: Trunk, seen: Run) -> Difference:
    """What ends a response."""
    pad, end = trunk.codec.pad_id, trunk.codec.tokenizer.eos_token_id
    other = next(token for token in trunk.codec.eos_ids if token != end)
    rows = [row for row in seen.batch["responses"].tolist() if other in row[:-1]]
    on = sum(row[row.index(other) + 1] != pad for row in rows)
    return (
        "end tokens of a model that has two",
        f"one stop token: {on} of {len(rows)} rows with the other end go on after it",
        "each end id of the model ends a response",
        "Here (compose-rl#31)",
    )


def page(agreed: dict[str, dict[str, float]], differences: list[Difference], our: Ours) -> str:
    """The table, in Markdown."""
    ended, sampled = int((our.ended & our.clean).sum()), int((~our.clean).sum())
    return "\n".join(
        [
            "# PPO here and in TRL 1.12.0",
            "",
            "Written by `python -m tests.benchmarks.against_trl`, which runs TRL's `PPOTrainer` on one batch",
            f"of the tiny model in float32 ({ROWS} prompts of 3 to 40 tokens, {RESPONSE} response tokens;",
            f"{ended} rows end with an end token, in {sampled} a pad was sampled), and computes the same",
            "from its token rows here.",
            "",
            "## Where the definitions agree",
            "",
            f"Largest difference of any number, with KL estimated by k1 and by k3; {AGREE:.0e} is allowed.",
            "",
            "| what | k1 | k3 |",
            "|---|---|---|",
            *(f"| {name} | {agreed['k1'][name]:.1e} | {agreed['k3'][name]:.1e} |" for name in agreed["k1"]),
            "",
            "## Where they differ",
            "",
            "| what | TRL | here | who is right |",
            "|---|---|---|---|",
            *(f"| {' | '.join(difference)} |" for difference in differences),
            "",
        ]
    )


def main() -> int:
    """Runs both, prints and writes the table; 1 where something that must agree does not."""
    agreed: dict[str, dict[str, float]] = {}
    for estimator in (KLEstimator.K3, KLEstimator.K1):
        trunk = our_trunk()
        seen = run_trl(trunk, 2 * ROWS, estimator)
        our = ours(trunk, seen, estimator)
        agreed[estimator.value] = agreements(seen, our)
    at_end = run_trl(our_trunk(), ROWS, KLEstimator.K1, order=1)
    differences = [
        *of_scores(seen, our),
        of_whitening(),
        *of_means(seen),
        *of_steps(seen, at_end, our),
        of_ends(trunk, seen),
    ]
    text = page(agreed, differences, our)
    print(text)
    PAGE.write_text(text)
    apart = {f"{k}: {name}": d for k, found in agreed.items() for name, d in found.items() if not d <= AGREE}
    for name, difference in apart.items():
        print(f"does not agree, by {difference:.2e}: {name}", file=sys.stderr)
    return int(bool(apart))


if __name__ == "__main__":
    sys.exit(main())
