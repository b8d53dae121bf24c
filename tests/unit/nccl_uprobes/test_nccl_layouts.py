"""The tables of NCCL's layouts, and layouts from DWARF of freshly compiled and of damaged libraries."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.errors import UnsupportedTarget, UsageError
from probing.daemon.confined import parser
from probing.daemon.elf.file import Elf
from probing.daemon.ipc import Message
from probing.daemon.nccl_uprobes.layouts import nccl as nccl_layouts
from probing.daemon.nccl_uprobes.layouts.from_dwarf import handlers, nccl_layout
from probing.daemon.nccl_uprobes.layouts.make_nccl import merged, tables
from probing.daemon.nccl_uprobes.layouts.nccl import (
    ABSENT,
    MAX_LAYOUTS,
    NCCL_LAYOUTS,
    UNGUARDED_LAYOUTS,
    NcclLayout,
)

# A struct as NCCL has it: nested types, unnamed unions, a config behind a typedef, and names that end as its own.
COMMON = r"""
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" unsigned long comm_offsets[], info_offsets[];
#endif
typedef struct ncclConfig_v1 { size_t size; unsigned magic; int blocking; const char *netName; CONFIG } ncclConfig_t;
struct ncclComm;
struct notncclComm { int a; };
void take_ncclComm(struct ncclComm *c) { (void)c; }
"""
DEFINITION = r"""
struct ncclComm {
    START
    struct Pair { int send, receive; } pairs[7];
    struct { char pad[PAD]; union { int deep; long deeper; }; };
    uint64_t magic;
    BEFORE
    uint64_t commHash; int rank, nRanks, cudaDev, nvmlDev;
    int64_t busId;
    char affinity[128];
    int node, nNodes;
    int asyncResult;
    volatile uint32_t *abortFlag;
    ncclConfig_t config;
    uint64_t seqNumber[5];
    END
};
struct ncclInfo {
    int coll; const char *opName; const void *send; void *recv; size_t count; int datatype, op, root;
    struct ncclComm *comm; void *stream; int chunkSteps;
};
const char *version_text = "NCCL version 2.98.7+cuda13.1";
struct ncclComm the_comm;
struct ncclInfo the_info;
#define AT(member) offsetof(struct ncclComm, member)
#define INFO(member) offsetof(struct ncclInfo, member)
unsigned long comm_offsets[] = {AT(commHash), AT(busId), AT(node), AT(nNodes), AT(asyncResult), AT(abortFlag),
    AT(seqNumber), AT(config), sizeof(struct ncclComm)};
unsigned long info_offsets[] = {INFO(coll), INFO(count), INFO(datatype), INFO(op), INFO(root), INFO(comm),
    INFO(stream), sizeof(struct ncclInfo)};
