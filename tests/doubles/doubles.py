"""Builds libnccl and libcudart of the doubles, and runs the job that uses them as ProcessGroupNCCL does.

``build(folder, "2.27.5")`` gives libraries with the ABI and the struct offsets of that version; ``VERSIONS`` has them
all. The offsets are those of the wheels nvidia-nccl-cu12, read from their DWARF with gdb.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from waiting import until, whole_lines

__all__ = (
    "ENQUEUE_CHECK",
    "INFO_OFFSETS",
    "VERSIONS",
    "Call",
    "DoubleJob",
    "Doubles",
    "build",
    "comm_offsets",
    "compile_program",
    "version_code",
    "write_headers",
)

HERE = Path(__file__).resolve().parent
_NCCL, _CUDART, _JOB = "libnccl.so.2", "libcudart.so.12", "nccl_job"
ENQUEUE_CHECK = "_Z16ncclEnqueueCheckP8ncclInfo"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")
# The real libraries have no endbr64.
_OF_MACHINE = ("-fcf-protection=none",) if platform.machine() == "x86_64" else ()
FLAGS = ("-std=gnu11", "-O2", "-g", *_OF_MACHINE, *WARNINGS)
# Frame pointers and no shrink wrapping give the functions the prologues of the real ones: push first.
LIBRARY_FLAGS = ("-fPIC", "-shared", "-fno-omit-frame-pointer", "-fno-shrink-wrap", "-fno-optimize-sibling-calls")

# Of struct ncclComm: sizeof and offsets; rank, nRanks, cudaDev, nvmlDev follow commHash, and nNodes, localRank and
# localRanks follow node.
_COMM = {
    "2.18.3": {
        "magic": 0x23C8,
        "commHash": 0x23D0,
        "busId": 0x23F8,
        "node": 0x2484,
        "asyncResult": 0x2918,
        "abortFlag": 0x2920,
        "config": 0x2B68,
        "finalizeCalled": 0x2B9C,
        "sizeof": 0x2BA8,
    },
    "2.21.5": {
        "startMagic": 0,
        "magic": 0x34D0,
        "commHash": 0x34D8,
        "busId": 0x3500,
        "node": 0x358C,
        "asyncResult": 0x3A7C,
        "abortFlag": 0x3A80,
        "config": 0x3D28,
        "finalizeCalled": 0x3D5C,
        "endMagic": 0x3F98,
        "sizeof": 0x3FA0,
    },
    "2.24.3": {
        "startMagic": 0,
        "magic": 0x3C490,
        "commName": 0x3C498,
        "commHash": 0x3C4A0,
        "busId": 0x3C4C8,
        "node": 0x3C55C,
        "asyncResult": 0x3CAB4,
        "abortFlag": 0x3CAB8,
        "config": 0x3DA10,
        "finalizeCalled": 0x3DA44,
        "seqNumber": 0x3DA78,
        "endMagic": 0x3DAC8,
        "sizeof": 0x3DAD0,
    },
    "2.27.5": {
        "startMagic": 0,
        "magic": 0x1044A8,
        "commHash": 0x1044B0,
        "busId": 0x1044D8,
        "node": 0x10456C,
        "asyncResult": 0x104B44,
        "abortFlag": 0x104B48,
        "config": 0x1064D0,
        "finalizeCalled": 0x10651C,
        "seqNumber": 0x106550,
        "endMagic": 0x107BF8,
        "sizeof": 0x107C00,
    },
    "2.30.7": {
        "startMagic": 0,
        "magic": 0x1206E0,
        "commHash": 0x1206E8,
        "busId": 0x120710,
        "node": 0x1207A4,
        "asyncResult": 0x121224,
        "abortFlag": 0x121228,
        "config": 0x122E00,
        "finalizeCalled": 0x122E64,
        "seqNumber": 0x122E98,
        "endMagic": 0x124E78,
        "sizeof": 0x124E80,
    },
    "2.32.3": {
        "startMagic": 0,
        "magic": 0x1206D8,
        "commHash": 0x1206E0,
        "busId": 0x120708,
        "node": 0x1207A8,
        "asyncResult": 0x121578,
        "abortFlag": 0x121580,
        "config": 0x123698,
        "finalizeCalled": 0x123714,
        "seqNumber": 0x123748,
        "endMagic": 0x1241F0,
        "sizeof": 0x1241F8,
    },
}
VERSIONS = tuple(_COMM)
_TYPES = {
    "config": ("ncclConfig_t", ""),
    "asyncResult": ("ncclResult_t", ""),
    "abortFlag": ("volatile uint32_t *", ""),
    "commName": ("const char *", ""),
    "finalizeCalled": ("_Bool", ""),
    "busId": ("int64_t", ""),
    "seqNumber": ("uint64_t", "[5]"),
    **dict.fromkeys(("rank", "nRanks", "cudaDev", "nvmlDev", "node", "nNodes", "localRank", "localRanks"), ("int", "")),
}
_FOLLOWERS = {
    "commHash": (8, ("rank", "nRanks", "cudaDev", "nvmlDev")),
    "node": (4, ("nNodes", "localRank", "localRanks")),
}
INFO_OFFSETS = {
    "coll": 0,
    "opName": 8,
    "sendbuff": 0x10,
    "recvbuff": 0x18,
    "count": 0x20,
    "datatype": 0x28,
    "op": 0x2C,
    "root": 0x30,
    "comm": 0x38,
    "stream": 0x40,
}
_INFO_TYPES = {
    "coll": "int",
    "opName": "const char *",
    "sendbuff": "const void *",
    "recvbuff": "void *",
    "count": "size_t",
    "datatype": "ncclDataType_t",
    "op": "ncclRedOp_t",
    "root": "int",
    "comm": "ncclComm_t",
    "stream": "cudaStream_t",
}
_INFO_SIZES = {"2.18.3": 144, "2.21.5": 1248, "2.24.3": 80, "2.27.5": 80, "2.30.7": 120, "2.32.3": 192}


def version_code(version: str) -> int:
    """2.27.5 -> 22705, as NCCL_VERSION_CODE."""
    major, minor, patch = (int(part) for part in version.split("."))
    return major * 10000 + minor * 100 + patch


def comm_offsets(version: str, shift: int = 0) -> dict[str, int]:
    """Field of struct ncclComm -> offset in bytes, and ``sizeof``; with a ``shift``, of a build that was not released.

    Such a build has ``shift`` bytes, a multiple of 8, more before all fields but the first.
    """
    offsets = {name: offset + shift * (name != "startMagic") for name, offset in _COMM[version].items()}
    for name, (step, followers) in _FOLLOWERS.items():
        offsets |= {follower: offsets[name] + step + 4 * number for number, follower in enumerate(followers)}
    return offsets


def write_headers(folder: Path, version: str, shift: int = 0) -> None:
    """``nccl_layout.h`` and ``nccl_structs.h`` of a version, which nccl.c includes."""
    (folder / "nccl_layout.h").write_text(f"#pragma once\n#define DOUBLE_VERSION {version_code(version)}\n")
    offsets = comm_offsets(version, shift)
    lines = ["#pragma once", "struct ncclComm {"]
    checks, at = [], 0
    for number, (name, offset) in enumerate(sorted(offsets.items(), key=lambda item: item[1])):
        if offset > at:
            lines.append(f"\tchar pad{number}[{offset - at}];")
        if name != "sizeof":
            kind, array = _TYPES.get(name, ("uint64_t", ""))
            lines.append(f"\t{kind} {name}{array};")
            checks.append(f'_Static_assert(offsetof(struct ncclComm, {name}) == {offset}, "{name}");')
            checks.append(f"#define HAS_{name} 1")
            at = offset + _size(kind, array, version)
    checks.append(f'_Static_assert(sizeof(struct ncclComm) == {offsets["sizeof"]}, "sizeof");')
    lines += ["};", *checks, "struct ncclInfo {"]
    lines += [f"\t{_INFO_TYPES[name]} {name};" for name in INFO_OFFSETS]
    lines += [f"\tchar rest[{_INFO_SIZES[version] - 0x48}];", "};"]
    lines += [
        f'_Static_assert(offsetof(struct ncclInfo, {name}) == {offset}, "{name}");'
        for name, offset in INFO_OFFSETS.items()
    ]
    (folder / "nccl_structs.h").write_text("\n".join(lines) + "\n")


_CONFIG_SIZES = {"2.18.3": 48, "2.21.5": 48, "2.24.3": 48, "2.27.5": 72, "2.30.7": 96, "2.32.3": 120}


def _size(kind: str, array: str, version: str) -> int:
    if kind == "ncclConfig_t":
        return _CONFIG_SIZES[version]
    size = {"int": 4, "ncclResult_t": 4, "_Bool": 1}.get(kind, 8)
    return size * int(array.strip("[]") or 1)


@dataclass(frozen=True)
class Doubles:
    """``variant``: as built ("dwarf"); "no_dwarf" has symbols only; "no_enqueue_check" misses that one symbol and has
    no DWARF; "stripped" has its dynamic symbols only."""

    version: str
    variant: str
    folder: Path
    nccl: Path
    cudart: Path
    job: Path


def build(folder: Path, version: str = "2.27.5", variant: str = "dwarf", shift: int = 0) -> Doubles:
    """Both libraries and the job program, in ``folder``, which must exist; ``shift`` is that of ``comm_offsets``.

    A process compiles each version, variant and shift once, and copies the files.
    """
    for path in _compiled(version, variant, shift).iterdir():
        shutil.copy2(path, folder)
    return Doubles(version, variant, folder, folder / _NCCL, folder / _CUDART, folder / _JOB)


@cache
def _compiled(version: str, variant: str, shift: int) -> Path:
    """Compiles the files of ``build`` into a folder that this process removes at its end."""
    folder = Path(tempfile.mkdtemp(prefix="probingd-doubles-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_headers(folder, version, shift)
    nccl, cudart, job = folder / _NCCL, folder / _CUDART, folder / _JOB
    include = ("-I", str(folder), "-I", str(HERE))
    _run("cc", *FLAGS, *LIBRARY_FLAGS, "-Wl,-soname,libcudart.so.12", "-o", cudart, HERE / "cudart.c", "-lpthread")
    _run(
        "cc",
        *FLAGS,
        *LIBRARY_FLAGS,
        *include,
        "-Wl,-soname,libnccl.so.2,--build-id",
        "-o",
        nccl,
        HERE / "nccl.c",
        cudart,
        "-lpthread",
    )
    if variant == "stripped":
        _run("strip", "-s", nccl)
    elif variant == "no_dwarf":
        _run("strip", "-g", nccl)
    elif variant == "no_enqueue_check":
        _run("strip", "-g", f"--strip-symbol={ENQUEUE_CHECK}", nccl)
    elif variant != "dwarf":
        raise ValueError(f"no variant {variant}")
    doubles = Doubles(version, variant, folder, nccl, cudart, job)
    if (HERE / "job.c").exists():
        compile_program(doubles, HERE / "job.c", job)
    return folder


def compile_program(doubles: Doubles, source: Path, program: Path) -> None:
    """A C program against the headers and libraries of ``doubles``, or of copies beside it."""
    include = ("-I", str(doubles.folder), "-I", str(HERE))
    link = (doubles.nccl, doubles.cudart, f"-Wl,-rpath,$ORIGIN:{doubles.folder}", "-lpthread")
    _run("cc", *FLAGS, *include, "-o", program, source, *link)


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-4000:]}")


@dataclass(frozen=True)
class Call:
    """An operation as the double of libnccl itself saw it; times are CLOCK_MONOTONIC ns.

    ``before`` was noted before the call and ``inside`` in it. ``ends`` are (start, end) of its runs: none while it
    runs, several for one that was captured into a graph. ``root`` is the peer of send and recv.
    """

    pid: int
    func: int
    count: int
    dtype: int
    redop: int
    root: int
    comm: str
    rank: int
    size: int
    stream: int
    tid: int
    before: int
    inside: int
    group: int
    captured: bool
    seq: int | None
    result: int
    ends: tuple[tuple[int, int], ...]
    aborted: bool
    failed: bool


class DoubleJob:
    """The ranks of a job of ``doubles``, one process each, which execute commands."""

    def __init__(self, doubles: Doubles, folder: Path, size: int = 2, **environ: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.truths = [folder / f"truth{rank}.jsonl" for rank in range(size)]
        self.ranks: list[subprocess.Popen[str]] = []
        for rank, path in enumerate(self.truths):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
            own |= {"MASTER_PORT": "29400", "NCCL_DOUBLE_DIR": str(folder), "NCCL_DOUBLE_TRUTH": str(path), **environ}
            self.ranks.append(
                subprocess.Popen(
                    [doubles.job],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **own},
                )
            )
        self.hear(range(size))

    def tell(self, command: str, ranks: Sequence[int] | None = None) -> None:
        for rank in self._all(ranks):
            stdin = self.ranks[rank].stdin
            assert stdin is not None
            stdin.write(command + "\n")
            stdin.flush()

    def hear(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Returns the answer of each rank: the ncclResult_t of its last call, or the result of the command."""
        answers = []
        for rank in self._all(ranks):
            stdout = self.ranks[rank].stdout
            assert stdout is not None
            line = stdout.readline().split()
            assert line[:1] == ["done"], f"rank {rank} said {line}, exit {self.ranks[rank].poll()}"
            answers.append(int(line[1]))
        return answers

    def do(self, command: str, ranks: Sequence[int] | None = None) -> list[int]:
        self.tell(command, ranks)
        return self.hear(ranks)

    def finish(self) -> None:
        """Wait until every operation that was called has ended and its truth is written."""
        self.do("drain")
        until(
            lambda: not any(call.result == 0 and not call.ends for call in self.calls()),
            what="the ends of the double's operations",
        )

    def events(self) -> list[dict[str, Any]]:
        """All lines of all ranks, with ``pid``."""
        return [
            {**json.loads(line), "pid": process.pid}
            for process, path in zip(self.ranks, self.truths, strict=True)
            if path.exists()
            for line in whole_lines(path)
        ]

    def made(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "made"]

    def calls(self, since_ns: int = 0) -> list[Call]:
        """In the order of the calls, rank by rank; those with a result other than success among them."""
        events = self.events()
        ends: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for event in events:
            if event["event"] == "end":
                ends.setdefault((event["pid"], event["id"]), []).append(event)
        return [
            _call(event, ends.get((event["pid"], event["id"]), []))
            for event in events
            if event["event"] == "call" and event["before"] >= since_ns
        ]

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()

    def _all(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.ranks)) if ranks is None else ranks


_SAME = (
    *("pid", "func", "count", "dtype", "redop", "root", "comm", "rank", "size", "stream", "tid"),
    *("before", "inside", "group", "result"),
)


def _call(event: dict[str, Any], ends: list[dict[str, Any]]) -> Call:
    return Call(
        **{name: event[name] for name in _SAME},
        captured=bool(event["captured"]),
        seq=event["seq"] if event["seq"] >= 0 else None,
        ends=tuple((end["start"], end["end"]) for end in ends),
        aborted=any(end["aborted"] for end in ends),
        failed=any(end["failed"] for end in ends),
    )
