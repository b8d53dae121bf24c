"""The probes of a directory, loaded, drained and replaced, without a kernel."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import Processes, rows_of

from probing.api.tables import Table
from probing.daemon.clock import FakeClock
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.source import ProcessKey
from probing.daemon.user_probes import manager
from probing.daemon.user_probes.c_text import record_dtype
from probing.daemon.user_probes.manager import RETRY_NS, UserProbes
from probing.daemon.user_probes.running import Counts
from probing.daemon.user_probes.spec import Spec
from probing.daemon.user_tables import UserTables

ATTACH = '[[attach]]\nkind = "uprobe"\nfunction = "on_call"\nlibrary = "libx.so"\nsymbol = "call"\n'


class Loaded:
    """A probe that was hit ``hits`` times since its ring was drained. ``error``: what a look at processes raises."""

    hits = 0
    error: Exception | None = None
    attached = "in 1 process"

    def __init__(self, spec: Spec, table: Table, _: object, *, multi: bool) -> None:
        self.spec, self.table = spec, table
        self.reasons: dict[str, str] = {}
        self.closed = False
        self.forgotten: list[Any] = []
        all_of.append(self)

    def drain(self, take: Any) -> None:
        if self.hits:
            take(np.zeros(self.hits, record_dtype(self.spec)))
            self.hits = 0

    def counts(self) -> Counts:
        return Counts(0, 0, 0, 0)

    def forget(self, keys: Any) -> None:
        self.forgotten += keys

    def follow(self, *_: Any) -> None:
        if self.error is not None:
            raise self.error

    def detach(self) -> None:
        """Detaches nothing."""

    def close(self) -> None:
        self.closed = True


all_of: list[Loaded] = []


class Scene:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        all_of.clear()
        monkeypatch.setattr(manager, "Running", Loaded)
        monkeypatch.setattr(manager, "load", lambda *_, **__: SimpleNamespace(close=lambda: None))
        self.folder, self.clock = folder / "probes.d", FakeClock()
        self.folder.mkdir(mode=0o755)
        self.tables = UserTables(folder / "user_tables.json")
        self.sink = RowBuffer("n1", self.clock, self.tables)
        processes: Any = Processes()
        nothing: Any = None
        self.probes = UserProbes(
            self.folder,
            self.tables,
            self.sink,
            processes,
            nothing,
            nothing,
            "n1",
            self.clock,
        )

    def write(self, name: str, *columns: str) -> None:
        texts = [f'[[columns]]\nname = "{column}"\ntype = "u64"\ndoc = "A number."\n' for column in columns]
        (self.folder / f"{name}.toml").write_text(f'description = "Calls."\n{ATTACH}{"".join(texts)}')
        (self.folder / f"{name}.c").write_text(f"/* {columns} */")

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [row for batch in self.sink.take().get(table, ()) for row in rows_of(batch)]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_the_last_rows_of_a_probe_go_into_the_table_that_its_next_version_made(scene: Scene) -> None:
    # GIVEN a probe that is hit
    scene.write("calls", "size")
    scene.probes._look()
    (first,) = all_of
    first.hits = 7
    # WHEN its files get one more column
    scene.write("calls", "size", "depth")
    scene.probes._look()
    # THEN its rows are stored, and it is unloaded
    assert [row["depth"] for row in scene.rows("user.calls")] == [None] * 7
    assert [loaded.closed for loaded in all_of] == [True, False]


def test_a_probe_that_cannot_be_attached_does_not_keep_others_on_an_earlier_program(scene: Scene) -> None:
    # GIVEN two probes, of which the first cannot look at processes
    for name in ("a", "b"):
        scene.write(name, "size")
    scene.probes._look()
    first, second = all_of
    first.error = OSError(errno.E2BIG, "the map is full")
    # WHEN a process calls exec
    scene.probes.process_replaced(7, 30)
    with suppress(OSError):
        scene.probes._look()
    # THEN both attach to its new program
    assert [first.forgotten, second.forgotten] == [[ProcessKey(7, 30)]] * 2


def test_a_probe_that_cannot_be_opened_is_tried_again_later_and_others_are_loaded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def opened(spec: Spec, *args: Any, **options: Any) -> Loaded:
        tried.append(spec.name)
        if spec.name == "a" and len(tried) == 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return Loaded(spec, *args, **options)

    monkeypatch.setattr(manager, "Running", opened)
    # GIVEN two probes, and no memory for the ring of the first
    for name in ("a", "b"):
        scene.write(name, "size")
    # WHEN they are loaded
    for _ in range(3):
        scene.probes._look()
    # THEN the second is, and the state of the first says why it is not
    assert tried == ["a", "b"]
    assert [(state.state, state.reason) for state in scene.probes.probes()] == [
        ("degraded", "it cannot be opened: Cannot allocate memory (it is tried again each minute)"),
        ("running", ""),
    ]
    # AND the first is tried again after a pause
    scene.clock.advance(RETRY_NS)
    scene.probes._look()
    assert tried == ["a", "b", "a"]
    assert [state.state for state in scene.probes.probes()] == ["running", "running"]
