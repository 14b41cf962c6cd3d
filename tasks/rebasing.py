"""A rebase: the champion becomes the trunk, and the initial policy, of all rounds to come."""

from datetime import UTC, datetime

from prefect import task
from prefect.cache_policies import NO_CACHE

from rlhf_core.artifacts import derive_seed
from rlhf_core.ledger import RebaseRecord, StageRecord
from rlhf_core.stages.bootstrap import Bootstrap
from rlhf_core.stages.rebase import Rebase
from rlhf_core.stages.measurement import HeldOut
from tasks.context import result_of
from tasks.decisions import follow_ledger
from tasks.mlflow_store import TrackingUnavailable
from tasks.project import Project
from tasks.reports import rebase_told
from rlhf_core.settings import InvalidSettings


def refuse_what_cannot_be_merged(project: str, ledger: Ledger) -> None:
    ...
