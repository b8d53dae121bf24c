"""Finding a runtime in memory alone: where it is, where it only seems to be, and in memory that may hold anything."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from python_stack_image import BASE, Image, debug_offsets

from probing.api.errors import NotPython, ProbingError, UnsupportedTarget
from probing.daemon.processes.loaded_file import Loaded
from probing.daemon.processes.memory import FakeMemory
from probing.daemon.processes.procfs import Mapping
from probing.daemon.python_stack.walk.layouts import TABLE, Layout, layout_of
from probing.daemon.python_stack.walk.search import find_runtime

LOADED = 0x5555_5555_0000
DATA = 0x3000
NAMES = (b"", b"_PyRuntime", b"Py_Version")
HEXVERSION = 0x030D00F0


def mapping(path: bytes = b"/opt/python3.13") -> Mapping:
    return Mapping(LOADED, LOADED + 0x1000, "r--p", 0, (8, 1), 42, path)


def gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFF_FFFF
    return value


def elf(*, exported: dict[bytes, int], data: bytes, relocated: bool = True) -> bytearray:
    """A position-independent file as it is loaded: headers, PT_DYNAMIC with DT_GNU_HASH of one bucket, data at DATA."""
    made = bytearray(DATA + len(data))
    kind, first = (3, 0) if relocated else (2, LOADED)
    made[:64] = struct.pack("<4sBB10xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, kind, 62, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    loads = [(1, 4, 0, first, DATA), (1, 6, DATA, first + DATA, len(data)), (2, 6, 0x800, first + 0x800, 0x40)]
    for i, (kind, flags, offset, at, size) in enumerate(loads):
        made[64 + 56 * i : 120 + 56 * i] = struct.pack("<IIQQQQQQ", kind, flags, offset, at, at, size, size, 4096)
    strings, symbols, hashes = 0x900, 0xA00, 0xB00
    tags = [(5, strings), (6, symbols), (0x6FFFFEF5, hashes), (0, 0)]
    for i, (tag, value) in enumerate(tags):
        struct.pack_into("<QQ", made, 0x800 + 16 * i, tag, value + (LOADED if tag else 0))
    struct.pack_into("<4I", made, hashes, 1, 1, 1, 0)
    struct.pack_into("<I", made, hashes + 24, 1 if exported else 0)
    text = 1
    for i, (name, value) in enumerate(exported.items()):
        made[strings + text : strings + text + len(name)] = name
        last = i == len(exported) - 1
        struct.pack_into("<IBBHQQ", made, symbols + 24 * (i + 1), text, 0x11, 0, 5, value, 8)
        struct.pack_into("<I", made, hashes + 28 + 4 * i, gnu_hash(name) & ~1 | last)
        text += len(name) + 1
    made[DATA:] = data
    return made


def image_of(layout: Layout) -> Image:
    image = Image(layout)
    image.thread(0, 1)
    return image


def memory_of(file: bytearray, image: Image | None = None) -> FakeMemory:
    segments = {LOADED: bytes(file)}
    if image is not None:
        segments[BASE] = bytes(image.data)
    return FakeMemory(segments, max_calls=1000)


def test_by_the_symbols_as_they_are_loaded() -> None:
    data = bytearray(64)
    struct.pack_into("<I", data, 32, HEXVERSION)
    exported = {b"_PyRuntime": DATA + 16, b"Py_Version": DATA + 32, b"Py_NewRef": DATA}
    found = find_runtime(memory_of(elf(exported=exported, data=bytes(data))).read_many, [mapping()])
    assert (found.runtime, found.version_at, found.python) == (LOADED + DATA + 16, LOADED + DATA + 32, "3.13.0")


def test_a_file_that_is_not_relocated() -> None:
    data = struct.pack("<II", HEXVERSION, 0)
    exported = {b"_PyRuntime": LOADED + DATA, b"Py_Version": LOADED + DATA}
    file = elf(exported=exported, data=data, relocated=False)
    loaded = Loaded.at(memory_of(file).read_many, LOADED)
    assert (loaded.bias, loaded.relocated, loaded.first_address) == (0, False, LOADED)
    assert find_runtime(memory_of(file).read_many, [mapping()]).runtime == LOADED + DATA


@pytest.mark.parametrize("minor", [13, 14, 15])
@pytest.mark.parametrize("decoy", [b"", b"xdebugpy" + bytes(1100)])
def test_by_the_cookie(minor: int, decoy: bytes) -> None:
    offsets = debug_offsets(minor)
    layout = layout_of((3, minor), offsets)
    image = image_of(layout)
    data = bytearray(1024) + decoy
    at = len(data)
    data += offsets + bytes(2048)
    struct.pack_into("<Q", data, at + layout.interpreters_head, image.interpreter)
    found = find_runtime(memory_of(elf(exported={}, data=bytes(data)), image).read_many, [mapping(b"/opt/trainer")])
    assert (found.runtime, found.version, found.version_at) == (LOADED + DATA + at, (3, minor), 0)
    # Offsets that lead to no interpreter are those of no running CPython; the decoy would be one of version 0.0.
    with pytest.raises(UnsupportedTarget if decoy else NotPython):
        find_runtime(memory_of(elf(exported={}, data=bytes(data))).read_many, [mapping(b"/opt/trainer")])


def sys_module(image: Image, version: tuple[int, int], hexversion: int) -> None:
    """Give the image's interpreter a ``sys.__dict__`` of one entry."""
    at = {(3, 8): 72, (3, 9): 872, (3, 10): 872, (3, 11): 904, (3, 12): 352}[version]
    name, number, keys, table = image.text("hexversion"), image.room(32), image.room(128), image.room(64)
    image.word(image.interpreter + at, table)
    image.word(table + 32, keys)
    image.put(number + 16, struct.pack("<qI", 8 if version == (3, 12) else 1, hexversion))
    if version < (3, 11):
        image.put(keys, struct.pack("<qq16xq8sqQQ", 1, 8, 1, bytes(8), 0, name, number))
    else:
        image.put(keys, struct.pack("<qBBB13xq8sQQ", 1, 3, 3, 1, 1, bytes(8), name, number))


