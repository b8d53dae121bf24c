"""The file with the private key of a node: kept, handed to the service, and no way to other files."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from probing.daemon.supervisor.node_key import HANDED, KEPT, hand_key, main, take_key


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="probingd-key-") as path:
        yield Path(path)


def test_a_key_is_made_once_and_handed_at_each_start(state: Path, public: Path) -> None:
    hand_key(state, public, None)
    key = take_key(public)
    assert len(key) == 32
    for path in (state / KEPT, public / HANDED):
        assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (key, 0o600)
    (public / HANDED).unlink()
    hand_key(state, public, None)
    hand_key(state, public, (os.getuid(), os.getgid()))
    assert take_key(public) == key


def test_a_unit_hands_it_as_the_command_line_says(state: Path, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = f"--users.service={os.getuid()}"
    monkeypatch.setattr("sys.argv", ["x", f"--state_dir={state}", f"--socket={public}/probingd.sock", user])
    main()
    assert take_key(public) == (state / KEPT).read_bytes()
    assert (public / HANDED).stat().st_uid == os.getuid()


@pytest.mark.parametrize("left", [b"", b"short", bytes(33)])
def test_a_key_that_a_crash_left_short_is_made_anew(state: Path, public: Path, left: bytes) -> None:
    (state / KEPT).write_bytes(left)
    hand_key(state, public, None)
    assert (state / KEPT).read_bytes() == take_key(public) != left


def test_a_service_without_supervisor_keeps_its_own(public: Path) -> None:
    assert take_key(public) == take_key(public)
    assert len(take_key(public / "gone")) == 32
    assert take_key(public / "gone") != take_key(public / "gone")


def test_no_link_leads_elsewhere(state: Path, public: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    (state / KEPT).symlink_to(secret)
    (public / HANDED).symlink_to(tmp_path / "new")
    hand_key(state, public, None)
    assert not (tmp_path / "new").exists()
    assert "cannot be kept" in caplog.text
    (state / KEPT).unlink()
    hand_key(state, public, None)
    assert not (tmp_path / "new").exists()
    assert take_key(public) != secret.read_bytes()


def test_a_state_directory_that_takes_nothing_is_said(
    public: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hand_key(tmp_path / "none", public, None)
    assert "the key of this node cannot be kept in" in caplog.text
    assert len(take_key(public)) == 32
