"""Code objects between reader and collector: the proof, what is kept, and answers that make no sense."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampler_records import code

from probing.api.errors import InternalError
from probing.daemon.bpf.build import FOLDER
from probing.daemon.ipc import Message
from probing.daemon.python_stack.sampling import codes as sampled_codes
from probing.daemon.python_stack.sampling.codes import KnownCodes, SampledCode, code_check, unpack_codes
from probing.daemon.python_stack.sampling.line_index import line_index

ADDRESS = st.integers(0, (1 << 64) - 1)


@pytest.fixture(scope="module")
def check_in_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """``code_check`` of the programs, compiled for this machine."""
    folder = tmp_path_factory.mktemp("check")
    text = (Path(FOLDER) / "python.bpf.h").read_text()
    function = re.search(r"static __always_inline (__u32 code_check\(.*?\n}\n)", text, re.DOTALL)
    assert function
    source = folder / "check.c"
    source.write_text("typedef unsigned int __u32;\ntypedef unsigned long long __u64;\n" + function[1])
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", folder / "check.so", source], check=True)
    found = ctypes.CDLL(str(folder / "check.so")).code_check
    found.restype = ctypes.c_uint32
    found.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
    return found


@given(ADDRESS, ADDRESS, ADDRESS, st.integers(0, (1 << 32) - 1), ADDRESS)
def test_the_proof_is_what_the_programs_make(
    check_in_c: Callable[..., int], a: int, b: int, c: int, line: int, name_hash: int
) -> None:
    assert code_check(a, b, c, line, name_hash) == check_in_c(a, b, c, line, name_hash)


def answer(codes: list[Any], tables: bytes = b"", files: tuple[str, ...] = ("a.py",)) -> Message:
    index = json.dumps({"files": files, "codes": codes}).encode()
    return Message({"index": len(index), "asked": len(codes)}, index + tables)


def test_processes_that_run_the_same_code_share_it() -> None:
    def one(address: int, line: int) -> SampledCode:
        found = unpack_codes(answer([[address, [1, 2, 3, line, 5], "f", 0, 2]], b"\x80\x00"), "locations", line_index)
        return next(iter(found.values()))

    first, again, other = one(16, 9), one(4096, 9), one(16, 10)
    assert first is again
    assert first != other


def test_an_answer_is_taken_apart() -> None:
    proofs = [1, 2, 3, 9, 5], [1, 2, 3, (1 << 32) - 2, 5]
    rows = [[16, proofs[0], "f", 0, 2], [32, proofs[1], "g", 1, -1]]
    found = unpack_codes(answer(rows, b"\x80\x00", ("a", "b")), "locations", line_index)
    assert list(found) == [(16, code_check(*proofs[0])), (32, code_check(*proofs[1]))]
    first, second = found.values()
    assert (first.func, first.file, first.line(0)) == ("f", "a", 9)
    assert (second.func, second.file, second.first_line, second.line(0)) == ("g", "b", -2, None)


@pytest.mark.parametrize(
    "bad",
    [
        Message({}),
        Message({"index": 3}, b"{}}"),
        Message({"index": 2}, b"[]"),
        Message({"index": 2}, b"{}"),
        answer([[16, [1, 2, 3], "f", 0, 2]]),
        answer([[16, [1, 2, 3, 4], "f", 5, 2]]),
        answer([[16, [1, 2, 3, 4], "f"]]),
        answer([16]),
    ],
)
def test_an_answer_that_makes_no_sense(bad: Message) -> None:
    with pytest.raises(InternalError):
        unpack_codes(bad, "locations", line_index)


def test_what_is_known_is_not_asked_for() -> None:
    codes = KnownCodes()
    check, found = code("f")
    keys = [(16, check), (32, check), (48, check)]
    codes.learn({keys[0]: found})
    codes.give_up([keys[1]], until=7.0)
    assert codes.missing(keys, 6.0) == [keys[2]]
    assert codes.missing(keys, 7.0) == keys[1:]
    codes.learn({keys[1]: found})
    assert codes.get(keys[1]) is found
    assert codes.missing(keys, 8.0) == [keys[2]]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_codes, "_MAX_KNOWN", 10)
    monkeypatch.setattr(sampled_codes, "_MAX_GIVEN_UP", 10)
    codes = KnownCodes()
    check, found = code("f")
    keys = [(n, check) for n in range(30)]
    for key in keys:
        codes.learn({key: found})
        codes.give_up([(key[0], check ^ 1)])
    assert [key for key in keys if codes.get(key)] == keys[20:]
    assert len(codes.missing([(key[0], check ^ 1) for key in keys], 0.0)) == 20
    monkeypatch.setattr(sampled_codes, "_MAX_KNOWN_BYTES", 1_000)
    codes.learn({(99, check): found})
    assert 0 < len([key for key in [*keys, (99, check)] if codes.get(key)]) < 4
