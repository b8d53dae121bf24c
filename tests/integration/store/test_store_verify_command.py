"""`probingd verify` on the golden state directory, whole and damaged."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from probing.api.errors import FormatError
from probing.daemon.arrow import batch_of
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.decoder import Decoder
from probing.daemon.store.directory_lock import lock_directory
from probing.daemon.store.files import open_file
from probing.daemon.store.verify.examine import Findings, examine

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "store-v1"
PROBINGD = Path(sys.executable).with_name("probingd")


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with Decoder() as one:
        yield one


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "state"))


def verify(state: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [PROBINGD, "verify", "--state-dir", state, *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def a_segment(root: Path) -> Path:
    return next(root.rglob("*.parquet"))


def a_log_part(root: Path) -> Path:
    return next(root.rglob("*.wal"))


def edit_manifest(root: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Changes the first segment in the manifest, with right checksums."""
    lines = []
    for line in (root / "manifest").read_text().splitlines():
        fields = json.loads(line.partition(" ")[2])
        for segment in fields.get("add", ()):
            change(segment)
        text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
        lines.append(f"{zlib.crc32(text.encode()):08x} {text}\n")
    (root / "manifest").write_text("".join(lines))


def test_a_whole_directory_has_no_problems_and_is_not_touched(state: Path) -> None:
    before = contents(state)
    done = verify(state)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing is wrong" in done.stdout
    assert contents(state) == before


def test_machines_get_it_as_json(state: Path) -> None:
    flip(a_segment(state))
    done = verify(state, "-f", "json")
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert report["wrong"]
    assert [problem["path"] for problem in report["problems"]] == [str(a_segment(state).relative_to(state))]
    assert "moves it to corrupt/" in report["problems"][0]["then"]


