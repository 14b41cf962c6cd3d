"""`rlhf ui`: the pages of a home in the browser, until Ctrl-C."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.server import prefect_server
from flows.service import Service, ask
from rlhf_core.settings import InvalidSettings
from tasks.mlflow_store import MlflowStore, quiet_environment


class MlflowService(Service):
    """MLflow's pages over the home's database; commands write to the database without it."""

    title = "MLflow page"

    def __init__(self, home: Path, port: int | None = None) -> None:
        self.store = MlflowStore(home)
        super().__init__(self.store.folder / "ui", port)

    def command(self, port: int) -> list[str]:
        """One worker: it serves people, not training."""
        where = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        backend = ["--backend-store-uri", self.store.uri, "--registry-store-uri", self.store.uri]
        files = [
            "--default-artifact-root",
            (self.store.folder / "artifacts").as_uri(),
            "--no-serve-artifacts",
        ]
        return [sys.executable, "-m", "mlflow", "server", *backend, *files, *where]

    def environment(self, port: int) -> dict[str, str]:
        """Nothing of another MLflow's settings, no telemetry, no background jobs."""
        quiet_environment()
        elsewhere = ("MLFLOW_TRACKING_", "MLFLOW_REGISTRY_", "MLFLOW_EXPERIMENT_", "MLFLOW_SERVER_ALLOWED_")
        return {name: value for name, value in os.environ.items() if not name.startswith(elsewhere)}

    def answers(self, port: int) -> bool:
        """Its first experiment says where its files are."""
        found = ask(port, "/api/2.0/mlflow/experiments/get?experiment_id=0")
        experiment = found.get("experiment") if isinstance(found, dict) else None
        place = experiment.get("artifact_location") if isinstance(experiment, dict) else None
        return isinstance(place, str) and place.startswith((self.store.folder / "artifacts").as_uri())


@contextmanager
def pages(home: Path, prefect_port: int | None, mlflow_port: int | None) -> Iterator[tuple[str, str]]:
    """The addresses of both pages, up while the block runs."""
    _ = MlflowStore(home).client  # the database is made, or brought up, under the lock that writers take
    service = MlflowService(home, mlflow_port)
    with service.using() as running, prefect_server(home, port=prefect_port) as api:
        service.wait_for(running)
        # Without the query MLflow opens every experiment as a GenAI one, whose page shows traces and no run.
        yield (
            api.removesuffix("/api"),
            f"http://127.0.0.1:{running.port}/#/experiments?workflowType=machine_learning",
        )


def serve(
    home: Path, prefect_port: int | None, mlflow_port: int | None, say: Callable[[str, str], None]
) -> None:
    """Hold both pages up until the process is told to end."""
    if not (home / "projects").is_dir():
        raise InvalidSettings(
            f"{home} holds no project, so there is nothing to look at: `rlhf run RUN.yaml` makes one there. "
            "Name the folder of yours with --home."
        )
    ended = threading.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda *_: ended.set())
    with pages(home, prefect_port, mlflow_port) as (prefect, mlflow):
        say(prefect, mlflow)
        while not ended.wait(timeout=1.0):
            pass
