"""The RAS of published wheels of NCCL answers our client: it runs without a GPU, as its thread needs none.

Not a part of ``make test`` or of CI: ``make nccl-wheels`` fetches the wheels.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from probing.daemon.nccl_uprobes.ras.client import NobodyListens, RasAnswer, ask_ras, connect_ras, ras_address
from probing.daemon.nccl_uprobes.ras.json_report import json_report
from probing.daemon.nccl_uprobes.ras.text_report import text_report

WHEELS = Path(__file__).parents[2] / ".build" / "wheels"
RUNTIME = next(iter(sorted(WHEELS.glob("nvidia-cuda-runtime-cu12-*/lib/libcudart.so.12"))), None)
# The first with RAS, and those around the first with JSON.
FORMS = {"2.24.3": "text", "2.27.5": "text", "2.28.9": "json", "2.30.7": "json", "2.32.3": "json"}
DEADLINE = 60.0
# Starts the thread as ncclCommInitRank does (src/init.cc), with no communicator and one rank, which is this process:
# struct rasRankInit {address 28 bytes, pid, cudaDev, nvmlDev, ...}; the thread frees what ncclRasAddRanks is given.
PROCESS = """
import ctypes, os, signal, socket, struct, sys
from elftools.elf.elffile import ELFFile
runtime, path = sys.argv[1:]
ctypes.CDLL(runtime, ctypes.RTLD_GLOBAL)
library, libc = ctypes.CDLL(path), ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
with open(path, "rb") as file:
    table = ELFFile(file).get_section_by_name(".symtab")
    symbols = {symbol.name: symbol["st_value"] for symbol in table.iter_symbols()}
base = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p).value - symbols["ncclGetVersion"]
call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
rank = ctypes.create_string_buffer(256)
struct.pack_into("=HH4s", rank, 0, socket.AF_INET, 0, socket.inet_aton("127.0.0.1"))
assert call(base + symbols["_Z15ncclRasCommInitP8ncclCommP11rasRankInit"])(None, ctypes.addressof(rank)) == 0
struct.pack_into("=iii", rank, 28, os.getpid(), 0, 0)
ranks = libc.malloc(4096)
ctypes.memmove(ranks, rank, len(rank))
assert call(base + symbols["_Z15ncclRasAddRanksP11rasRankIniti"])(ranks, 1) == 0
signal.pause()
"""


@contextmanager
def running(version: str, port: int) -> Iterator[None]:
    library = WHEELS / f"nvidia-nccl-cu12-{version}" / "lib" / "libnccl.so.2"
    assert RUNTIME is not None, "run `make nccl-wheels`"
    assert library.exists(), "run `make nccl-wheels`"
    command = [sys.executable, "-c", PROCESS, str(RUNTIME), str(library)]
    with subprocess.Popen(command, env={"NCCL_RAS_ADDR": f"127.0.0.1:{port}"}) as process:
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()


def answer_at(port: int) -> RasAnswer:
    address = ras_address({"NCCL_RAS_ADDR": f"127.0.0.1:{port}"}, port)
    assert address is not None
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            with connect_ras(address) as connection:
                return ask_ras(connection)
        except NobodyListens:
            assert time.monotonic() < deadline, "RAS does not listen"


@pytest.mark.parametrize("version", FORMS)
def test_a_real_ras_answers(version: str) -> None:
    port = 29_300 + list(FORMS).index(version)
    with running(version, port):
        answer = answer_at(port)
    assert (answer.form, answer.protocol) == (FORMS[version], 2)
    assert version.encode() in answer.report
    report = json_report(answer.report) if answer.form == "json" else text_report(answer.report)
    assert report == {"rows": [], "skipped": 0}
