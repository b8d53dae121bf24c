"""The doubles have the ABI that they say: of the published headers, and of the offsets that the wheels' DWARF gives."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from doubles.doubles import (
    ENQUEUE_CHECK,
    HERE,
    INFO_OFFSETS,
    VERSIONS,
    build,
    comm_offsets,
    version_code,
    write_headers,
)
from long import long_unless

from probing.daemon.bpf.probe_points import probe_point
from probing.daemon.elf.file import X86_64
from probing.daemon.elf.symbols import find_symbols
from probing.daemon.nccl_uprobes.layouts.from_dwarf import nccl_layout
from probing.daemon.nccl_uprobes.layouts.nccl import ABSENT, NCCL_LAYOUTS, NcclLayout

ROOT = Path(__file__).resolve().parents[2]
# Only a comment apart from the excerpt; what the real header includes of CUDA is in cudart.h.
CUDA_HEADERS = ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h")
CUDA_HEADER = '#include "cudart.h"\n#define CUDART_VERSION 12000\n#define __CUDA_BF16_TYPES_EXIST__\n'
# The double's name of a field -> that of NcclLayout.
FIELDS = {
    "endMagic": "end_magic",
    "commHash": "comm_hash",
    "busId": "bus_id",
    "node": "node",
    "nNodes": "nnodes",
    "asyncResult": "async_result",
    "abortFlag": "abort_flag",
}
# No probes on them.
NOT_MADE = re.compile(r"ncclParam|ncclComm(Suspend|Resume|MemStats)|nccl\w+Config$|ncclSetEncryption")
CUDART = (
    *("cudaEventCreate", "cudaEventCreateWithFlags", "cudaEventDestroy", "cudaEventQuery", "cudaEventRecord"),
    *("cudaEventRecordWithFlags", "cudaEventSynchronize", "cudaStreamSynchronize", "cudaStreamQuery"),
    *("cudaStreamWaitEvent", "cudaDeviceSynchronize", "cudaStreamBeginCapture", "cudaStreamEndCapture"),
    *("cudaGraphLaunch", "cudaLaunchKernel", "cudaMalloc", "cudaMallocAsync", "cudaMallocManaged", "cudaHostAlloc"),
    *("cudaFree", "cudaFreeAsync", "cudaFreeHost", "cudaStreamDestroy", "cudaSetDevice", "cudaGetLastError"),
)

_ENDS = (min(VERSIONS, key=version_code), max(VERSIONS, key=version_code))
version = pytest.mark.parametrize("version", [long_unless(name in _ENDS, name) for name in VERSIONS])


def compiles(*words: str | Path) -> None:
    done = subprocess.run(["cc", "-std=gnu11", "-fsyntax-only", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def headers_of(wheel_version: str) -> list[Path]:
    """nccl.h of this version, where its wheel was fetched."""
    return [*(ROOT / ".build" / "wheels" / f"nvidia-nccl-cu12-{wheel_version}").rglob("nccl.h")]


def symbols_at(library: Path, *patterns: str) -> dict[str, tuple[int, bytes, int]]:
    fd = os.open(library, os.O_RDONLY)
    try:
        return {s.name: (s.address, s.head, s.size) for s in find_symbols(fd, list(patterns))}
    finally:
        os.close(fd)


@version
def test_double_agrees_with_the_excerpt_of_the_published_header(version: str, tmp_path: Path) -> None:
    write_headers(tmp_path, version)
    source = tmp_path / "facts.c"
    source.write_text('#include "nccl_public.h"\n#include "nccl_facts.h"\n')
    compiles("-I", tmp_path, "-I", HERE, source)


def test_excerpt_is_not_compatible_with_another_declaration(tmp_path: Path) -> None:
    """The check above can fail."""
    write_headers(tmp_path, "2.27.5")
    source = tmp_path / "facts.c"
    source.write_text('#include "nccl_public.h"\nncclResult_t ncclSend(int peer);\n#include "nccl_facts.h"\n')
    with pytest.raises(AssertionError, match="conflicting types"):
        compiles("-I", tmp_path, "-I", HERE, source)


@pytest.mark.parametrize("wheel", [v for v in VERSIONS if headers_of(v)] or ["none fetched"])
def test_double_agrees_with_the_header_of_the_wheel(wheel: str, tmp_path: Path) -> None:
    """With the real header in place of ours, the definitions and the excerpt compile, and no function is left out."""
    if wheel not in VERSIONS:
        # Without wheels there is the excerpt alone, which has to name what all versions have.
        assert {"ncclAllReduce", "ncclCommInitRankConfig"} <= declared((HERE / "nccl_facts.h").read_text())
        return
    (header,) = headers_of(wheel)
    write_headers(tmp_path, wheel)
    for name in CUDA_HEADERS:
        (tmp_path / name).write_text(CUDA_HEADER)
    include = ("-I", tmp_path, "-I", HERE, "-I", header.parent)
    compiles("-w", "-DDOUBLE_REAL_HEADER", *include, HERE / "nccl.c")
    source = tmp_path / "facts.c"
    source.write_text('#include "nccl_layout.h"\n#include "nccl.h"\n#include "nccl_facts.h"\n')
    compiles("-w", *include, source)
    built = build(tmp_path, wheel)
    missing = {name for name in declared(header.read_text()) if not NOT_MADE.search(name)}
    missing.add("ncclCommInitRankConfig")
    assert missing - set(symbols_at(built.nccl, "nccl*")) == set()


def declared(header: str) -> set[str]:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.DOTALL)
    return set(re.findall(r"(?:ncclResult_t|const char\s*\*)\s+(nccl\w+)\s*\(", text))


@version
def test_aliases_and_prologues_are_as_in_the_real_library(version: str, tmp_path: Path) -> None:
    nccl = build(tmp_path, version).nccl
    found = symbols_at(nccl, "nccl*", "pnccl*", ENQUEUE_CHECK)
    public = [name for name in found if name.startswith("nccl") and not name.startswith("ncclDouble")]
    assert len(public) >= 27
    assert [name for name in public if found[name][0] != found["p" + name][0]] == []
    # Of each function that probes are put on, whose real entry begins with a push.
    calls = ("ncclAllReduce", "ncclBroadcast", "ncclReduce", "ncclSend", "ncclCommSplit", ENQUEUE_CHECK)
    assert {found[name][1][:1] for name in calls} == {b"\x55"}
    point = probe_point(found["ncclCommInitRankConfig"][1], X86_64, found["ncclCommInitRankConfig"][2])
    assert (point.offset, point.cost) == (10 if version_code(version) >= 22400 else 0, "cheap")


@version
def test_dwarf_gives_the_offsets_of_the_real_build(version: str, tmp_path: Path) -> None:
    """The double's offsets are those of the shipped table, and are found in its DWARF like those of the real one."""
    offsets = comm_offsets(version)
    fd = os.open(build(tmp_path, version).nccl, os.O_RDONLY)
    try:
        found = nccl_layout(fd)
    finally:
        os.close(fd)
    comm, info = found["comm"], found["info"]
    expected = {FIELDS[name]: at for name, at in offsets.items() if name in FIELDS}
    assert {name: comm[name] for name in expected} == expected
    assert comm["size"] == offsets["sizeof"]
    assert (info["coll"], info["count"], info["comm"], info["stream"]) == tuple(
        INFO_OFFSETS[name] for name in ("coll", "count", "comm", "stream")
    )
    layout = NcclLayout.of(comm, (version,))
    shipped = [known for known in NCCL_LAYOUTS if version in known.versions]
    if "startMagic" not in offsets:
        assert layout.end_magic == ABSENT
    else:
        (known,) = shipped
        assert layout.offsets == known.offsets


@pytest.mark.parametrize(
    ("variant", "has_check", "has_dwarf"),
    [("dwarf", 1, True), ("no_dwarf", 1, False), ("no_enqueue_check", 0, False), ("stripped", 0, False)],
)
def test_variants_lack_what_they_say(variant: str, has_check: int, has_dwarf: bool, tmp_path: Path) -> None:
    nccl = build(tmp_path, "2.27.5", variant).nccl
    assert len(symbols_at(nccl, ENQUEUE_CHECK)) == has_check
    assert "ncclAllReduce" in symbols_at(nccl, "ncclAllReduce")
    sections = subprocess.run(["readelf", "-SW", nccl], capture_output=True, text=True, check=True).stdout
    assert (".debug_info" in sections) is has_dwarf
    assert (".symtab" in sections) is (variant != "stripped")


def test_cudart_has_the_functions_that_probes_are_put_on(tmp_path: Path) -> None:
    found = symbols_at(build(tmp_path, "2.27.5").cudart, "cuda*")
    assert set(CUDART) - set(found) == set()
