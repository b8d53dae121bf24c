"""The ELF reader on built files and on damaged ones, and the choice of probe points on real prologues."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from probing.api.errors import UnsupportedTarget
from probing.daemon.bpf.probe_points import probe_point
from probing.daemon.elf import symbols
from probing.daemon.elf.file import AARCH64, X86_64, Elf
from probing.daemon.elf.symbols import find_symbols, matching_symbols, read_symbol

SOURCE = r"""
long shared_counter = 7;
long zeroed[100];
static __attribute__((noinline, used)) long hidden_one(long a) { return a * 3 + shared_counter; }
long first_function(long a) { return hidden_one(a) + zeroed[a]; }
long first_function_alias(long a) __attribute__((alias("first_function")));
long second_function(long a) { return first_function(a) + 1; }
extern long absent_function(long);
long third_function(long a) { return absent_function(a); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elf")
    (folder / "library.c").write_text(SOURCE)
    flags = ["-shared", "-fPIC", "-O1", "-Wl,--build-id=0x0123456789abcdef"]
    subprocess.run(["cc", *flags, "-o", folder / "library.so", folder / "library.c"], check=True)
    return folder / "library.so"


def expected(library: Path, *options: str) -> dict[str, int]:
    """Another reader's word: name -> address of the defined symbols."""
    listed = subprocess.run(["nm", "--defined-only", *options, library], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {row[2]: int(row[0], 16) for row in rows if len(row) == 3}


def test_symbols_agree_with_nm(library: Path) -> None:
    with open(library, "rb") as file:
        found = find_symbols(file.fileno(), ["*_function*", "shared_counter", "hidden*"])
    names = expected(library, "-D") | {"hidden_one": expected(library)["hidden_one"]}
    wanted = {n: a for n, a in names.items() if "_function" in n or n in ("shared_counter", "hidden_one")}
    assert {symbol.name: symbol.address for symbol in found} == wanted
    assert "absent_function" not in wanted
    raw = library.read_bytes()
    for symbol in found:
        assert symbol.file_offset is not None
        assert raw[symbol.file_offset : symbol.file_offset + 32] == symbol.head


def test_pattern_matches_the_whole_name(library: Path) -> None:
    with open(library, "rb") as file:
        assert [s.name for s in find_symbols(file.fileno(), ["first_function"])] == ["first_function"]
        assert find_symbols(file.fileno(), ["irst_function", "first_functio", "*_functions"]) == []
        assert [s.name for s in find_symbols(file.fileno(), ["se*d_f*n"])] == ["second_function"]


@pytest.mark.parametrize("bound", ["_MAX_COMPARED", "_MAX_MATCHES", "_MAX_STARTS"])
def test_a_search_is_bounded(library: Path, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(library, "rb") as file:
        assert len(find_symbols(file.fileno(), ["*_function*"])) == 4
        monkeypatch.setattr(symbols, bound, 3)
        with pytest.raises(UnsupportedTarget, match="too many symbols"):
            find_symbols(file.fileno(), ["*_function*"])


def test_a_class_is_exported_with_its_methods(tmp_path: Path) -> None:
    hidden = '__attribute__((visibility("hidden"), used))'
    methods = f"void shown(); {hidden} void kept(); "
    code = f"struct Both {{ {methods} }}; struct {hidden} Own {{ void kept(); }};"
    bodies = "void Both::shown() {} void Both::kept() {} void Own::kept() {}"
    source = tmp_path / "classes.cc"
    source.write_text(f"namespace a {{ {code} {bodies} }}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "classes.so", source], check=True)
    shown, kept, own = "_ZN1a4Both5shownE*", "_ZN1a4Both4keptE*", "_ZN1a3Own4keptE*"
    with (tmp_path / "classes.so").open("rb") as file:
        names = [[s.name for s in find_symbols(file.fileno(), p)] for p in ([kept], [shown, kept], [shown, own])]
    assert names == [["_ZN1a4Both4keptEv"], ["_ZN1a4Both5shownEv"], ["_ZN1a4Both5shownEv", "_ZN1a3Own4keptEv"]]


def test_single_symbols(library: Path) -> None:
    with open(library, "rb") as file:
        counter = read_symbol(file.fileno(), "shared_counter")
        assert counter is not None
        assert (counter.size, counter.head[:8]) == (8, (7).to_bytes(8, "little"))
        zeroed = read_symbol(file.fileno(), "zeroed")
        assert zeroed is not None
        assert zeroed.file_offset is None
        assert zeroed.head == b""
        assert read_symbol(file.fileno(), "no_such_symbol") is None


def test_build_id_and_load_address(library: Path) -> None:
    with open(library, "rb") as file:
        elf = Elf(file.fileno())
        assert elf.build_id() == bytes.fromhex("0123456789abcdef")
        assert elf.relocated
        assert elf.first_vaddr == 0
        assert elf.machine == {"x86_64": X86_64, "aarch64": AARCH64}[os.uname().machine]


def test_stripped_file_keeps_its_dynamic_symbols(library: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "stripped.so"
    subprocess.run(["strip", "-o", stripped, library], check=True)
    with open(stripped, "rb") as file:
        assert [s.name for s in find_symbols(file.fileno(), ["second*"])] == ["second_function"]
        assert read_symbol(file.fileno(), "hidden_one") is None


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_elf_is_unsupported(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with open(path, "rb") as file, pytest.raises(UnsupportedTarget):
        Elf(file.fileno())


def test_damaged_files_give_an_answer_or_unsupported(library: Path, tmp_path: Path) -> None:
    """Bytes of the headers and of all tables are changed at random, and files are cut short."""
    original = library.read_bytes()
    chance = random.Random(23)
    path = tmp_path / "damaged"
    for _ in range(700):
        raw = bytearray(original)
        for _ in range(chance.choice([1, 3, 50])):
            low, high = chance.choice([(0, 64), (64, 1000), (0, len(raw)), (len(raw) - 3000, len(raw))])
            raw[chance.randrange(low, high)] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
        path.write_bytes(raw[: chance.choice([len(raw), len(raw), chance.randrange(len(raw))])])
        with open(path, "rb") as file:
            try:
                elf = Elf(file.fileno())
                elf.build_id()
                matching_symbols(elf, ["*function*", "hidden*"])
                read_symbol(file.fileno(), "shared_counter")
            except UnsupportedTarget:
                continue


@pytest.mark.parametrize(
    ("code", "offset", "cost"),
    [
        ("41574156", 0, "cheap"),  # push %r15
        ("554889e5", 0, "cheap"),  # push %rbp
        ("f30f1efa554889e5", 4, "cheap"),  # endbr64; push
        ("48b8080706050403020155", 10, "cheap"),  # movabs $, %rax; push
        ("4989fd4157", 3, "cheap"),  # mov %rdi, %r13; push
        ("4885ff0f84bf000000", 3, "cheap"),  # test %rdi, %rdi; je
        ("488d05985dffff55", 7, "cheap"),  # lea (%rip), %rax; push
        ("90c3", 0, "cheap"),  # nop
        ("b80a00000055c3", 5, "cheap"),  # mov $, %eax; push
        ("bf0a00000055c3", 0, "dear"),  # mov $, %edi: an argument
        ("41b80a00000055", 0, "dear"),  # mov $, %r8d: an argument
        ("4889f755c3", 0, "dear"),  # mov %rsi, %rdi
        ("488b3f55c3", 0, "dear"),  # mov (%rdi), %rdi
        ("48897c240855", 0, "dear"),  # mov %rdi, 8(%rsp): may be an argument on the stack
        ("4883ec0855", 0, "dear"),  # sub $8, %rsp
        ("4889e555", 3, "cheap"),  # mov %rsp, %rbp
        ("83ff077752", 3, "cheap"),  # cmp $7, %edi; ja: ncclGetErrorString
        ("803d0102030400740e", 7, "cheap"),  # cmpb $0, (%rip); je
        ("f6470801750a", 4, "cheap"),  # testb $1, 8(%rdi); jne
        ("f7c70000010074", 6, "cheap"),  # test $0x10000, %edi; je
        ("83e0fc55", 3, "cheap"),  # and $-4, %eax
        ("0fb6054402010055", 7, "cheap"),  # movzbl (%rip), %eax; push
        ("480f44c255", 4, "cheap"),  # cmove %rdx, %rax
        ("0f1f440000e800", 5, "cheap"),  # nop; call
        ("48c7c00100000055", 7, "cheap"),  # mov $1, %rax
        ("83e7fc55", 0, "dear"),  # and $-4, %edi: an argument
        ("80e5fd55", 0, "dear"),  # and $0xfd, %ch: in an argument
        ("c70424000000007455", 0, "dear"),  # movl $0, (%rsp): to memory
        ("0fb6f855", 0, "dear"),  # movzbl %al, %edi: an argument
        ("f7d055", 0, "dear"),  # not %eax: not known
        ("488d0579379f18c355", 0, "dear"),  # lea; ret: ncclGetLastError
        ("c3", 0, "dear"),
        ("", 0, "dear"),
    ],
)
def test_probe_point_of_prologues(code: str, offset: int, cost: str) -> None:
    chosen = probe_point(bytes.fromhex(code), X86_64)
    assert (chosen.offset, chosen.cost) == (offset, cost)
    assert chosen.why


def test_probe_point_stays_inside_the_function() -> None:
    assert probe_point(bytes.fromhex("4889f8c355"), X86_64, size=4).offset == 0
    assert probe_point(bytes.fromhex("4889f855"), X86_64, size=3).offset == 0


def test_probe_point_of_other_machines_is_the_entry() -> None:
    assert probe_point(bytes.fromhex("fd7bbfa9"), AARCH64)[:2] == (0, "dear")


def test_any_bytes_give_a_probe_point_inside() -> None:
    chance = random.Random(7)
    for _ in range(5000):
        head = chance.randbytes(chance.randrange(33))
        assert 0 <= probe_point(head, X86_64).offset < max(len(head), 1)
