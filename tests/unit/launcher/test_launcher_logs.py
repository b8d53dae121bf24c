"""Log files of ranks: who may read them, and what rotation keeps."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from probing.launcher.logs import log_path, open_log, read_log, rotate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return log_path(tmp_path, "g", 3)


def write(path: Path, data: bytes) -> None:
    fd = open_log(path)
    os.write(fd, data)
    os.close(fd)


def test_only_the_user_reads_logs(path: Path, tmp_path: Path) -> None:
    write(path, b"a\n")
    write(path, b"b\n")
    assert path == tmp_path / "logs" / "g" / "rank3.log"
    assert path.read_bytes() == b"a\nb\n"
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent, path.parent.parent)] == [0o600, 0o700, 0o700]


def test_a_log_is_no_link_and_no_pipe(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(parents=True)
    target = tmp_path / "target"
    target.write_bytes(b"x" * 8192)
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        open_log(path)
    assert not rotate(path, 4096)
    path.unlink()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="not a regular file"):
        open_log(path)
    assert not rotate(path, 4096)
    os.close(reader)
    assert target.stat().st_size == 8192


def test_rotation_keeps_the_last_bytes_and_the_writer_goes_on(path: Path) -> None:
    fd = open_log(path)
    os.write(fd, b"a" * 4095)
    assert not rotate(path, 4096)
    os.write(fd, b"b" * 4096)
    assert rotate(path, 4096)
    older = path.with_name("rank3.log.1")
    assert older.read_bytes() == b"b" * 4096
    assert older.stat().st_mode & 0o777 == 0o600
    os.write(fd, b"c")
    assert path.read_bytes() == b"c"
    os.write(fd, b"d" * 4096)
    assert rotate(path, 4096)
    assert older.read_bytes() == b"d" * 4096
    assert sorted(p.name for p in path.parent.iterdir()) == ["rank3.log", "rank3.log.1"]
    os.close(fd)


def test_rotation_of_a_sparse_terabyte_is_bounded(path: Path) -> None:
    write(path, b"")
    os.truncate(path, 1 << 40)
    assert rotate(path, 1 << 39)
    assert path.stat().st_size == 0
    assert path.with_name("rank3.log.1").stat().st_size == 64 << 20


def test_a_log_is_truncated_even_if_its_end_cannot_be_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(path, b"a" * 8192)
    with monkeypatch.context() as patched:
        patched.setattr(os, "sendfile", full)
        assert rotate(path, 4096)
    assert [p.name for p in path.parent.iterdir()] == ["rank3.log"]
    write(path, b"a" * 8192)
    path.with_name("rank3.log.1.new").mkdir()
    assert rotate(path, 4096)
    assert path.stat().st_size == 0


@pytest.mark.parametrize("call", ["fstat", "ftruncate"])
def test_a_log_that_a_file_server_has_lost_costs_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def lost(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    write(path, b"a" * 8192)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, lost)
        assert not rotate(path, 4096)
    assert rotate(path, 4096)


@pytest.mark.parametrize(
    ("start", "limit", "data", "end"),
    [
        (0, 100, b"0123456789", 10),
        (0, 3, b"012", 3),
        (3, 4, b"3456", 7),
        (10, 4, b"", 10),
        (-4, 100, b"6789", 10),
        (-4, 2, b"67", 8),
        (-100, 3, b"012", 3),
        # It was rotated.
        (11, 4, b"0123", 4),
        (1 << 62, 4, b"0123", 4),
    ],
)
def test_a_part_of_a_log(path: Path, start: int, limit: int, data: bytes, end: int) -> None:
    write(path, b"0123456789")
    assert read_log(path, start, limit) == (data, end)


def test_reading_a_log_waits_for_nobody(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        read_log(path, 0, 1)
    path.unlink()
    (tmp_path / "target").write_text("x")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        read_log(path, 0, 1)


def test_what_is_not_there_is_not_rotated(path: Path) -> None:
    assert not rotate(path, 4096)
