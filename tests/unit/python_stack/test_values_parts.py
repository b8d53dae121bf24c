"""Names as they are asked for, what is hidden, layouts that interpreters declare, and messages that overflow."""

from __future__ import annotations

import json
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import CorruptTarget, UnsupportedTarget, UsageError
from probing.daemon.ipc import MAX_HEADER
from probing.daemon.processes.memory import FakeMemory
from probing.daemon.processes.redaction import names_secret
from probing.daemon.python_stack.values.heap import Heap
from probing.daemon.python_stack.values.layout import object_layout
from probing.daemon.python_stack.values.names import Name, parse_name, parse_names
from probing.daemon.python_stack.values.render import looks_secret
from probing.daemon.python_stack.walk.layouts import TABLE
from probing.daemon.stack_wire import CUT, pack, unpack


@pytest.mark.parametrize(
    ("text", "first", "parts"),
    [
        ("loss", "loss", ()),
        ("trainer.state.step", "trainer", ("state", "step")),
        ("layers.0.weight", "layers", (0, "weight")),
        ("sizes[-1]", "sizes", (-1,)),
        ('config["lr.base"].x', "config", ("lr.base", "x")),
        ("config['']", "config", ("",)),
        ("größe", "größe", ()),
    ],
)
def test_names(text: str, first: str, parts: tuple[str | int, ...]) -> None:
    assert parse_name(text) == Name(text, first, parts)


def test_names_of_modules() -> None:
    assert parse_name("module:torch.backends") == Name("module:torch.backends", "torch", ("backends",), True)


@pytest.mark.parametrize(
    "text",
    ["", " x", "x ", "1", "x.", "x..y", "x[", "x[y]", "f()", "x[1.5]", "a b", "module:", "x" * 257, "x" + ".y" * 17],
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_name(text)
    assert caught.value.hint


@given(st.text(max_size=300))
def test_any_text_is_a_name_or_refused(text: str) -> None:
    refused = None
    try:
        assert parse_name(text).text == text
    except UsageError as e:
        refused = e
    assert refused is None or refused.hint


@pytest.mark.parametrize("names", [None, "loss", [], ["x"] * 65, {}])
def test_a_list_of_names_is_wanted(names: Any) -> None:
    with pytest.raises(UsageError):
        parse_names(names)


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "passwd",
        "api_key",
        "apikey",
        "API_KEY",
        "hf_token",
        "secret",
        "credentials",
        "private_key",
        "auth",
        "dbPassword",
        "_token",
        "aws_secret_access_key",
        "access_token",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "tokenizer", "num_tokens", "step", "loss", "author", "keys", "monkey", "passes", "", "key", "="],
)
def test_names_of_no_secrets(name: str) -> None:
    assert not names_secret(name)


def test_texts_that_are_secrets() -> None:
    assert looks_secret("hf_" + "a" * 20)
    assert looks_secret("run with ghp_" + "b" * 20)
    assert looks_secret("https://me:word@example.org")
    assert looks_secret("-----BEGIN RSA PRIVATE KEY-----\nabc")
    assert not looks_secret("a sentence about tokens: 5 of them\n")
    assert not looks_secret("")


@given(st.text(max_size=600))
def test_any_text_can_be_asked(text: str) -> None:
    assert looks_secret(text) in (True, False)
    assert names_secret(text) in (True, False)


def declared(minor: int, **changed: int) -> bytes:
    """The words of _Py_DebugOffsets that the layout of objects is made of, as CPython 3.13.0 and 3.14.10 have them."""
    words = {
        13: {48: 225000, 88: 7656, 224: 88, 256: 72, 272: 216, 328: 96, 336: 104, 400: 32, 408: 24, 448: 48,
             456: 32, 464: 40},
        14: {48: 225864, 96: 7688, 248: 88, 280: 80, 312: 216, 368: 96, 376: 104, 448: 40, 456: 32, 528: 48,
             536: 32, 544: 40},
    }[minor]  # fmt: skip
    data = bytearray(1024)
    for at, value in {**words, **{int(k[1:]): v for k, v in changed.items()}}.items():
        struct.pack_into("<Q", data, at, value)
    return bytes(data)


def base(minor: int) -> Any:
    return TABLE[3, 12]._replace(version=(3, minor))


def test_declared_layouts() -> None:
    found = object_layout(base(14), declared(14))
    assert (found.tuple_items, found.frame_slots, found.interp_modules, found.managed) == (32, 80, 7688, "inline")
    assert object_layout(base(13), declared(13)).tuple_items == 24


@pytest.mark.parametrize("changed", [{"w256": 0}, {"w328": 1 << 40}, {"w408": 25}, {"w464": 4096}, {"w88": 1 << 30}])
def test_declared_layouts_that_make_no_sense(changed: dict[str, int]) -> None:
    with pytest.raises(CorruptTarget):
        object_layout(base(13), declared(13, **changed))


def test_a_version_that_is_not_known() -> None:
    with pytest.raises(UnsupportedTarget):
        object_layout(base(99), declared(13))
    with pytest.raises(CorruptTarget):
        object_layout(base(13), declared(13)[:300])


def dumped(threads: int, frames: int, size: int) -> dict[str, Any]:
    row = {"name": "n\U0001f40d", "type": "str", "value": "\U0001f40d" * size, "number": float("nan"), "reason": ""}
    frame = {"func": "f", "file": "g", "lineno": 1, "frame_type": "Python", "ip": 1, "entry": True, "locals": [row] * 8}
    thread = {"tid": 1, "thread": "t", "state": "running", "gil": None, "complete": True, "frames": [frame] * frames}
    return {"threads": [thread] * threads, "reads": 1, "bytes": 1, "duration_ns": 1}


def test_locals_come_back_as_they_were() -> None:
    once = json.dumps(dumped(2, 3, 10))
    assert json.dumps(unpack(json.loads(json.dumps(pack(json.loads(once)))))) == once


def test_locals_of_outer_frames_are_cut_first() -> None:
    packed = pack(dumped(40, 30, 1000))
    text = json.dumps(packed)
    assert len(text) < MAX_HEADER
    threads = unpack(json.loads(text))["threads"]
    assert all(t["complete"] and len(t["frames"]) == 30 for t in threads)
    told = [[len(f["locals"]) for f in t["frames"] if "locals" in f] for t in threads]
    assert told[0][0] == 8
    assert sum(map(len, told)) < 30 * 40
    cut = [v for t in threads for f in t["frames"] for v in f.get("locals", []) if v["reason"] == CUT]
    assert [v["value"] for v in cut] == [None]


@pytest.mark.parametrize(
    ("count", "held"),
    [
        (2, True),
        (0xFFFF_FFFF, True),
        (0x0004_0000_C000_0000, True),
        (1 << 63, True),
        (0, False),
        (0x7F3A_1234_5670, False),
    ],
)
def test_a_freed_object_does_not_hold(count: int, held: bool) -> None:
    # A freed object keeps its other bytes for a while: in place of its count is a pointer, or NULL.
    memory = FakeMemory({0x10000: struct.pack("<QQ4080x", 1, 0x4000)})
    heap = Heap(memory, time.monotonic() + 60)
    heap.read(0x10000, 16, counted=True)
    memory.segments[0x10000] = struct.pack("<QQ4080x", count, 0x4000)
    assert heap.held() is held
