"""What our ELF and DWARF reader takes beside pyelftools: ``python bench/elf_readers.py [--torch FILE] [--nccl FILE]``.

Four questions that the parser answers:

* ``symbols``: the symbols of the gloo probes and the build id of libtorch_cpu.
* ``frame``: the function and the call frame information at one address of libtorch_cpu.
* ``layout``: offsets of struct ncclComm in the DWARF of libnccl.
* ``absent``: the same for a struct that is not there, so that all units are searched.

Both readers must give the same answer. pyelftools is used by its own iterators; siblings are skipped, and no unit is
read behind the one that has the struct. Each answer is found in a process of its own, the readers in turn, so the ratio
holds on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from statistics_of_blocks import table

from probing.daemon.elf.symbols import find_symbols
from probing.daemon.nccl_uprobes.operations.symbols import GLOO

ROOT = Path(__file__).resolve().parents[1]
TORCH = ".venv/lib/*/site-packages/torch/lib/libtorch_cpu.so"
NCCL = ".build/wheels/*nccl*/**/libnccl.so.2"
# Seconds for one file: CPU in confined/parser.py; wall in requests for native stacks, and in layouts/from_dwarf.py.
LIMITS_S = {"symbols": 3.0, "frame": 1.0, "layout": 2.0, "absent": 2.0}
STRUCTS = {"layout": "ncclComm", "absent": "ncclKomm"}
MEMBERS = {"commHash": "comm_hash", "rank": "rank", "nRanks": "nranks", "cudaDev": "cuda_device"}
# Nothing more is learnt of a reader that takes longer.
GIVE_UP_S = 600
Answer = Callable[[Any], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", type=Path, default=next(ROOT.glob(TORCH), None))
    parser.add_argument("--nccl", type=Path, default=next(ROOT.glob(NCCL), None))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    questions = {"symbols": options.torch, "frame": options.torch, "layout": options.nccl, "absent": options.nccl}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for question, path in questions.items():
            for reader in ("ours", "pyelftools") if path else ():
                found.setdefault((question, reader), []).append(asked(question, reader, path))
    for question in questions:
        answers = [run["answer"] for (other, _), runs in found.items() if other == question for run in runs]
        assert all(answer == answers[0] for answer in answers), f"{question}: the readers disagree"
    print(table([row(*key, runs) for key, runs in found.items()]))


def row(question: str, reader: str, runs: list[dict[str, Any]]) -> dict[str, object]:
    def span(key: str, scale: float) -> str:
        values = [run[key] * scale for run in runs]
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    return {
        "question": question,
        "reader": reader,
        "wall s, median (range)": span("wall_s", 1),
        "CPU s": span("cpu_s", 1),
        "limit, s": LIMITS_S[question],
        "peak RSS, MiB": span("rss", 1 / (1 << 20)),
    }


def asked(question: str, reader: str, path: Path) -> dict[str, Any]:
    word = STRUCTS.get(question, "")
    if question == "frame":
        with open(path, "rb") as file:
            word = str(find_symbols(file.fileno(), GLOO.patterns)[0].address + 8)
    command = [sys.executable, __file__, "--child", question, reader, str(path), word]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIVE_UP_S)
    return dict(json.loads(done.stdout))


def child(question: str, reader: str, path: str, word: str) -> None:
    answer = READERS[question, reader](word)
    wall, cpu = time.monotonic(), time.process_time()
    with open(path, "rb") as file:
        found = answer(file)
    usage = {"wall_s": time.monotonic() - wall, "cpu_s": time.process_time() - cpu}
    print(json.dumps({**usage, "rss": peak_bytes(), "answer": found}))


def peak_bytes() -> int:
    """Python and the imported modules are in it. Not ru_maxrss, which begins with the parent's at exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


# Each of these imports before the clock runs.


def our_symbols(_: str) -> Answer:
    from probing.daemon.elf.file import Elf
    from probing.daemon.elf.symbols import matching_symbols

    def answer(file: Any) -> Any:
        elf = Elf(file.fileno())
        build_id = elf.build_id()
        symbols = [[s.name, s.address, s.size] for s in matching_symbols(elf, GLOO.patterns)]
        return [build_id.hex() if build_id else None, symbols]

    return answer