"""
CHECKED = ("comm_hash", "bus_id", "node", "nnodes", "async_result", "abort_flag", "seq_number", "config", "size")
INFO = ("coll", "count", "datatype", "op", "root", "comm", "stream", "size")
MAGIC = {"START": "uint64_t startMagic;", "END": "uint64_t endMagic;"}
NEW = {**MAGIC, "CONFIG": "int splitShare, trafficClass; const char *commName;"}
_numbers = itertools.count()


def build(folder: Path, *flags: str, compiler: str = "cc", strip: bool = False, **words: str) -> Path:
    """A library of two units, of which only the second one defines the struct."""
    number = next(_numbers)
    defines = {"START": "", "END": "", "BEFORE": "", "CONFIG": "", "PAD": "1000", **words}
    head = "".join(f"#define {name} {text}\n" for name, text in defines.items()) + COMMON
    first, second = folder / f"first{number}.c", folder / f"second{number}.c"
    first.write_text(head.replace("take_", "first_"))
    second.write_text(head + DEFINITION)
    library = folder / f"library{number}.so"
    options = [*(flags or ("-g",)), "-shared", "-fPIC", "-Wl,--build-id=sha1", "-o", str(library)]
    subprocess.run([compiler, *options, first, second], check=True)
    if strip:
        subprocess.run(["strip", "-g", library], check=True)
    return library


def read(library: Path) -> dict[str, Any]:
    with open(library, "rb") as file:
        return nccl_layout(file.fileno())


def compiled(library: Path, name: str, count: int) -> list[int]:
    """The offsets as the compiler computes them."""
    return list((ctypes.c_ulong * count).in_dll(ctypes.CDLL(str(library)), name))


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize(
    "flags",
    [
        ("-gdwarf-4",),
        ("-gdwarf-5",),
        ("-gdwarf-5", "-O2", "-Wl,-O2"),
        ("-gdwarf-4", "-gz=zlib"),
        ("-gdwarf-5", "-gz=zlib"),
        ("-gdwarf-3", "-gstrict-dwarf"),
        ("-gdwarf-2", "-gstrict-dwarf"),
        ("-gdwarf-5", "-gdwarf64"),
        ("-gdwarf-5", "-x", "c++"),
    ],
    ids=" ".join,
)
def test_offsets_are_the_compilers(compiler: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    library = build(tmp_path, *flags, compiler=compiler, **NEW)
    found = read(library)
    assert [found["comm"][name] for name in CHECKED] == compiled(library, "comm_offsets", len(CHECKED))
    assert [found["info"][name] for name in INFO] == compiled(library, "info_offsets", len(INFO))
    comm = found["comm"]
    assert (comm["start_magic"], comm["end_magic"], comm["seq_count"]) == (0, comm["size"] - 8, 5)
    assert comm["comm_name"] == comm["config"] + 32
    with open(library, "rb") as file:
        assert bytes.fromhex(found["build_id"]) == Elf(file.fileno()).build_id()


def test_types_in_units_of_their_own_are_left_out(tmp_path: Path) -> None:
    library = build(tmp_path, "-gdwarf-5", "-fdebug-types-section", compiler="gcc", **NEW)
    comm = read(library)["comm"]
    expected = dict(zip(CHECKED, compiled(library, "comm_offsets", len(CHECKED)), strict=True))
    assert expected.pop("seq_number") > 0
    assert {name: comm[name] for name in CHECKED if name in comm} == expected


def test_members_that_are_not_there_are_absent(tmp_path: Path) -> None:
    old = read(build(tmp_path, **MAGIC))["comm"]
    assert "comm_name" not in old
    # Without trafficClass it is older than 2.26, where seqNumber counts only under a profiler.
    assert "seq_number" not in old
    assert NcclLayout.of(old).seq_number == ABSENT
    named = read(build(tmp_path, BEFORE="char *commName;", **MAGIC))["comm"]
    assert named["comm_name"] == named["comm_hash"] - 8


def test_layouts_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    unguarded = read(build(tmp_path))["comm"]
    assert not {"start_magic", "end_magic"} & set(unguarded)
    assert NcclLayout.of(unguarded).end_magic == ABSENT
    refused = "has an unknown layout"
    with pytest.raises(UnsupportedTarget, match=refused):
        read(build(tmp_path, START="int first;", END=MAGIC["END"]))
    with pytest.raises(UnsupportedTarget, match=refused):
        read(build(tmp_path, START=MAGIC["START"], END="uint64_t endMagic, more;"))
    with pytest.raises(UnsupportedTarget, match="no debugging information"):
        read(build(tmp_path, strip=True, **NEW))
    with pytest.raises(UnsupportedTarget, match="not a 64-bit"):
        read(Path(__file__))


def test_the_first_usable_definition_counts(tmp_path: Path) -> None:
    """Another struct of the name, as a library linked into this one could have."""
    first, second = tmp_path / "first.c", tmp_path / "second.c"
    first.write_text("struct ncclComm { int rank; } other;\n")
    second.write_text("".join(f"#define {name} {text}\n" for name, text in {"BEFORE": "", "PAD": "8", **NEW}.items()))
    with second.open("a") as file:
        file.write(COMMON + DEFINITION)
    library = tmp_path / "library.so"
    subprocess.run(["cc", "-g", "-shared", "-fPIC", "-o", library, first, second], check=True)
    assert read(library)["comm"]["size"] == compiled(library, "comm_offsets", len(CHECKED))[-1]


@pytest.fixture(scope="module", params=["-gdwarf-4", "-gdwarf-5"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[range]]:
    """(a library, where its debugging information lies)."""
    library = build(tmp_path_factory.mktemp("spoilt"), request.param, **NEW)
    listed = subprocess.run(["readelf", "-SW", library], check=True, capture_output=True, text=True).stdout
    places = []
    for line in listed.splitlines():
        words = line.replace("[ ", "[").split()
        if len(words) > 5 and words[1] in (".debug_info", ".debug_abbrev", ".debug_str"):
            places.append(range(int(words[4], 16), int(words[4], 16) + int(words[5], 16)))
    assert len(places) == 3
    return library, places


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], dict[str, Any]]]:
    """What a parser answers for a library, with its limit of processor time: siblings may lead back for ever."""

    def ask(library: Path) -> dict[str, Any]:
        with open(library, "rb") as file:
            answer = parser._answer(Message({"op": "nccl_layout", "known": []}, fds=[file.fileno()]))
        return dict(json.loads(answer.payload))

    monkeypatch.setattr(parser, "LIBRARY_CPU_S", 0.5)
    before = signal.signal(signal.SIGPROF, parser._too_long)
    yield ask
    signal.signal(signal.SIGPROF, before)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_spoilt_information_gives_an_answer_or_a_typed_error(
    data: st.DataObject,
    original: tuple[Path, list[range]],
    limited: Callable[[Path], dict[str, Any]],
    tmp_path: Path,
) -> None:
    library, places = original
    raw = bytearray(library.read_bytes())
    for _ in range(data.draw(st.integers(1, 12))):
        place = data.draw(st.sampled_from(places))
        raw[data.draw(st.integers(place.start, place.stop - 1))] = data.draw(
            st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)
        )
    spoilt = tmp_path / "spoilt.so"
    spoilt.write_bytes(raw[: data.draw(st.sampled_from([len(raw), places[0].stop, len(raw) // 2]))])
    try:
        found = limited(spoilt)
    except UnsupportedTarget:
        return
    if (comm := found["comm"]) is None:
        assert found["why"]
        return
    assert all(0 <= offset <= comm["size"] <= 64 << 20 for offset in comm.values())
    NcclLayout.of(comm).pack()


def section_of(library: Path, name: str) -> int:
    """Where the header of the section lies."""
    raw = library.read_bytes()
    headers, size, count, names = struct.unpack_from("<Q", raw, 40)[0], *struct.unpack_from("<HHH", raw, 58)
    texts = struct.unpack_from("<Q", raw, headers + names * size + 24)[0]
    for at in range(headers, headers + size * count, size):
        start = texts + struct.unpack_from("<I", raw, at)[0]
        if raw[start : raw.index(b"\0", start)].decode() == name:
            return at
    raise AssertionError(name)


def test_sections_are_bounded(tmp_path: Path) -> None:
    plain = build(tmp_path, "-g", **NEW)
    packed = build(tmp_path, "-g", "-gz=zlib", **NEW)
    with open(plain, "rb") as file, open(packed, "rb") as other:
        info = Elf(file.fileno()).section(".debug_info", 1 << 20)
        assert len(Elf(other.fileno()).section(".debug_info", 1 << 20)) == len(info)
        assert Elf(file.fileno()).section(".debug_inf", 1 << 20) == b""
        assert Elf(file.fileno()).section(".bss", 1 << 20) == b""
        for name in (plain, packed):
            with open(name, "rb") as small, pytest.raises(UnsupportedTarget, match="too large"):
                Elf(small.fileno()).section(".debug_info", len(info) - 1)
    at = struct.unpack_from("<Q", packed.read_bytes(), section_of(packed, ".debug_info") + 24)[0]
    for place, value in ((at, 2), (at + 8, 1 << 62), (at + 8, len(info) + 1), (at + 24, 0)):
        raw = bytearray(packed.read_bytes())
        struct.pack_into("<Q" if place == at + 8 else "<H", raw, place, value)
        spoilt = tmp_path / "packed"
        spoilt.write_bytes(raw)
        with open(spoilt, "rb") as file, pytest.raises(UnsupportedTarget, match=r"compressed|damaged"):
            Elf(file.fileno()).section(".debug_info", 1 << 20)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[int]:
    fd = os.open(build(tmp_path, **NEW), os.O_RDONLY)
    yield fd
    os.close(fd)


def test_the_parsers_request(opened: int, tmp_path: Path) -> None:
    answer = handlers()["nccl_layout"]
    first = json.loads(answer(Message({"known": []}, fds=[opened])))
    assert (first["known"], first["why"]) == (False, "")
    assert first["comm"]["comm_hash"] > 0
    again = json.loads(answer(Message({"known": ["00", first["build_id"]]}, fds=[opened])))
    nothing = {"version": None, "comm": None, "info": None, "why": ""}
    assert again == {"build_id": first["build_id"], "known": True, **nothing}
    with open(build(tmp_path, strip=True), "rb") as file:
        stripped = json.loads(answer(Message({"known": []}, fds=[file.fileno()])))
    assert (stripped["known"], stripped["comm"], stripped["version"]) == (False, None, "2.98.7")
    assert "no debugging information" in stripped["why"]
    for header, fds in (({"known": []}, []), ({"known": "all"}, [opened]), ({"known": ["00"] * 5000}, [opened])):
        with pytest.raises(UsageError):
            answer(Message(header, fds=fds))


def test_layouts_of_the_table_differ_in_their_second_word() -> None:
    assert 0 < len(NCCL_LAYOUTS) < MAX_LAYOUTS
    assert len({layout.end_magic for layout in NCCL_LAYOUTS}) == len(NCCL_LAYOUTS)
    for layout in NCCL_LAYOUTS:
        assert ABSENT != layout.end_magic > layout.comm_hash + 24
        assert layout.end_magic % 8 == 0
        assert (layout.seq_number == ABSENT) == (layout.seq_count == ABSENT)
    assert {layout.end_magic for layout in UNGUARDED_LAYOUTS} == {ABSENT}
    every = (*NCCL_LAYOUTS, *UNGUARDED_LAYOUTS)
    for texts in ([v for layout in every for v in layout.versions], [b for layout in every for b in layout.build_ids]):
        assert len(set(texts)) == len(texts)
    assert {"2.21.5", "2.24.3", "2.27.5", "2.28.9", "2.30.7", "2.32.3"} <= {
        version for layout in NCCL_LAYOUTS for version in layout.versions
    }


def test_packed_in_the_order_of_the_programs() -> None:
    layout = NcclLayout(("9",), (), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert layout.pack() == struct.pack("<10I", *range(1, 11))
    assert NcclLayout(("9",), (), 1, 2).pack() == struct.pack("<10I", 1, 2, *[0xFFFFFFFF] * 8)
    assert NcclLayout.offset_names() == (
        "end_magic",
        "comm_hash",
        "bus_id",
        "node",
        "nnodes",
        "async_result",
        "abort_flag",
        "comm_name",
        "seq_number",
        "seq_count",
    )


@pytest.mark.parametrize("comm", [{}, *({"comm_hash": value} for value in (-1, 1 << 32, "1", 1.5, True, None))])
def test_impossible_offsets_are_refused(comm: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedTarget):
        NcclLayout.of(comm)


def test_the_table_is_what_the_script_writes() -> None:
    text = Path(nccl_layouts.__file__).read_text()
    assert tables(text, NCCL_LAYOUTS, UNGUARDED_LAYOUTS) == text
    shorter = tables(text, NCCL_LAYOUTS[:2], ())
    assert shorter.count("NcclLayout(\n") == 2
    assert tables(shorter, NCCL_LAYOUTS, UNGUARDED_LAYOUTS) == text


def test_entries_of_the_table_keep_their_places() -> None:
    old = (NcclLayout(("1",), ("a",), 16, 8), NcclLayout(("3",), ("c",), 24, 8))
    found = [NcclLayout(("0",), ("z",), 40, 8), NcclLayout(("2",), ("b",), 16, 8), NcclLayout(("3",), ("c",), 24, 8)]
    assert merged(old, found) == (
        NcclLayout(("1", "2"), ("a", "b"), 16, 8),
        NcclLayout(("3",), ("c",), 24, 8),
        NcclLayout(("0",), ("z",), 40, 8),
    )
