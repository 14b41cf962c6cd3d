"""A server of a home: one for all commands that use it at the same time, gone with the last of them.

Three locks in the server's folder say all that has to be known, and the system lets go of them when a
process is gone, however it went: `door.lock` is held while someone comes or goes, `users.lock` is shared by
the commands that use the server, `server.lock` is held by the server itself. So no process number is ever
mistaken for another's, and a server whose commands were all killed is used by the next one, and stopped with
it.
"""

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from rlhf_core.settings import Json

START_SECONDS = 120.0
STOP_SECONDS = 10.0
WATCH_SECONDS = 0.5
RESTARTS = 5
LOG_LINES = 15

# The process that is about to become the server writes its own number first: at no moment does a server run
# that nobody could find again.
_LAUNCH = """printf '{"pid": %d, "port": %d}\\n' $$ "$1" > "$0" && shift && exec "$@" """


class ServerFailed(RuntimeError):
    """A server of the home did not come up."""


@dataclass(frozen=True)
class Running:
    """A server as a process."""

    pid: int
    port: int


class Service(ABC):
    """What is served from a folder, and how."""

    title: ClassVar[str]
    """What people call it."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder = folder
        self.port = port
        """The port that was asked for; None takes the one of the last time, or any."""
        self._children: list[subprocess.Popen[bytes]] = []
        self._answered = threading.Event()

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """What to execute."""

    @abstractmethod
    def environment(self, port: int) -> dict[str, str]:
        """All of its environment."""

    @abstractmethod
    def answers(self, port: int) -> bool:
        """Whether what listens at the port is this folder's server: a port may have gone to another."""

    @contextmanager
    def using(self) -> Iterator[Running]:
        """The server as a process, for as long as the block runs; who leaves last stops it.

        One that is killed meanwhile is started again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        left = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(left,), daemon=True)
        with (self.folder / "users.lock").open("wb") as users:
            try:
                with self._door():
                    fcntl.flock(users, fcntl.LOCK_SH)
                    if not self._runs():
                        self._children.append(self._start())
                    server = self._recorded()
                keeper.start()
                yield server
            finally:
                left.set()
                if keeper.is_alive():
                    keeper.join()
                with self._door():
                    fcntl.flock(users, fcntl.LOCK_UN)
                    if _lock_at_once(users, fcntl.LOCK_EX) and self._runs():
                        self._stop()
                if not self._runs():
                    for child in self._children:
                        child.wait()

    def _keep(self, left: threading.Event) -> None:
        """Start a server that has answered and is gone again, at its port, where its clients try again."""
        while not left.wait(WATCH_SECONDS) and len(self._children) <= RESTARTS:
            if self._runs() or not self._answered.is_set():
                continue
            with self._door():
                if not self._runs():
                    self._children.append(self._start())

    def wait_for(self, server: Running) -> None:
        """Return once it answers; raises `ServerFailed` with the end of its log where it does not."""
        deadline = time.monotonic() + START_SECONDS
        while not self.answers(server.port):
            if not self._runs():
                raise self._failure("ended")
            if time.monotonic() > deadline:
                raise self._failure(
                    f"did not answer at 127.0.0.1:{server.port} in {START_SECONDS:.0f} seconds"
                )
            time.sleep(0.1)
        self._answered.set()

    @contextmanager
    def _door(self) -> Iterator[None]:
        with (self.folder / "door.lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _runs(self) -> bool:
        # Shared, so that two who ask at once do not take each other for the server.
        with (self.folder / "server.lock").open("ab") as file:
            return not _lock_at_once(file, fcntl.LOCK_SH)

    def _start(self) -> "subprocess.Popen[bytes]":
        record = self.folder / "server.json"
        port = self._free_port(self._read_record())
        record.unlink(missing_ok=True)
        with (
            (self.folder / "server.lock").open("ab") as lock,
            (self.folder / "server.log").open("wb") as log,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            return subprocess.Popen(
                ["sh", "-c", _LAUNCH, str(record), str(port), *self.command(port)],
                env=self.environment(port),
                # Servers also read settings from files where they are started.
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C is for the command, which then stops the server itself.
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )

    def _read_record(self) -> Running | None:
        try:
            return Running(**json.loads((self.folder / "server.json").read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def _recorded(self) -> Running:
        """The record of the server that runs, waited for if it has only just been started."""
        while (server := self._read_record()) is None:
            if not self._runs():
                raise self._failure("ended before it began")
            time.sleep(0.01)
        if self.port not in (None, server.port):
            raise ServerFailed(
                f"the {self.title} of this home already runs at port {server.port}, and port {self.port} was "
                "asked for: there is one for all commands. Leave the port out, or end the others first."
            )
        return server

    def _free_port(self, before: Running | None) -> int:
        """The port asked for, or of the last time, so that an open browser page finds its server again."""
        wanted = [self.port] if self.port is not None else [before.port if before else 0, 0]
        for port in wanted:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return int(probe.getsockname()[1])
        if self.port is None:
            raise ServerFailed("no free port on 127.0.0.1: every one is taken. Close what holds them.")
        raise ServerFailed(
            f"port {self.port} on 127.0.0.1 cannot be had for the {self.title}: another program listens "
            "there, or only the system may take it. Choose another, or none for any that is free."
        )

    def _failure(self, what: str) -> ServerFailed:
        log = self.folder / "server.log"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) if log.exists() else ""
        return ServerFailed(f"the {self.title} of this home {what}; the end of {log} says why:\n{tail}")

    def _stop(self) -> None:
        server = self._recorded()
        for sign, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            # It leads a session of its own, so that what it may have started goes with it.
            os.killpg(server.pid, sign)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if not self._runs():
                    return
                time.sleep(0.02)


def ask(port: int, path: str) -> Json:
    """The JSON that a server of this machine answers a GET with; None where it gives none."""
    # Not urllib, which would ask a proxy for this machine's own address.
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            found: Json = json.loads(reply.read()) if reply.status == 200 else None
            return found
        except (OSError, http.client.HTTPException, ValueError):
            return None


def _lock_at_once(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
