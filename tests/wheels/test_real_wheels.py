"""What the probes of NCCL and of the CUDA runtime expect, against seven published wheels of NCCL and one of libcudart.

Not a part of ``make test`` or of CI: ``make nccl-wheels`` fetches 2 GB, and runs this as root.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from waiting import until

from probing.daemon.bpf import pins
from probing.daemon.bpf.build import build
from probing.daemon.bpf.probe_points import probe_point
from probing.daemon.bpf.session import Session
from probing.daemon.elf.file import Elf
from probing.daemon.elf.symbols import Symbol, find_symbols
from probing.daemon.gpu.cuda.symbols import COMPLETION, LAUNCHES, MEMORY
from probing.daemon.nccl_uprobes.layouts.from_dwarf import nccl_layout, nccl_version
from probing.daemon.nccl_uprobes.layouts.nccl import ABSENT, NCCL_LAYOUTS, UNGUARDED_LAYOUTS, NcclLayout
from probing.daemon.nccl_uprobes.operations.source import OBJECTS, CollectivesSource
from probing.daemon.nccl_uprobes.operations.symbols import NCCL as LIBRARY
from probing.daemon.nccl_uprobes.records.names import DTYPE_BYTES, DTYPES, NCCL, NCCL_RESULTS, OPS, REDOPS, codes
from probing.daemon.source import Identity

WHEELS = Path(__file__).parents[2] / ".build" / "wheels"
VERSIONS = ("2.18.3", "2.21.5", "2.24.3", "2.27.5", "2.28.9", "2.30.7", "2.32.3")
FIRST_WITH_MAGIC = (2, 21)
# A lea and a return, which the kernel steps out of line; it is called when something has failed.
DEAR = {"ncclGetLastError"}
INFO = {"coll": 0, "count": 0x20, "datatype": 0x28, "op": 0x2C, "root": 0x30, "comm": 0x38, "stream": 0x40}
# Of ncclConfig_t, since 2.27.
COMM_NAME_IN_CONFIG = 48
DEADLINE = 60.0
CALLER = r"""
#include <dlfcn.h>
#include <stdio.h>
typedef struct { unsigned char internal[128]; } unique_id;
int main(int argc, char **argv)
{
	void *library = dlopen(argv[1], RTLD_NOW), *comm = 0;
	unique_id id = {{0}};
	int version = 0, result;
	int (*get_version)(int *) = dlsym(library, "ncclGetVersion");
	int (*get_id)(unique_id *) = dlsym(library, "ncclGetUniqueId");
	int (*init)(void **, int, unique_id, int) = dlsym(library, "ncclCommInitRank");
	const char *(*text)(int) = dlsym(library, "ncclGetErrorString");

	result = get_version(&version);
	printf("%d %d ", result, version);
	printf("%d ", get_id(&id));
	result = init(&comm, 3, id, 2);
	printf("%d ", result);
	for (int i = 0; i < 128; i++)
		printf("%02x", id.internal[i]);
	printf(" %s\n", text(result));
	return 0;
}
"""


def library(version: str) -> Path:
    return WHEELS / f"nvidia-nccl-cu12-{version}" / "lib" / "libnccl.so.2"


def header(version: str) -> str:
    return (WHEELS / f"nvidia-nccl-cu12-{version}" / "include" / "nccl.h").read_text()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@cache
def layout(version: str) -> dict[str, Any]:
    with library(version).open("rb") as file:
        return nccl_layout(file.fileno())


@cache
def symbols(version: str) -> tuple[Symbol, ...]:
    with library(version).open("rb") as file:
        return tuple(find_symbols(file.fileno(), [*LIBRARY.patterns, *LIBRARY.marks]))


def enumerators(text: str, name: str) -> dict[str, int]:
    """The first name of each number of an enum of nccl.h."""
    body = re.search(r"typedef enum \{([^{}]*)\}\s*" + name + ";", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
    assert body is not None
    found: dict[int, str] = {}
    for word, number in re.findall(r"(\w+)\s*=\s*(\d+)\s*(?:,|$)", re.sub(r"//.*", "", body[1]).strip() + ","):
        found.setdefault(int(number), word)
    return {word: number for number, word in found.items()}


def functions_of_dwarf(path: Path) -> dict[str, int]:
    """The enumerators of ncclFunc_t, as another reader of DWARF sees them."""
    with path.open("rb") as file:
        for unit in ELFFile(file).get_dwarf_info().iter_CUs():
            for die in unit.get_top_DIE().iter_children():
                named = die.attributes.get("DW_AT_name")
                if die.tag == "DW_TAG_typedef" and named is not None and named.value == b"ncclFunc_t":
                    kind = die.get_DIE_from_attribute("DW_AT_type")
                    return {
                        child.attributes["DW_AT_name"].value.decode(): child.attributes["DW_AT_const_value"].value
                        for child in kind.iter_children()
                    }
    raise AssertionError("no ncclFunc_t")


def test_the_wheels_are_here() -> None:
    assert [version for version in VERSIONS if not library(version).exists()] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_has_what_dwarf_says(version: str) -> None:
    found = layout(version)
    guarded = numbers(version) >= FIRST_WITH_MAGIC
    (entry,) = [entry for entry in (NCCL_LAYOUTS if guarded else UNGUARDED_LAYOUTS) if version in entry.versions]
    assert NcclLayout.of(found["comm"]).offsets == entry.offsets
    assert entry.build_ids[entry.versions.index(version)] == found["build_id"]
    assert (entry.end_magic != ABSENT) == guarded
    assert (entry.seq_number != ABSENT) == (numbers(version) >= (2, 26))
    assert {name: found["info"][name] for name in INFO} == INFO
    with library(version).open("rb") as file:
        assert nccl_version(Elf(file.fileno())) == version
    if numbers(version) >= (2, 27):
        assert entry.comm_name == found["comm"]["config"] + COMM_NAME_IN_CONFIG


@pytest.mark.parametrize("version", VERSIONS)
def test_every_probe_is_placed_at_a_cheap_instruction(version: str) -> None:
    names = {symbol.name for symbol in symbols(version)}
    declared = set(re.findall(r"\b(nccl[A-Z]\w+)\s*\(", header(version)))
    exact = {pattern for pattern in LIBRARY.patterns if "*" not in pattern}
    public = {pattern for pattern in exact if pattern.startswith("nccl")}
    # What the header has is there, what it has not is of other versions; what is internal is in all of them.
    assert names & public == declared & public
    assert exact - public <= names
    placed = LIBRARY.placements(symbols(version))
    dear = sorted(placement.symbol for placement in placed if placement.cost != "cheap")
    print(f"\nNCCL {version}: {len(placed)} probes, not cheap: {', '.join(dear) or 'none'}")
    assert set(dear) <= DEAR
    with library(version).open("rb") as file:
        code = [segment for segment in Elf(file.fileno()).segments if segment.flags & 1]
    for placement in placed:
        assert any(part.offset <= placement.offset < part.offset + part.file_size for part in code)


def test_all_calls_of_the_cuda_runtime_are_cheap() -> None:
    (path,) = WHEELS.glob("nvidia-cuda-runtime-cu12-*/lib/libcudart.so.12")
    with path.open("rb") as file:
        machine = Elf(file.fileno()).machine
        found = [symbol for symbol in find_symbols(file.fileno(), ["cuda*"]) if symbol.file_offset is not None]
    probed = {function.name for group in (COMPLETION, MEMORY, LAUNCHES) for function in group.functions}
    assert probed <= {symbol.name for symbol in found}
    dear = [symbol.name for symbol in found if probe_point(symbol.head, machine, symbol.size).cost != "cheap"]
    assert dear == []


@pytest.mark.parametrize("version", VERSIONS)
def test_numbers_mean_what_the_header_says(version: str) -> None:
    text = header(version)
    results = enumerators(text, "ncclResult_t")
    count = results.pop("ncclNumResults")
    assert [results[word] for word in NCCL_RESULTS[:count]] == list(range(count))
    types = enumerators(text, "ncclDataType_t")
    types.pop("ncclNumTypes", None)
    dtypes = codes("dtype")
    for word, number in types.items():
        name = word.removeprefix("nccl").lower()
        name = {"float8e4m3": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}.get(name, name)
        index = int(dtypes[NCCL * 256 + number])
        assert DTYPES[index] == name
        bits = re.search(r"float8|\d+$", name)
        assert bits is not None
        assert DTYPE_BYTES[index] * 8 == int(bits[0].removeprefix("float"))
    operators = enumerators(text, "ncclRedOp_t")
    count = operators.pop("ncclNumOps")
    redops = codes("redop")
    words = {"ncclProd": "product"}
    for word, number in operators.items():
        assert REDOPS[int(redops[NCCL * 256 + number])] == words.get(word, word.removeprefix("nccl").lower())
    assert len(operators) == count == np.count_nonzero(redops[NCCL * 256 : NCCL * 256 + 256] >= 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_numbers_of_functions_are_those_of_ncclfunc(version: str) -> None:
    found = functions_of_dwarf(library(version))
    known = codes("op")
    words = {"ncclFuncAlltoAll": "all_to_all"}
    seen = []
    for word, number in found.items():
        name = words.get(word, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word.removeprefix("ncclFunc")).lower())
        if name in OPS:
            assert OPS[int(known[NCCL * 256 + number])] == name
            seen.append(name)
        elif word != "ncclNumFuncs":
            assert known[NCCL * 256 + number] < 0
    assert {"broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce", "send", "recv"} <= set(seen)


class Anybody:
    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return Identity(pid, start_ns, "job0", "run", "trainer", 0, 0, 1, 0)


_numbers = itertools.count()


@pytest.fixture
def session() -> Iterator[Session]:
    build()
    root = Path(f"/sys/fs/bpf/probingd-wheels-{os.getpid()}-{next(_numbers)}")
    session = Session.open("wheels", list(OBJECTS), root, False)
    yield session
    session.close(keep=False)
    pins.cleanup(pin_root=root)
    if root.exists():
        root.rmdir()


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caller")
    (folder / "caller.c").write_text(CALLER)
    subprocess.run(["cc", "-O1", "-w", "-o", folder / "caller", folder / "caller.c", "-ldl"], check=True)
    return folder / "caller"


def unique_id_hash(raw: bytes) -> int:
    """getHash of NCCL's src/misc/utils.cc."""
    value = 5381
    for byte in raw:
        value = ((value * 33) ^ (byte - 256 if byte > 127 else byte)) & (1 << 64) - 1
    return value


