"""A home says which version wrote it, and is refused before work where it cannot be written to."""

import errno
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from rlhf_core import __version__
from tasks.home import (
    FORMAT,
    DiskFailed,
    InvalidHome,
    check_format,
    check_writable,
    open_home,
    saying_what_the_disk_did,
)


def test_a_home_says_its_format_once(tmp_path: Path) -> None:
    home = tmp_path / "a" / "home"
    open_home(home)
    said = json.loads((home / "home.json").read_text())
    assert said == {"format": FORMAT, "version": __version__}
    check_format(home)
    open_home(home)
    assert json.loads((home / "home.json").read_text()) == said


def test_a_home_of_a_newer_version_is_refused_by_its_version(tmp_path: Path) -> None:
    (tmp_path / "home.json").write_text(json.dumps({"format": FORMAT + 1, "version": "9.9"}))
    with pytest.raises(InvalidHome, match=r"written by rlhf-rounds 9\.9 in format 2.*Install 9\.9"):
        check_format(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"format": "new"}', '{"version": "1"}'])
def test_a_home_that_something_else_wrote_to_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "home.json").write_text(content)
    with pytest.raises(InvalidHome, match="does not say which version"):
        check_format(tmp_path)


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "not" / "there")
    check_format(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_homes_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidHome, match="file is a file, and a home is a folder"):
        check_writable(tmp_path / "file" / "home")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is the folder here that takes no files")
def test_a_home_that_takes_no_files_is_refused() -> None:
    with pytest.raises(InvalidHome, match="home /proc/home cannot be written to"):
        check_writable(Path("/proc/home"))


def test_a_disk_with_too_little_room_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(2**40, 2**40, 5 * 2**20))
    with pytest.raises(InvalidHome, match="5 MiB are free on its disk, and a round needs 256 MiB"):
        check_writable(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is the full disk of this test")
def test_a_disk_that_fills_up_half_way_ends_in_a_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFailed, match=r"the disk is full.*the same command goes on from there"),
        saying_what_the_disk_did(tmp_path),
        open("/dev/full", "w") as full,
    ):
        full.write("x" * 100_000)


def test_what_the_disk_did_not_do_passes_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConnectionRefusedError), saying_what_the_disk_did(tmp_path):
        raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