@pytest.mark.parametrize("version", TABLE)
def test_by_the_shape(version: tuple[int, int]) -> None:
    layout = TABLE[version]
    image = Image(layout)
    image.interpreter = image.room(2048)
    image._last_thread = image.interpreter + layout.interp_threads - layout.thread_next
    image.thread(0, 1)
    hexversion = 3 << 24 | version[1] << 16 | 0x0AF0
    sys_module(image, version, hexversion)
    data = bytearray(4096)
    runtime = 1024
    # Pairs that lead nowhere, or to what has threads that are none; and the one.
    struct.pack_into("<QQ", data, 512, BASE + 64, BASE + 64)
    other, thread = image.room(512), image.room(512)
    image.word(other + layout.interp_threads, thread)
    image.word(thread + layout.thread_interp, other)
    struct.pack_into("<40Q", data, 0, *[other] * 40)
    struct.pack_into("<QQ", data, runtime + layout.interpreters_head, image.interpreter, image.interpreter)
    file = elf(exported={}, data=bytes(data))
    # ``sys_hexversion`` starts from the runtime in the file's own data.
    found = find_runtime(memory_of(file, image).read_many, [mapping()])
    assert (found.runtime, found.version, found.hexversion) == (LOADED + DATA + runtime, version, hexversion)
    with pytest.raises(NotPython):
        find_runtime(memory_of(file, image).read_many, [mapping(b"/opt/trainer")])


def test_what_shows_nothing() -> None:
    for file in (bytearray(4096), bytearray(b"\x7fELF\x02\x01") + bytes(4096)):
        with pytest.raises(NotPython):
            find_runtime(memory_of(file).read_many, [mapping()])
    with pytest.raises(UnsupportedTarget, match="neither its symbols nor"):
        find_runtime(memory_of(elf(exported={}, data=bytes(4096))).read_many, [mapping()])
    with pytest.raises(NotPython):
        find_runtime(memory_of(bytearray(4096)).read_many, [])


def test_a_free_threaded_build_is_named_as_the_reason() -> None:
    data = debug_offsets(14, free_threaded=1)
    with pytest.raises(UnsupportedTarget, match="free-threaded"):
        find_runtime(memory_of(elf(exported={}, data=data)).read_many, [mapping()])


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_any_file_in_memory(data: st.DataObject) -> None:
    file = elf(exported={b"_PyRuntime": DATA, b"Py_Version": DATA + 8}, data=debug_offsets(13) * 2)
    for _ in range(data.draw(st.integers(1, 20))):
        at = data.draw(st.one_of(st.integers(0, 0xC00), st.integers(0, len(file) - 8)))
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        value = data.draw(st.one_of(st.integers(0, 255), st.integers(0, 2 ** (8 * width) - 1), st.just(LOADED)))
        file[at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
    memory = memory_of(file)
    try:
        found = find_runtime(memory.read_many, [mapping()])
    except ProbingError:
        pass
    else:
        assert found.version[0] == found.hexversion >> 24 & 0xFF
    assert memory.calls < 200
    assert memory.bytes_read < 16 << 20


@settings(max_examples=examples(50), deadline=None)
@given(noise=st.binary(min_size=1, max_size=256), path=st.sampled_from([b"/x/python3.9", b"/x/trainer"]))
def test_noise_as_data(noise: bytes, path: bytes) -> None:
    data = (noise * (8192 // len(noise) + 1))[:8192]
    memory = FakeMemory({LOADED: bytes(elf(exported={}, data=data)), 1 << 30: data}, max_calls=1000)
    with pytest.raises((NotPython, UnsupportedTarget)):
        find_runtime(memory.read_many, [mapping(path)])
    assert memory.bytes_read < 16 << 20
