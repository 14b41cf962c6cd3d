"""What every test stands on: no network, no telemetry, and none of the user's own configuration."""

import os
import tempfile
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).parents[1]
SCRATCH = tempfile.TemporaryDirectory(prefix="rlhf-tests-", ignore_cleanup_errors=True)

# Set before any library is imported, since most of them read their environment once; children inherit it.
for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_"))]:
    del os.environ[name]
os.environ |= {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_HOME": f"{SCRATCH.name}/prefect",
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": f"{SCRATCH.name}/huggingface",
    "MPLBACKEND": "Agg",
    "TOKENIZERS_PARALLELISM": "false",
}
# The models are tiny: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, and no time limit that a busy machine could break.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_unconfigure() -> None:
    SCRATCH.cleanup()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public data sets that lies beside the repository, or where RLHF_SHARED_DATA says."""
    folder = Path(os.environ.get("RLHF_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}; name its folder with RLHF_SHARED_DATA")
    return folder
