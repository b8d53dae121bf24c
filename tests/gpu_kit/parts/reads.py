"""What needs no BPF: Python stacks and NCCL's communicators read from memory, and NCCL's RAS."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from gpu_kit.part import Part, Skip
from gpu_kit.parts.watched import FIVE, SEVEN, TWENTY_THREE, warmed
from gpu_kit.scene import Scene, until
from gpu_kit.work import Job

__all__ = ("LAYOUT", "RAS", "STACKS")

# NCCL's magic word at both ends of struct ncclComm (src/include/comm.h).
_MAGIC = 0x0280_0280_0280_0280


def _stacks(scene: Scene) -> None:
    job = scene.job("torch_rank").ready(40) if scene.has("torch") else scene.direct_job().ready()
    if scene.has("torch"):
        job.do("hold", 40)
    (said,) = job.do("stand")
    scene.checks.equal("frames read from memory", said["frames"], _frames_in_memory(job.pid, said["tid"]))
    if not scene.has("daemon"):
        scene.checks.skip("stacks of the daemon", scene.machine.missing["daemon"])
        return
    threads = {thread["tid"]: thread for thread in scene.daemon.stacks(job.pid)}
    found = threads.get(said["tid"])
    names = [frame["func"] for frame in found["frames"]] if found else []
    scene.checks.equal("frames by `stacks`", said["frames"], names)
    scene.checks.measured("threads of the process", len(threads))


def _frames_in_memory(pid: int, tid: int) -> list[str]:
    """Returns the functions on the stack of a thread, by our reader within this process."""
    from probing.daemon.processes.memory import ProcessMemory
    from probing.daemon.processes.procfs import parse_maps
    from probing.daemon.python_stack.stacks.dump import dump_stacks
    from probing.daemon.python_stack.walk.search import find_runtime
    from probing.daemon.python_stack.walk.threads import read_start_ns

    mappings = parse_maps(Path(f"/proc/{pid}/maps").read_bytes())
    runtime = find_runtime(ProcessMemory(pid).read_many, mappings)
    dump = dump_stacks(pid, read_start_ns(pid), runtime, time.monotonic() + 20)
    return [frame["func"] for thread in dump["threads"] if thread["tid"] == tid for frame in thread["frames"]]


def _layout(scene: Scene) -> None:
    job = scene.direct_job().ready()
    (said,) = job.do("init", 60)
    found = _communicator(job.pid, said["comm"])
    scene.checks.measured("NCCL", said["nccl"])
    if found is None:
        scene.checks.add("layout", False, "one of the shipped layouts has NCCL's magic word at both ends", "none")
        return
    scene.checks.measured("layout of NCCL", found["versions"])
    wanted = {name: said[name] for name in ("UserRank", "Count", "CuDevice")}
    scene.checks.equal("rank, size and device, as NCCL's functions say", wanted, {name: found[name] for name in wanted})
    if scene.has("daemon"):
        sql = f"SELECT comm FROM comm.communicators WHERE pid = {job.pid} AND identity = 'struct' LIMIT 1"
        rows = until(lambda: _after_operation(scene, job, sql), 30, "a row of comm.communicators", poll_s=0.3)
        scene.checks.equal("commHash in comm.communicators", found["hash"], rows[0]["comm"])


def _after_operation(scene: Scene, job: Job, sql: str) -> list[dict[str, Any]]:
    job.do("warm")
    return scene.daemon.rows(sql)


def _communicator(pid: int, address: int) -> dict[str, Any] | None:
    """Returns the fields of struct ncclComm at ``address`` of a process by the layout that fits; None if none does."""
    from probing.daemon.nccl_uprobes.layouts.nccl import NCCL_LAYOUTS

    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        for layout in NCCL_LAYOUTS:
            ends = [_word(memory, address), _word(memory, address + layout.end_magic)]
            if ends != [_MAGIC, _MAGIC]:
                continue
            data = os.pread(memory, 24, address + layout.comm_hash)
            comm_hash, rank, size, device, _ = struct.unpack("<Q4i", data)
            values = {"UserRank": rank, "Count": size, "CuDevice": device}
            return {"versions": ", ".join(layout.versions), "hash": f"{comm_hash:016x}", **values}
    finally:
        os.close(memory)
    return None


def _word(memory: int, address: int) -> int:
    try:
        data = os.pread(memory, 8, address)
    except OSError:
        return 0
    return int.from_bytes(data, "little") if len(data) == 8 else 0


def _ras(scene: Scene) -> None:
    job = scene.direct_job(size=1).ready()
    job.do("init", 60)
    if scene.has("daemon"):
        warmed(scene, job)
    job.do(f"burst {TWENTY_THREE} {SEVEN} {FIVE} 101", 60)
    if scene.machine.rehearsal:
        # The double of NCCL has no RAS thread; the listener speaks for it.
        _serve_report(scene, job)
    direct = _ask(scene)
    scene.checks.measured("NCCL's RAS", f"{direct['form']}, protocol {direct['protocol']}")
    rows = direct["rows"]
    if not scene.checks.equal("ranks in the report", 1, len(rows)):
        return
    (row,) = rows
    # The warm-up makes more operations of the first kind than the burst.
    scene.checks.at_least("all_reduce that RAS counts", TWENTY_THREE, row["all_reduce"])
    scene.checks.equal("broadcast that RAS counts", SEVEN, row["broadcast"])
    if not scene.has("daemon"):
        scene.checks.skip("comm.ras", scene.machine.missing["daemon"])
        return
    names = ("comm", "size", "comm_rank", "all_reduce", "broadcast")
    wanted = {name: row[name] for name in names}
    sql = f"SELECT {', '.join(names)} FROM comm.ras WHERE comm = '{row['comm']}' ORDER BY ts DESC LIMIT 1"
    found = until(lambda: [known for known in scene.daemon.rows(sql) if known == wanted], 20, "a row of comm.ras")
    scene.checks.equal("comm.ras", [wanted], found)


def _ask(scene: Scene) -> dict[str, Any]:
    from probing.api.errors import ProbingError
    from probing.daemon.nccl_uprobes.ras.client import ask_ras
    from probing.daemon.nccl_uprobes.ras.json_report import json_report
    from probing.daemon.nccl_uprobes.ras.text_report import text_report

    try:
        with socket.create_connection(("127.0.0.1", scene.ras_port), timeout=5) as connection:
            answer = ask_ras(connection, 15)
    except ConnectionRefusedError as e:
        raise Skip(f"nobody listens on NCCL's port of RAS, {scene.ras_port}") from e
    except ProbingError as e:
        raise RuntimeError(e.message) from e
    report = (json_report if answer.form == "json" else text_report)(answer.report)
    return {"form": answer.form, "protocol": answer.protocol, "rows": report["rows"]}


def _serve_report(scene: Scene, job: Job) -> None:
    from doubles.ras_listener import RasListener

    calls = [line for line in job.truth(0) if line["event"] == "call"]
    # ncclFunc_t: 0 is a broadcast, 4 an all_reduce.
    counts = {"AllReduce": 4, "Broadcast": 0}
    rank = {
        "rank": 0,
        "host": "127.0.0.1",
        "pid": job.pid,
        "collective_counts": {name: sum(call["func"] == func for call in calls) for name, func in counts.items()},
    }
    communicator = {"hash": f"0x{calls[0]['comm']}", "secondary_hash": "0x1:0x2", "size": 1, "ranks": [rank]}
    report = json.dumps({"nccl_version": "2.30.7", "communicators": [communicator]}).encode()
    scene.serve(RasListener(report, port=scene.ras_port))


STACKS = Part("stacks", "Python stacks of a GPU job, by the daemon and from memory alone", 60, _stacks, ("nccl",))
LAYOUT = Part("layout", "`struct ncclComm` read from memory", 45, _layout, ("nccl",))
RAS = Part("ras", "NCCL's RAS, asked directly and in `comm.ras`", 60, _ras, ("nccl",))
