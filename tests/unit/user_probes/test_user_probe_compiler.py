"""What the compiler of users' probes leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from probing.api.errors import InternalError
from probing.daemon.user_probes import compiler
from probing.daemon.user_probes.c_text import TaskOffsets
from probing.daemon.user_probes.spec import Attach, Field, Spec

CALLS = Spec("calls", "", "trainers", 10, (Attach("uprobe", "f", "x", "g"),), (Field("a", "u64", "A."),), "")


@pytest.fixture(autouse=True)
def any_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_task_offsets", lambda: TaskOffsets(0, 0))
    monkeypatch.setattr(compiler, "header_trees", lambda: None)


def test_a_compiler_that_ends_without_an_answer_leaves_no_file(tmp_path: Path) -> None:
    # GIVEN a compiler that is killed before it removes the files that it made
    made, program, scratch = tmp_path / "made", tmp_path / "python", tmp_path / "scratch"
    program.write_text(f'#!/bin/sh\nmkdir "$TMPDIR/headers" && echo "$TMPDIR" > {made}\nkill -9 $$\n')
    program.chmod(0o755)
    scratch.mkdir()
    # WHEN a probe is compiled
    with pytest.raises(InternalError, match="ended without an answer"):
        compiler.load(CALLS, tmp_path, scratch, python=str(program))
    # THEN its files are gone
    assert Path(made.read_text().strip()).is_relative_to(scratch)
    assert list(scratch.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"no directory can be made in .*/none: No such file or directory"):
        compiler.load(CALLS, tmp_path, tmp_path / "none", python="/bin/false")
