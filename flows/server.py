"""The Prefect server of a home: one for all commands that use the home at the same time, gone with the last.

Three locks in `<home>/prefect` say all that has to be known, and the system lets go of them when a process is
gone, however it went: `door.lock` is held while someone comes or goes, `users.lock` is shared by the commands
that use the server, `server.lock` is held by the server itself. So no process number is ever mistaken for
another's, and a server whose commands were all killed is used by the next one, and stopped with it.

Prefect reads its settings when it is imported: import it inside `prefect_server`, or by `meanwhile`.
"""

import fcntl
import http.client
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

START_SECONDS = 120.0
STOP_SECONDS = 10.0
LOG_LINES = 15

# The process that is about to become the server writes its own number first: at no moment does a server run
# that nobody could find again.
_LAUNCH = """printf '{"pid": %d, "port": %d}\\n' $$ "$1" > "$0" && shift && exec "$@" """


class ServerFailed(RuntimeError):
    """The home's Prefect server did not come up."""


@contextmanager
def prefect_server(home: Path, meanwhile: Callable[[], object] = lambda: None) -> Iterator[str]:
    """The API address of the home's server, which this process is set up to use inside the block.

    `meanwhile` is called while the server starts, with everything set: a good time for slow imports.
    """
    folder = home.resolve() / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    with _using(folder) as server, _environment(_client_environment(folder, server)):
        meanwhile()
        _await(folder, server)
        if "prefect" in sys.modules:
            _refuse_other_address(server)
        try:
            yield server.url
        finally:
            if "prefect" in sys.modules:
                _send_what_waits()


@dataclass(frozen=True)
class _Server:
    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def answers_for(self, folder: Path) -> bool:
        """Whether the server is up and this home's: a port may have gone to another in the meantime."""
        # Not urllib, which would ask a proxy for this machine's own address.
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
            try:
                connection.request("GET", "/api/admin/settings")
                reply = connection.getresponse()
                return reply.status == 200 and json.loads(reply.read()).get("home") == str(folder)
            except (OSError, http.client.HTTPException, json.JSONDecodeError):
                return False


@contextmanager
def _using(folder: Path) -> Iterator[_Server]:
    """The server as a process, for as long as the block runs; who leaves last stops it."""
    child: subprocess.Popen[bytes] | None = None
    with (folder / "users.lock").open("wb") as users:
        try:
            with _door(folder):
                fcntl.flock(users, fcntl.LOCK_SH)
                if not _runs(folder):
                    child = _start(folder)
                server = _recorded(folder)
            yield server
        finally:
            with _door(folder):
                fcntl.flock(users, fcntl.LOCK_UN)
                if _lock_at_once(users, fcntl.LOCK_EX) and _runs(folder):
                    _stop(folder)
            if child is not None and not _runs(folder):
                child.wait()


@contextmanager
def _door(folder: Path) -> Iterator[None]:
    with (folder / "door.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_at_once(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _runs(folder: Path) -> bool:
    # Shared, so that two who ask at once do not take each other for the server.
    with (folder / "server.lock").open("ab") as file:
        return not _lock_at_once(file, fcntl.LOCK_SH)


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    record = folder / "server.json"
    port = _free_port(_read_record(record))
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.lock").open("ab") as lock, (folder / "server.log").open("wb") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return subprocess.Popen(
            ["sh", "-c", _LAUNCH, str(record), str(port), *command],
            env=_server_environment(folder, port),
            # Prefect also reads settings from files where it is started.
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A Ctrl-C is for the command, which then stops the server itself.
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )


def _read_record(record: Path) -> _Server | None:
    try:
        return _Server(**json.loads(record.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _recorded(folder: Path) -> _Server:
    """The record of the server that runs, waited for if it has only just been started."""
    while (server := _read_record(folder / "server.json")) is None:
        if not _runs(folder):
            raise _failure(folder, "ended before it began")
        time.sleep(0.01)
    return server


def _free_port(before: _Server | None) -> int:
    """The port of the last time if it is free, so that an open browser page finds its server again."""
    for port in (before.port if before else 0, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ServerFailed("no free port on 127.0.0.1: every one is taken. Close what holds them.")


def _await(folder: Path, server: _Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not server.answers_for(folder):
        if not _runs(folder):
            raise _failure(folder, "ended")
        if time.monotonic() > deadline:
            raise _failure(folder, f"did not answer at {server.url} within {START_SECONDS:.0f} seconds")
        time.sleep(0.1)
    (folder / "migrated.txt").write_text(importlib.metadata.version("prefect"))


def _failure(folder: Path, what: str) -> ServerFailed:
    log = folder / "server.log"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) if log.exists() else ""
    return ServerFailed(f"the Prefect server of this home {what}; the end of {log} says why:\n{tail}")


def _stop(folder: Path) -> None:
    server = _recorded(folder)
    for sign, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        # It leads a session of its own, so that what it may have started goes with it.
        os.killpg(server.pid, sign)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not _runs(folder):
                return
            time.sleep(0.02)


def _server_environment(folder: Path, port: int) -> dict[str, str]:
    own = {
        **_quiet(folder),
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # Else the page asks port 4200, whatever port serves it.
        "PREFECT_UI_API_URL": _Server(pid=0, port=port).url,
    }
    migrated = folder / "migrated.txt"
    database = folder / "prefect.db"
    # Finding that there is nothing to migrate takes a second of every start.
    if (
        database.exists()
        and migrated.exists()
        and migrated.read_text() == importlib.metadata.version("prefect")
    ):
        own["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] = "false"
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | own


def _client_environment(folder: Path, server: _Server) -> dict[str, str | None]:
    """What to set and, where None, to unset: a server, key or profile that is meant for other work."""
    elsewhere = ("PREFECT_API_", "PREFECT_SERVER_", "PREFECT_CLOUD_", "PREFECT_UI_", "PREFECT_PROFILE")
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1"]))
    return {
        **{name: None for name in os.environ if name.startswith(elsewhere)},
        **_quiet(folder),
        "PREFECT_API_URL": server.url,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _quiet(folder: Path) -> dict[str, str]:
    return {"PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "true"}


@contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set_environment(changes)
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _refuse_other_address(server: _Server) -> None:
    from prefect.settings import get_current_settings

    address = get_current_settings().api.url
    if address != server.url:
        raise RuntimeError(
            f"Prefect was imported before this home's server was known: it would talk to {address}, not to "
            f"{server.url}. Import it, and what imports it, inside `prefect_server`."
        )


def _send_what_waits() -> None:
    """Sends the log lines and events that Prefect gathers for seconds before it sends them."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogHandler

    APILogHandler().flush()
    EventsWorker.drain_all(timeout=STOP_SECONDS)
