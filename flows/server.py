"""The Prefect server of a home, and this process set up to use it.

Prefect reads its settings when it is imported: import it inside `prefect_server`, or by `meanwhile`.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.service import STOP_SECONDS, Service, ask


class PrefectService(Service):
    """The Prefect server, with its database in the folder."""

    title = "Prefect server"

    def command(self, port: int) -> list[str]:
        """Of the environment's own Prefect."""
        return [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]

    def environment(self, port: int) -> dict[str, str]:
        """Nothing of another Prefect's settings, and no migration where there is nothing to migrate."""
        own = {
            **_quiet(self.folder),
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            # Else the page asks port 4200, whatever port serves it.
            "PREFECT_UI_API_URL": api_url(port),
        }
        # Finding that there is nothing to migrate takes a second of every start.
        migrated = self.folder / "migrated.txt"
        known = migrated.read_text() if migrated.exists() else None
        if (self.folder / "prefect.db").exists() and known == importlib.metadata.version("prefect"):
            own["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] = "false"
        return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | own

    def answers(self, port: int) -> bool:
        """It says whose home it serves."""
        settings = ask(port, "/api/admin/settings")
        return isinstance(settings, dict) and settings.get("home") == str(self.folder)

    def note_migrated(self) -> None:
        """Remember which Prefect the database was last brought up to."""
        (self.folder / "migrated.txt").write_text(importlib.metadata.version("prefect"))


def api_url(port: int) -> str:
    """The address that Prefect's clients take."""
    return f"http://127.0.0.1:{port}/api"


@contextmanager
def prefect_server(
    home: Path, meanwhile: Callable[[], object] = lambda: None, port: int | None = None
) -> Iterator[str]:
    """The API address of the home's server, which this process is set up to use inside the block.

    `meanwhile` is called while the server starts, with everything set: a good time for slow imports.
    """
    service = PrefectService(home.resolve() / "prefect", port)
    with service.using() as server:
        url = api_url(server.port)
        with _environment(_client_environment(service.folder, url)):
            meanwhile()
            service.wait_for(server)
            service.note_migrated()
            if "prefect" in sys.modules:
                _refuse_other_address(url)
            try:
                yield url
            finally:
                if "prefect" in sys.modules:
                    _send_what_waits()


def _client_environment(folder: Path, url: str) -> dict[str, str | None]:
    """What to set and, where None, to unset: a server, key or profile that is meant for other work."""
    elsewhere = ("PREFECT_API_", "PREFECT_SERVER_", "PREFECT_CLOUD_", "PREFECT_UI_", "PREFECT_PROFILE")
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1"]))
    return {
        **{name: None for name in os.environ if name.startswith(elsewhere)},
        **_quiet(folder),
        "PREFECT_API_URL": url,
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


def _refuse_other_address(url: str) -> None:
    from prefect.settings import get_current_settings

    address = get_current_settings().api.url
    if address != url:
        raise RuntimeError(
            f"Prefect was imported before this home's server was known: it would talk to {address}, not to "
            f"{url}. Import it, and what imports it, inside `prefect_server`."
        )


def _send_what_waits() -> None:
    """Sends the log lines and events that Prefect gathers for seconds before it sends them."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogHandler

    APILogHandler().flush()
    EventsWorker.drain_all(timeout=STOP_SECONDS)
