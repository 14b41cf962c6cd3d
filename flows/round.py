"""The round: one turn of the loop."""

from prefect import Flow, State, flow
from prefect.states import Completed

from flows.settings import RunSettings
from tasks.context import RoundEnded
from tasks.data import collect_completions, collect_preferences, draw_prompts, label_pool, pair_completions
from tasks.decisions import accept, promote
from tasks.finishing import finish_round
from tasks.opening import Sources, open_round
from tasks.project import Project
from tasks.training import compare, measure, train_reward_model, update_policy, validate_reward_model


def play_round(project: Project, number: int, settings: RunSettings, sources: Sources) -> None:
    """One turn of the loop: collect feedback on the champion, learn from it, keep the better policy."""
    # fmt: off
    round        = open_round(project, number, settings, settings.seed, sources)
    settings     = RunSettings.model_validate(round.record.settings)
    initial      = round.artifact("policy")
    champion     = round.record.champion
    prompts      = draw_prompts(round, settings.prompts)
    completions  = collect_completions(round, champion, prompts, settings.rollouts)
    comparisons  = pair_completions(round, completions, settings.pairing)
    preferences  = collect_preferences(round, comparisons, settings.preferences)
    labels       = label_pool(round, preferences)
    reward_model = train_reward_model(round, labels, settings.reward_model)
    validation   = validate_reward_model(round, reward_model, labels, settings.reward_validation,
                                         settings.reward_model.held_out_share)
    accept(round, validation, settings.reward_gates)                        # may end: RewardModelRejected
    candidate    = update_policy(round, champion, prompts, reward_model, settings.policy_update)
    policies     = {"initial": initial, "champion": champion, "candidate": candidate}
    measured     = {who: measure(round, one, prompts, settings.evals, who) for who, one in policies.items()}
    comparison   = compare(round, measured, reward_model, settings.evals)
    promote(round, candidate, comparison, settings.promotion)               # ends: Promoted or GateRejected
    # fmt: on


def round_flow(project: Project) -> Flow[[int, RunSettings, Sources], State[None]]:
    """The round as a Prefect flow of this project: a named end becomes a named Completed state."""

    @flow(
        name="round",
        flow_run_name=f"{project.name} round {{number}}",
        validate_parameters=False,
        persist_result=False,
    )
    def one_round(number: int, settings: RunSettings, sources: Sources) -> State[None]:
        try:
            play_round(project, number, settings, sources)
        except RoundEnded as ended:
            if project.ledger.decision(number) is not None:
                finish_round(project, number)
            return Completed(name=ended.outcome, message=ended.sentence)
        raise AssertionError("a round ends by a decision")

    return one_round
