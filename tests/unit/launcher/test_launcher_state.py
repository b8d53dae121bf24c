"""The state file of a launcher: what was written is read again, and a damaged or hostile file does no harm."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import ConfigError, StateLocked
from probing.launcher.state import History, Run, State, StateFile, lock, state_directory

RUN = Run("n1-0", 0, 7, 1009, 31_000_000_000, "boot", 1, "/logs/rank0.log")
HISTORY = History(
    "g",
    "aa",
    record="{}",
    version=3,
    generation=7,
    phase="running",
    order=5,
    started=7,
    restarts=[("boot", 1), ("boot", 2)],
    lease=("boot", 3, 7),
    runs=[RUN, Run("n1-1", 1, 7, 0, 0, "boot", 1, "", 2, exit_code=127, fenced=True, reason="ended")],
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    return StateFile(tmp_path)


def test_what_is_written_is_read_again(file: StateFile, tmp_path: Path) -> None:
    assert file.read() == (State(), "")
    state = State(lost=True, groups=[HISTORY])
    assert file.write(state)
    assert file.read() == (state, "")
    assert [path.name for path in tmp_path.iterdir()] == ["launcher.json"]
    assert (tmp_path / "launcher.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"format": 2}',
        b'{"groups": {}}',
        b'{"groups": [{"name": "../x", "key": ""}]}',
        b'{"groups": [{"name": "g", "key": ""}, {"name": "g", "key": ""}]}',
        b'{"groups": [{"name": "g", "key": "", "generation": -1}]}',
        b'{"groups": [{"name": "g", "key": "", "generation": 1e400}]}',
        b'{"groups": [{"name": "g", "key": "", "started": 99999999999999999999}]}',
        b'{"groups": [{"name": "g", "key": "", "phase": "asleep"}]}',
        b'{"groups": [{"name": "g", "key": "", "restarts": [1]}]}',
        b'{"groups": [{"name": "g", "key": "", "lease": ["boot", 1]}]}',
        json.dumps({"groups": [{"name": "g", "key": "", "restarts": [["boot", 1]] * 257}]}).encode(),
        json.dumps({"groups": [{"name": f"g{n}", "key": ""} for n in range(1025)]}).encode(),
    ],
)
def test_a_damaged_file_is_set_aside(file: StateFile, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "launcher.json").write_bytes(data)
    state, problem = file.read()
    assert state == State(lost=True)
    assert problem.startswith("the state file was damaged (")
    assert (tmp_path / "launcher.json.damaged").read_bytes() == data
    assert not (tmp_path / "launcher.json").exists()


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


PLAIN = json.loads(json.dumps(asdict(State(groups=[HISTORY]))))


@given(st.sampled_from(places(PLAIN)[1:]), JSON)
def test_each_value_may_be_hostile(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[Any, ...], value: Any
) -> None:
    directory = tmp_path_factory.mktemp("state")
    plain = deepcopy(PLAIN)
    where = plain
    for key in place[:-1]:
        where = where[key]
    where[place[-1]] = value
    (directory / "launcher.json").write_text(json.dumps(plain))
    state, problem = StateFile(directory).read()
    assert (state == State(lost=True)) is bool(problem)
    assert all(run.pid >= 0 and run.start_ns >= 0 for history in state.groups for run in history.runs)
    assert StateFile(directory).write(state)
    assert StateFile(directory).read() == (state, "")


def test_a_file_that_others_may_write_is_not_read(file: StateFile, tmp_path: Path) -> None:
    file.write(State())
    (tmp_path / "launcher.json").chmod(0o620)
    with pytest.raises(ConfigError, match="other users may write"):
        file.read()


def test_a_link_is_not_followed(file: StateFile, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "launcher.json").symlink_to(target)
    with pytest.raises(ConfigError, match="cannot be read"):
        file.read()
    (tmp_path / "launcher.json.new").symlink_to(target)
    assert not file.write(State())
    assert target.read_text() == "precious"


def test_a_pipe_is_not_waited_for(file: StateFile, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "launcher.json", 0o600)
    with pytest.raises(ConfigError, match="other users may write"):
        file.read()


def test_a_write_that_fails_leaves_the_file_and_says_why(file: StateFile, tmp_path: Path) -> None:
    file.write(State(groups=[HISTORY]))
    (tmp_path / "launcher.json.new").mkdir()
    assert not file.write(State())
    assert file.problem == f"the state file {tmp_path}/launcher.json cannot be written: Is a directory"
    assert file.read() == (State(groups=[HISTORY]), "")
    (tmp_path / "launcher.json.new").rmdir()
    assert file.write(State())
    assert file.problem == ""


def test_the_directory_belongs_to_the_user_alone(tmp_path: Path) -> None:
    made = state_directory(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o770)
    with pytest.raises(ConfigError, match="other users may write to the directory"):
        state_directory(made)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        state_directory(tmp_path / "file")


def test_one_launcher_holds_the_lock(tmp_path: Path) -> None:
    held = lock(tmp_path)
    with pytest.raises(StateLocked, match=rf"another launcher \(pid {os.getpid()}\) uses {tmp_path}") as e:
        lock(tmp_path)
    assert f"kill {os.getpid()}" in e.value.hint
    os.close(held)
    os.close(lock(tmp_path))
