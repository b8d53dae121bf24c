"""What the compiler of users' probes leaves behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from waiting import until

from probing.api.errors import ConfigError, InternalError
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


def test_a_compiler_that_does_not_read_its_request_is_given_up(tmp_path: Path) -> None:
    # GIVEN a compiler that hangs at its start, and a request that is larger than the buffer of its connection
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    long = CALLS._replace(code=f"/* {'x' * 1_000_000} */")
    errors: list[ConfigError] = []

    def load() -> None:
        with pytest.raises(ConfigError, match=r"calls\.c was not compiled within 0 s") as refused:
            compiler.load(long, tmp_path, tmp_path, python=str(program), timeout=0.1)
        errors.append(refused.value)

    # WHEN the probe is loaded
    threading.Thread(target=load, daemon=True).start()
    # THEN that ends
    until(lambda: errors, what="the end of the load")
