"""The home's Prefect server, a real one, between commands that come, go, and are killed."""

import http.server
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import psutil
import pytest

from flows.server import PrefectService, prefect_server
from flows.service import ServerFailed

ROOT = Path(__file__).parents[2]

# A command that uses the server until a line arrives on its stdin.
COMMAND = """
import json, os, sys
from pathlib import Path
from flows.server import prefect_server

with prefect_server(Path(sys.argv[1])) as url:
    record = json.loads((Path(sys.argv[1]) / "prefect" / "server.json").read_text())
    record |= {"url": url, "key": os.environ.get("PREFECT_API_KEY")}
    print(json.dumps(record), flush=True)
    if sys.stdin.readline() == "play\\n":
        import prefect

        @prefect.task
        def stage():
            prefect.get_run_logger().info("a line")

        @prefect.flow(name="round")
        def play():
            stage()

        play()
print(json.dumps({"url": os.environ.get("PREFECT_API_URL"), "key": os.environ.get("PREFECT_API_KEY")}))
"""
IMPORTED_TOO_EARLY = """
import sys
from pathlib import Path
import prefect
from flows.server import prefect_server
with prefect_server(Path(sys.argv[1])):
    print("inside")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a home")


def run(script: str, home: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PREFECT_API_KEY": "of the team's own server"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", script, str(home)],
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def answer(stream: IO[str] | None) -> dict[str, object]:
    assert stream is not None
    return dict(json.loads(stream.readline()))


def leave(command: "subprocess.Popen[str]", how: str = "leave") -> None:
    out, err = command.communicate(f"{how}\n")
    assert command.returncode == 0, err
    # The environment is the user's own again.
    assert json.loads(out.splitlines()[-1]) == {"url": None, "key": "of the team's own server"}
    assert "Error" not in err


def lives(pid: object) -> bool:
    assert isinstance(pid, int)
    # Whoever inherits the child of a killed command may be slow to bury it.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_commands_share_one_server_and_the_last_to_leave_stops_it(home: Path) -> None:
    first, second = run(COMMAND, home), run(COMMAND, home)
    told, same = answer(first.stdout), answer(second.stdout)
    assert told == same
    assert told["key"] is None

    early = run(IMPORTED_TOO_EARLY, home)
    out, err = early.communicate()
    assert (early.returncode, out) == (1, "")
    assert "Prefect was imported before this home's server was known" in err

    leave(first)
    assert lives(told["pid"])
    leave(second, "play")
    assert not lives(told["pid"])

    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        assert database.execute("select state_type from flow_run").fetchall() == [("COMPLETED",)]
        assert database.execute("select state_type from task_run").fetchall() == [("COMPLETED",)]
        assert ("a line",) in database.execute("select message from log").fetchall()
    database.close()


@pytest.mark.slow
def test_a_server_whose_command_was_killed_serves_the_next_one_and_goes_with_it(home: Path) -> None:
    killed = run(COMMAND, home)
    told = answer(killed.stdout)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert lives(told["pid"])

    begun = time.monotonic()
    following = run(COMMAND, home)
    assert answer(following.stdout) == told
    assert time.monotonic() - begun < 5
    leave(following)
    assert not lives(told["pid"])


def test_a_server_that_is_killed_is_started_again_at_its_port(home: Path) -> None:
    command = run(COMMAND, home)
    told = answer(command.stdout)
    assert isinstance(told["pid"], int) and isinstance(told["port"], int)
    os.killpg(told["pid"], signal.SIGKILL)
    record = home / "prefect" / "server.json"
    again = told
    while again["pid"] == told["pid"] or not PrefectService(home / "prefect").answers(told["port"]):
        time.sleep(0.05)
        again = json.loads(record.read_text()) if record.exists() else told
    assert again["port"] == told["port"]
    leave(command, "play")
    assert not lives(again["pid"])


def test_a_server_that_cannot_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "prefect" / "prefect.db").mkdir(parents=True)
    with pytest.raises(ServerFailed, match="unable to open database file"), prefect_server(tmp_path):
        pass
    record = json.loads((tmp_path / "prefect" / "server.json").read_text())
    assert not psutil.pid_exists(record["pid"])


def test_another_homes_server_on_a_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    class Settings(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"home": str(tmp_path / "other")}).encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Settings) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            assert PrefectService(tmp_path / "other").answers(other.server_port)
            assert not PrefectService(tmp_path / "ours").answers(other.server_port)
        finally:
            other.shutdown()
            thread.join()
    assert not PrefectService(tmp_path / "other").answers(other.server_port)
