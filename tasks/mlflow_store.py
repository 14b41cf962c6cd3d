"""The MLflow database of a home: made whole, and opened by many.

mlflow is imported on first use, which costs two seconds: here, in `tracking.py` and in `registry.py` only.
"""

import fcntl
import functools
import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient


LOCKED_SECONDS = 1.0


class TrackingUnavailable(RuntimeError):
    """MLflow could not be reached; nothing computed is lost, and the same call may be made again."""


def quiet_environment() -> None:
    """Keeps MLflow off the network and off stdout in this process and its children; to be called early."""
    os.environ.update(
        DO_NOT_TRACK="true",
        MLFLOW_DISABLE_TELEMETRY="true",
        MLFLOW_LOGGING_LEVEL="WARNING",
        MLFLOW_MODEL_CATALOG_URI="",
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
        MLFLOW_SKIP_PIP_REQUIREMENTS_CHECK="true",
        MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT="true",
        # Too long a value is then an error instead of a value cut without a word.
        MLFLOW_TRUNCATE_LONG_VALUES="false",
    )
    # It would win over the run id that a call names.
    os.environ.pop("MLFLOW_RUN_ID", None)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It logs each database error with its traceback; ours arrive as one sentence.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


@contextmanager
def reaching_mlflow(purpose: str) -> Iterator[None]:
    """Turns what MLflow, its database or its disk raises into `TrackingUnavailable`."""
    quiet_environment()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError) as error:
        origin: BaseException = error
        while origin.__cause__ is not None:
            origin = origin.__cause__
        reason = str(origin).partition("\n")[0]
        raise TrackingUnavailable(
            f"MLflow failed at {purpose}: {reason}. What was computed is safe, and what MLflow was to be "
            "told is kept. Free the database or the disk and run the same command again, or `rlhf replay`."
        ) from error


class MlflowStore:
    """What lies in `<home>/mlflow`: the database, the artifacts, and a lock for every process that writes."""

    def __init__(self, home: Path) -> None:
        self.folder = home.resolve() / "mlflow"
        if re.search("[%?]", str(self.folder)):
            raise ValueError(
                f"home {home}: `%` and `?` have a meaning in a database's address; choose another."
            )
        self.uri = f"sqlite:///{self.folder / 'mlflow.db'}"
        """What `mlflow ui --backend-store-uri` takes."""

    @functools.cached_property
    def client(self) -> "MlflowClient":
        """MLflow's client of the database, which is made if there is none; that takes seconds."""
        with reaching_mlflow("opening its database"):
            from mlflow import MlflowClient

            with self.lock():
                _make_database(self.folder / "mlflow.db", self.folder / "artifacts")
            return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def check(self) -> None:
        """Raises `TrackingUnavailable` at once where MLflow would try for twenty seconds, or for minutes."""
        database = self.folder / "mlflow.db"
        with reaching_mlflow("looking at its database"):
            if database.exists():
                uri = f"{database.as_uri()}?mode=ro"
                with closing(sqlite3.connect(uri, uri=True, timeout=LOCKED_SECONDS)) as connection:
                    connection.execute("select count(*) from experiments").fetchone()
            elif "client" in vars(self):
                raise OSError("it was deleted while it was in use, and the next command makes a new one")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time makes a database or an experiment."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "mlflow.lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _make_database(database: Path, artifacts: Path) -> None:
    """Makes the database whole or not at all: a half-migrated one could never be opened again."""
    if database.exists():
        return
    import sqlalchemy
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    unfinished = database.with_name("mlflow.unfinished.db")
    for leftover in database.parent.glob("mlflow.unfinished.db*"):
        leftover.unlink()
    # Nobody reads it before it is whole, so its many migrations need not each wait for the disk.
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", _do_not_wait_for_disk)
    try:
        SqlAlchemyStore(f"sqlite:///{unfinished}", artifacts.as_uri()).engine.dispose()  # type: ignore[no-untyped-call]
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "connect", _do_not_wait_for_disk)
    with unfinished.open("rb+") as file:
        os.fsync(file.fileno())
    unfinished.replace(database)


def _do_not_wait_for_disk(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute("PRAGMA synchronous = OFF")
