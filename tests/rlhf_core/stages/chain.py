"""A small store to run stages in, and the jobs of one round of the tiny run, one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flows.settings import RunSettings, load_run_file
from rlhf_core.artifacts import ArtifactRef, Store
from rlhf_core.records import Choice, Completion, Preference, StopReason, compare
from rlhf_core.settings import Execution, Settings
from rlhf_core.sources import read_prompts, write_rows
from rlhf_core.stages import job_key, run_job
from rlhf_core.stages.bootstrap import BootstrapJob
from rlhf_core.stages.comparison import Compare
from rlhf_core.stages.context import Job, open_trunk
from rlhf_core.stages.preferences import PreferencesJob
from rlhf_core.stages.rebase import Rebase
from rlhf_core.stages.reward_validation import RewardValidationJob
from rlhf_core.trunk import Trunk

RUN_FILE = Path(__file__).parents[3] / "infra" / "runs" / "tiny-cpu.yaml"
SMALLER = (
    "prompts={labelling: 32, policy: 16, held_out: 12}",
    "rollouts.sampling.max_new_tokens=8",
    "reward_model.num_epochs=1",
    "policy_update.sampling.max_new_tokens=8",
    "policy_update.algorithm={num_steps: 2, rollouts_per_step: 16}",
    "evals.held_out.sampling.max_new_tokens=8",
)
SEED = 7
PLAIN = Execution(device="cpu", num_threads=1)


@dataclass
class Chain:
    """A store, and every job that was run in it, by its stage and subject."""

    root: Path
    execution: Execution = PLAIN
    jobs: dict[str, Job] = field(default_factory=dict)
    made: dict[str, dict[str, ArtifactRef]] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        return Store(self.root / "store")

    def run(
        self,
        name: str,
        settings: Settings,
        inputs: Mapping[str, ArtifactRef],
        *,
        subject: str = "",
        seed: int = SEED,
    ) -> dict[str, ArtifactRef]:
        """What a stage makes."""
        told = settings.to_json()
        job = Job(
            stage=name,
            settings=told,
            inputs=dict(inputs),
            seed=seed,
            execution=self.execution,
            store=str(self.store.root),
            work=str(self.root / "work" / job_key(name, told, inputs, seed)),
        )
        shown = f"{name}.{subject}" if subject else name
        self.jobs[shown] = job
        self.made[shown] = run_job(job).outputs
        return self.made[shown]

    def rows(self, rows: Mapping[str, Sequence[Settings]], kind: str) -> ArtifactRef:
        """Rows made by hand as an artifact, a file for each name."""
        with self.store.writing() as folder:
            for name, those in rows.items():
                write_rows(those, folder / f"{name}.parquet")
            return self.store.commit(folder, kind, "by hand")

    def open(self, ref: ArtifactRef) -> Path:
        return self.store.open(ref)

    def trunk(self) -> Trunk:
        """The trunk that bootstrap made, with no role yet."""
        ref = self.made["bootstrap"]["trunk"]
        return open_trunk(self.open(ref), ref.digest, self.execution)


def play(chain: Chain, *overrides: str) -> RunSettings:
    """Every stage of a first round, from the base model to the decision, and the candidate as a new trunk."""
    run = load_run_file(RUN_FILE, (*SMALLER, *overrides))
    started = chain.run("bootstrap", BootstrapJob(**run.bootstrap.model_dump(), fingerprint="tiny"), {})
    trunk = {"trunk": started["trunk"]}
    policy = {"policy": started["policy"]}
    source = chain.rows({"prompts": read_prompts(run.prompt_source)}, "prompt_source")
    prompts = chain.run("prompts", run.prompts, {"source": source})
    labelling = {"labelling_prompts": prompts["labelling_prompts"]}
    completions = chain.run("rollouts", run.rollouts, {**trunk, **policy, **labelling})
    comparisons = chain.run("pairing", run.pairing, completions)
    labels = chain.run("preferences", PreferencesJob(**run.preferences.model_dump(), round=1), comparisons)
    pool = {"preferences.0001": labels["preferences"]}
    reward = chain.run("reward_modeling", run.reward_model, {**trunk, **pool})
    held_out_share = run.reward_model.held_out_share
    chain.run(
        "reward_validation", RewardValidationJob(held_out_share=held_out_share), {**trunk, **reward, **pool}
    )
    on = {"policy_prompts": prompts["policy_prompts"]}
    candidate = chain.run(
        "policy_update",
        run.policy_update,
        {**trunk, **policy, **reward, **on, "initial_policy": started["policy"]},
    )
    measured = {
        who: chain.run(
            "measurement",
            run.evals.held_out,
            {**trunk, "policy": ref, "held_out_prompts": prompts["held_out_prompts"]},
            subject=who,
        )["measurements"]
        for who, ref in (("champion", started["policy"]), ("candidate", candidate["policy"]))
    }
    chain.run(
        "comparison",
        Compare(win_rate=run.evals.win_rate),
        {
            **trunk,
            **reward,
            **measured,
            "initial": measured["champion"],
            "champion_policy": started["policy"],
        },
    )
    seen = {"monitors": candidate["monitors"]}
    chain.run("promotion", run.promotion, {**chain.made["comparison"], **seen})
    new = {"policy": candidate["policy"], "measured": measured["candidate"]}
    chain.run("rebase", Rebase(lora=run.bootstrap.lora), {**trunk, **new})
    return run


def completion(prompt_id: str, number: int, text: str) -> Completion:
    """A completion whose tokens are the bytes of its text."""
    return Completion(
        id=f"{prompt_id}/{number}",
        prompt_id=prompt_id,
        prompt_text="?",
        prompt_ids=[30],
        response_ids=list(text.encode()),
        text=text,
        stop=StopReason.LENGTH,
    )


def label(prompt_id: str, a: int, b: int, choice: Choice, round: int = 1) -> Preference:
    """What was said of two completions of a prompt."""
    shown = compare(prompt_id, f"{prompt_id}/{a}", f"{prompt_id}/{b}")
    return Preference(
        comparison_id=shown.id,
        prompt_id=prompt_id,
        completion_a=shown.completion_a,
        completion_b=shown.completion_b,
        choice=choice,
        annotator="hand",
        round=round,
    )