def their_symbols(_: str) -> Answer:
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import NoteSection

    def matches(section: Any, patterns: Iterable[str]) -> dict[str, set[tuple[int, str, int]]]:
        """By pattern; in one pass over the symbols."""
        each = [(pattern, re.compile(".*".join(map(re.escape, pattern.split("*"))))) for pattern in patterns]
        every = re.compile("|".join(expression.pattern for _, expression in each))
        found: dict[str, set[tuple[int, str, int]]] = {}
        for symbol in section.iter_symbols() if section and each else ():
            if every.fullmatch(symbol.name) and symbol["st_shndx"] != "SHN_UNDEF":
                for pattern, expression in each:
                    if expression.fullmatch(symbol.name):
                        place = symbol["st_value"], symbol.name, symbol["st_size"]
                        found.setdefault(pattern, set()).add(place)
        return found

    def answer(file: Any) -> Any:
        elf = ELFFile(file)
        sections = (section for section in elf.iter_sections() if isinstance(section, NoteSection))
        notes = (note for section in sections for note in section.iter_notes())
        build_id = next((note["n_desc"] for note in notes if note["n_type"] == "NT_GNU_BUILD_ID"), None)
        found = matches(elf.get_section_by_name(".dynsym"), GLOO.patterns)
        found |= matches(elf.get_section_by_name(".symtab"), [p for p in GLOO.patterns if p not in found])
        symbols = sorted(set().union(*found.values()))
        return [build_id, [[name, address, size] for address, name, size in symbols]]

    return answer


def our_frame(word: str) -> Answer:
    from probing.daemon.elf.cfi import FrameTable
    from probing.daemon.elf.file import Elf
    from probing.daemon.elf.functions import Functions

    def answer(file: Any) -> Any:
        elf = Elf(file.fileno())
        row = FrameTable(elf).row(int(word))
        function = Functions(elf).find(int(word))
        assert row
        assert function
        return [row.start, row.size, function[1]]

    return answer


def their_frame(word: str) -> Answer:
    from elftools.dwarf.callframe import FDE
    from elftools.elf.elffile import ELFFile

    address = int(word)

    def answer(file: Any) -> Any:
        elf = ELFFile(file)
        entries = elf.get_dwarf_info(relocate_dwarf_sections=False).EH_CFI_entries()
        frames = (entry for entry in entries if isinstance(entry, FDE))
        starts = ((frame["initial_location"], frame["address_range"]) for frame in frames)
        start, size = next((start, size) for start, size in starts if start <= address < start + size)
        section = elf.get_section_by_name(".symtab") or elf.get_section_by_name(".dynsym")
        functions = (s for s in section.iter_symbols() if s["st_info"]["type"] == "STT_FUNC")
        values = ((s["st_value"], s["st_size"]) for s in functions)
        return [start, size, next(at for at, length in values if at <= address < at + length)]

    return answer


def our_layout(word: str) -> Answer:
    from probing.daemon.elf.dwarf_entries import LOCATION, SIZE, Dwarf
    from probing.daemon.elf.dwarf_strings import Texts
    from probing.daemon.elf.dwarf_units import Units
    from probing.daemon.elf.file import Elf

    def answer(file: Any) -> Any:
        elf = Elf(file.fileno())
        section = [elf.section(f".debug_{name}", 64 << 20) for name in ("info", "abbrev")]
        units = Units(*section, time.monotonic() + GIVE_UP_S)
        texts = (elf.section(f".debug_{name}", 64 << 20) for name in ("str", "line_str", "str_offsets"))
        dwarf = Dwarf(units, Texts(units, *texts))
        struct = next((found for unit in units for found in dwarf.structures(unit, word)), None)
        if struct is None:
            return None
        members = {MEMBERS[m.name]: m.number(LOCATION) for m in dwarf.children(struct) if m.name in MEMBERS}
        return {**members, "size": struct.number(SIZE)}

    return answer


def their_layout(word: str) -> Answer:
    from elftools.elf.elffile import ELFFile

    def name(die: Any) -> str:
        return die.attributes["DW_AT_name"].value.decode() if "DW_AT_name" in die.attributes else ""

    def answer(file: Any) -> Any:
        dwarf = ELFFile(file).get_dwarf_info(relocate_dwarf_sections=False)
        for unit in dwarf.iter_CUs():
            for die in unit.get_top_DIE().iter_children():
                if die.tag != "DW_TAG_structure_type" or name(die) != word or "DW_AT_byte_size" not in die.attributes:
                    continue
                members = {
                    MEMBERS[name(member)]: member.attributes["DW_AT_data_member_location"].value
                    for member in die.iter_children()
                    if name(member) in MEMBERS
                }
                return {**members, "size": die.attributes["DW_AT_byte_size"].value}
        return None

    return answer


READERS: dict[tuple[str, str], Callable[[str], Answer]] = {
    ("symbols", "ours"): our_symbols,
    ("symbols", "pyelftools"): their_symbols,
    ("frame", "ours"): our_frame,
    ("frame", "pyelftools"): their_frame,
    ("layout", "ours"): our_layout,
    ("layout", "pyelftools"): their_layout,
    ("absent", "ours"): our_layout,
    ("absent", "pyelftools"): their_layout,
}


if __name__ == "__main__":
    main()
