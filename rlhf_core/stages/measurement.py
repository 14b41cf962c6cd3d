"""measurement: one policy on one eval spec; computed once, reused ever after."""

from rlhf_core.artifacts import derive_seed
from rlhf_core.evals.held_out import HeldOut, Sampled, means, text_numbers
from rlhf_core.gates import Estimate
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.records import Completion, Measurement, Prompt
from rlhf_core.settings import Settings
from rlhf_core.sources import read_rows, write_rows
from rlhf_core.stages.context import StageContext

NAME, VERSION = "measurement", 1


class Numbers(Settings):
    """What was measured of one policy."""

    metrics: dict[str, Estimate]


class ItemNumbers(Settings):
    """Log-probability sums of each completion, in the order of the completions."""

    logprob: list[float]
    kl_to_initial: list[float]
    base_nll: list[float]


def run(context: StageContext) -> None:
    """Sample on the held-out prompts and measure."""
    settings = context.settings(HeldOut)
    prompts = read_rows(context.input("held_out_prompts") / "prompts.parquet", Prompt)
    trunk = context.trunk()
    trunk.load_role("policy", context.input("policy"))
    seeds = [
        [derive_seed(context.seed, p.id, k) for k in range(settings.completions_per_prompt)] for p in prompts
    ]
    sampled = settings.sample(
        trunk,
        HFGenerator(),
        prompts,
        seeds,
        lambda done, total: context.sink.progress(done, total, "completions"),
    )
    rows = settings.measure(sampled)
    numbers = {
        **means(rows, derive_seed(context.seed, "bootstrap")),
        **{name: Estimate.exactly(value) for name, value in text_numbers(sampled.completions, rows).items()},
    }
    with context.output("measurements", "measurements") as folder:
        write_rows(sampled.completions, folder / "completions.parquet")
        write_rows(rows, folder / "measurements.parquet")
        items = ItemNumbers(
            logprob=sampled.logprob, kl_to_initial=sampled.kl_to_initial, base_nll=sampled.base_nll
        )
        (folder / "items.json").write_text(items.model_dump_json())
        (folder / "numbers.json").write_text(Numbers(metrics=numbers).model_dump_json(indent=1))
    context.summary({f"eval/{name}": estimate.value for name, estimate in numbers.items()})


class Measured:
    """A measurements artifact, read."""

    def __init__(self, context: StageContext, role: str) -> None:
        folder = context.input(role)
        items = ItemNumbers.model_validate_json((folder / "items.json").read_bytes())
        self.sampled = Sampled(
            read_rows(folder / "completions.parquet", Completion),
            items.logprob,
            items.kl_to_initial,
            items.base_nll,
        )
        self.rows = read_rows(folder / "measurements.parquet", Measurement)
        self.numbers = Numbers.model_validate_json((folder / "numbers.json").read_bytes()).metrics