def test_no_directory_is_an_error(tmp_path: Path) -> None:
    done = verify(tmp_path / "nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "\nhint: " in done.stderr


@pytest.mark.parametrize(
    ("damage", "where", "what"),
    [
        (lambda root: flip(a_segment(root)), ".parquet", "checksum"),
        (lambda root: a_segment(root).unlink(), ".parquet", "missing"),
        (lambda root: os.truncate(a_segment(root), 100), ".parquet", "100 bytes instead of"),
        (lambda root: edit_manifest(root, lambda s: s.update(rows=1)), ".parquet", "the manifest says 1"),
        (lambda root: edit_manifest(root, lambda s: s.update(ts_max=7)), ".parquet", "the manifest says 7"),
        (lambda root: edit_manifest(root, lambda s: s.update(jobs=["other"])), ".parquet", "jobs is"),
        (lambda root: flip(root / "manifest", 40), "manifest", "damaged lines"),
        (lambda root: flip(a_log_part(root)), ".wal", "bad from byte"),
        (lambda root: flip(a_log_part(root), 0), ".wal", "no header"),
        (lambda root: a_log_part(root).rename(a_log_part(root).with_name(f"{9:012d}.wal")), ".wal", "log part 3"),
        (lambda root: a_segment(root).chmod(0o666), ".parquet", "other users may write"),
        (lambda root: (root / "comm.ops" / "x").symlink_to("/etc/passwd"), "comm.ops/x", "neither a file nor"),
    ],
)
def test_each_damage_is_named(
    damage: Callable[[Path], object], where: str, what: str, state: Path, decoder: Decoder
) -> None:
    damage(state)
    found = examine(state, decoder)
    assert found.wrong
    assert any(where in problem.path and what in problem.what and problem.then for problem in found.problems)


def test_what_a_crash_leaves_behind_is_not_wrong(state: Path, decoder: Decoder) -> None:
    folder = a_segment(state).parent
    (folder / "000000000008-000000000009.parquet.tmp").write_bytes(b"")
    (state / "wal" / "000000000001.wal").write_bytes(b"")
    (state / "notes.txt").write_text("mine")
    found = examine(state, decoder)
    assert not found.wrong
    assert [(p.path.rsplit("/", 1)[-1], p.then) for p in sorted(found.problems, key=lambda p: p.path)] == [
        ("000000000008-000000000009.parquet.tmp", "removes it"),
        ("notes.txt", "leaves it alone"),
        ("000000000001.wal", "removes it"),
    ]


def test_a_running_daemon_is_reported(state: Path, decoder: Decoder) -> None:
    assert examine(state, decoder).daemon_pid == ""
    fd = lock_directory(state)
    try:
        found: Findings = examine(state, decoder)
    finally:
        os.close(fd)
    assert found.daemon_pid == str(os.getpid())
    assert f"pid {os.getpid()}" in found.summary
    assert not found.wrong


def test_missing_records_are_counted(state: Path, decoder: Decoder) -> None:
    lines = (state / "manifest").read_text().splitlines()
    sealed = [json.loads(line.partition(" ")[2]) for line in lines]
    first = max(fields.get("next_sequence", 0) for fields in sealed)
    for fields in sealed:
        if "next_sequence" in fields:
            fields["next_sequence"] = min(fields["next_sequence"], first - 2)
    texts = [json.dumps(fields, separators=(",", ":"), sort_keys=True) for fields in sealed]
    (state / "manifest").write_text("".join(f"{zlib.crc32(text.encode()):08x} {text}\n" for text in texts))
    found = examine(state, decoder)
    assert any("2 records before it are missing" in problem.what for problem in found.problems)


def test_random_damage_never_ends_the_check(state: Path, decoder: Decoder) -> None:
    random = Random(23)
    files = [a_segment(state), a_log_part(state), state / "manifest"]
    whole = {path: path.read_bytes() for path in files}
    for _ in range(60):
        path = random.choice(files)
        data = bytearray(whole[path])
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        path.write_bytes(data)
        # The log's last record is torn anyway: what lies in it does not count.
        may_be_fine = path.suffix == ".wal" or bytes(data) == whole[path]
        assert examine(state, decoder).wrong or may_be_fine
        if path.suffix == ".parquet":
            with contextlib.suppress(FormatError):
                decoded(path, decoder)
        path.write_bytes(whole[path])
    assert not examine(state, decoder).wrong


def decoded(path: Path, decoder: Decoder) -> int:
    """Counts the rows of an unchecked Parquet file."""
    fd = open_file(path)
    try:
        return sum(rows.num_rows for rows in decoder.segment_rows(fd, piece=7))
    finally:
        os.close(fd)


def test_what_a_daemon_changes_meanwhile_is_no_problem(tmp_path: Path, decoder: Decoder) -> None:
    limits = StoreLimits(keep_free_bytes=0, part_bytes=1 << 12)
    ended = threading.Event()
    with Store.open(tmp_path / "state", node="n", limits=limits, background=False) as store:

        def write() -> None:
            for i in itertools.count():
                rows = [{"node": "n", "ts": time.time_ns(), "job": f"j{i % 3}", "seq": i + k} for k in range(50)]
                store.append({"comm.ops": [batch_of("comm.ops", rows)]}, {})
                store.maintain()
                if ended.is_set():
                    return

        writer = threading.Thread(target=write)
        writer.start()
        try:
            found = [examine(tmp_path / "state", decoder)]
            deadline = time.monotonic() + 30
            while (len(found) < 12 or not found[-1].segments) and time.monotonic() < deadline:
                found.append(examine(tmp_path / "state", decoder))
        finally:
            ended.set()
            writer.join()
    assert [str(problem) for one in found for problem in one.problems] == []
    assert found[-1].segments > 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["", "wal", "manifest", "a segment", "a log part"])
def test_what_may_not_be_read_is_no_damage(closed: str) -> None:
    """As nobody: an error and a hint, as `stop` and `cleanup` have, and no word of damage."""
    # The directories of pytest are root's alone.
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        root.chmod(0o755)
        state = Path(shutil.copytree(GOLDEN, root / "state"))
        paths = {"": state, "wal": state / "wal", "manifest": state / "manifest"}
        path = (
            a_segment(state)
            if closed == "a segment"
            else a_log_part(state)
            if closed == "a log part"
            else paths[closed]
        )
        path.chmod(0)
        program = f"""
import os, sys
from probing.daemon.cli.main import main
os.setgid(65534)
os.setuid(65534)
sys.argv = ["probingd", "verify", "--state-dir", {str(state)!r}]
main()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {state}")
    assert first.endswith(" cannot be read: Permission denied")
    assert second == "hint: run this as root"
