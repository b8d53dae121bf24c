"""Bytes of a sealed row: ``python bench/segment_sizes.py [--seconds 90] [--keep DIR | --state DIR]``.

A daemon with its defaults watches three trainings of torch (two ranks of DDP, accumulation with small buckets, a grid
of four ranks) and two ranks of the NCCL double that do as ProcessGroupNCCL does, whose ends are found by the watchdog
and by waits. Their rows, and no others of this machine, are then sealed as parts of the log are (8 MB of Arrow each)
and as compaction leaves them (one file), beside what pyarrow writes by default (zstd, in the order of time). Raw is
the Arrow memory of the stored columns. ``--keep`` leaves the recording there for ``--state``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from running import BenchDaemon, free_port, job
from statistics_of_blocks import table

from probing.api.tables import TABLES
from probing.daemon.store.log.decode import decode_part
from probing.daemon.store.log.streams import conform
from probing.daemon.store.segments.encoding import ROW_GROUP, SegmentEncoder, sort_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from doubles.doubles import DoubleJob, build

ROOT = Path(__file__).resolve().parents[1]
PART_BYTES = 8 << 20
PIDS = "pids.json"
# More than they make.
ENDLESS = "1000000000"


@contextlib.contextmanager
def told(script: str, ranks: int, folder: Path, **environ: str) -> Iterator[list[int]]:
    """A job of tests/jobs that makes steps until it is killed."""
    port, processes = str(free_port()), []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        own |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1", **environ}
        command = [sys.executable, ROOT / "tests" / "jobs" / script, folder / f"{script}{rank}"]
        processes.append(
            subprocess.Popen(
                command, env={**os.environ, **own}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            )
        )
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"steps {ENDLESS}\n")
            process.stdin.flush()
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def nccl_steps(double: DoubleJob, until: float) -> None:
    """Gradient buckets, a gather and a scatter of shards, a ring; the loss is waited for each tenth step."""
    step = 0
    while time.monotonic() < until:
        for bucket in range(8):
            double.do(f"do 1 all_reduce {6_553_600 >> bucket // 2} 7 0 0")
        double.do("do 1 all_gather 4096 9 0 0")
        double.do("do 1 reduce_scatter 4096 9 0 0")
        double.do("ring 1 8192")
        if step % 10 == 9:
            double.do("sync stream")
        step += 1
        time.sleep(0.02)


def record(seconds: float, kept: Path) -> None:
    """The state directory after ``seconds`` of all jobs, in ``kept``, with the pids of the jobs."""
    # Not below a folder that only its owner may enter: the daemon's processes open the library.
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-sizes-"))
    folder.chmod(0o755)
    doubles = build(folder)
    daemon = BenchDaemon()
    try:
        daemon.start()
        double = DoubleJob(doubles, folder / "double", 2)
        with (
            contextlib.closing(double),
            job(ROOT / "examples" / "train_ddp.py", "--steps", ENDLESS, "--report-every", ENDLESS) as ddp,
            told("accumulation.py", 2, folder, MODE="sync", PACE="0.01") as accumulation,
            told("grid.py", 4, folder, NAMED="1") as grid,
        ):
            for line in ("init world config", "style side", "duration 300000"):
                double.do(line)
            nccl_steps(double, time.monotonic() + seconds)
            pids = [p.pid for p in (*ddp, *double.ranks)] + accumulation + grid
            # So that none outlives another to complain of it.
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        daemon.stop()
        shutil.copytree(daemon.base / "state", kept, dirs_exist_ok=True)
        (kept / PIDS).write_text(json.dumps(pids))
    finally:
        daemon.close()
        shutil.rmtree(folder)


def recorded(state: Path) -> dict[str, pa.Table]:
    """Rows by table in the order of time; of tables about processes, those of the jobs."""
    found: dict[str, list[pa.Table]] = {}
    for path in sorted((state / "wal").iterdir()):
        for name, rows in decode_part(path.read_bytes()).tables.items():
            found.setdefault(name, []).append(rows)
    for path in sorted(state.glob("*/date=*/*.parquet")):
        name = path.parents[1].name
        found.setdefault(name, []).append(conform(pq.ParquetFile(path).read(), TABLES[name].physical))
    pids = pa.array(json.loads((state / PIDS).read_text()), pa.int32())
    tables = {}
    for name, pieces in sorted(found.items()):
        rows = pa.concat_tables(pieces).unify_dictionaries()
        if {"job", "pid"} <= set(rows.column_names):
            rows = rows.filter(pc.is_in(rows["pid"], pids))
        if rows.num_rows:
            tables[name] = sort_rows(rows, ("ts",)).combine_chunks()
    return tables


def pieces_of(rows: pa.Table, count: int) -> list[pa.Table]:
    return [rows.slice(start, count) for start in range(0, rows.num_rows, count)]


def sealed_bytes(name: str, pieces: list[pa.Table]) -> int:
    """Of one segment with a row group for each piece."""
    encoder = SegmentEncoder(name)
    for piece in pieces:
        encoder.add(sort_rows(piece, TABLES[name].sort_by))
    encoder.end()
    return encoder.size


def by_default(rows: pa.Table) -> int:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    return sink.getvalue().size


def measure(name: str, rows: pa.Table) -> dict[str, object]:
    raw = rows.nbytes
    parts = pieces_of(rows, max(1, PART_BYTES * rows.num_rows // raw))
    begin = time.process_time()
    in_parts = sum(sealed_bytes(name, [part]) for part in parts)
    seconds = time.process_time() - begin
    merged = sealed_bytes(name, pieces_of(rows, ROW_GROUP))
    count = rows.num_rows
    return {
        "table": name,
        "rows": f"{count:,}",
        "raw, B a row": f"{raw / count:.1f}",
        "sealed, B a row": f"{in_parts / count:.2f}",
        "merged, B a row": f"{merged / count:.2f}",
        "raw / merged": f"{raw / merged:.1f}",
        "pyarrow's default, B a row": f"{by_default(rows) / count:.2f}",
        "CPU to seal, s a million": f"{seconds / count * 1e6:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--state", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        state = options.state or options.keep
        if state is None:
            state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="probingd-bench-sizes-")))
        if options.state is None:
            record(options.seconds, state)
        tables = recorded(state)
    runs = [measure(name, rows) for name, rows in tables.items()]
    jobs = tables["comm.ops"]["job"].cast(pa.string())
    runs += [
        measure("comm.ops", tables["comm.ops"].filter(pc.equal(jobs, one))) | {"table": f"comm.ops of {one}"}
        for one in sorted(filter(None, jobs.unique().to_pylist()))
    ]
    print(table(runs))


if __name__ == "__main__":
    main()