@pytest.mark.parametrize("version", VERSIONS)
def test_an_init_without_a_gpu_is_seen_to_fail(version: str, session: Session, caller: Path) -> None:
    source = CollectivesSource(session, Anybody(), "node", find_symbols)
    source.start()
    path = library(version)
    with path.open("rb") as file:
        assert source.attach(file.fileno(), os.fsencode(path)) > 0
    environment = {**os.environ, "NCCL_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([caller, path], env=environment, check=True, capture_output=True, text=True, timeout=DEADLINE)
    got_version, code, got_id, result, raw_id, text = done.stdout.split(" ", 5)
    major, minor, patch = numbers(version)
    assert (int(got_version), int(code), int(got_id)) == (0, major * 10000 + minor * 100 + patch, 0)
    assert int(result) in enumerators(header(version), "ncclResult_t").values()
    assert int(result) != 0
    assert text.strip()
    ring = session.rings["communicators"]
    (made,) = until(lambda: list(ring.drain().records))
    # COMM_MADE by MADE_INIT_RANK, with the identity of the unique id.
    assert (made["event"], made["maker"], made["identity"]) == (2, 1, 2)
    assert (made["result"], made["rank"], made["size"]) == (int(result), 2, 3)
    assert made["hash"] == unique_id_hash(bytes.fromhex(raw_id))
