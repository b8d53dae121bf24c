"""Which functions of libcudart are probed, and how."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from probing.api.errors import UnsupportedTarget
from probing.daemon.gpu.cuda.symbols import COMPLETION, EVENT_SLOTS, LAUNCHES, MEMORY, Group, is_cudart, placed, slots

PUSH = bytes.fromhex("554889e5415641554154534881eca000")
GROUPS = (COMPLETION, MEMORY, LAUNCHES)


@dataclass
class Found:
    name: str
    address: int
    file_offset: int | None
    size: int = 100
    head: bytes = PUSH


def library(*left_out: str) -> list[Found]:
    names = [name for group in GROUPS for name in group.patterns if name not in left_out]
    return [Found(name, 0x1000 * n, 0x1000 * n - 0x100) for n, name in enumerate(names, 1)]


def test_every_slot_is_of_one_function() -> None:
    found = slots(GROUPS)
    assert len(found) == sum(len(group.functions) for group in GROUPS)
    assert set(found) <= set(range(128, 192))
    assert [found[slot] for slot in EVENT_SLOTS] == [
        "cuda_event_destroy cudaEventDestroy",
        "cuda_event_record cudaEventRecord",
        "cuda_event_record cudaEventRecordWithFlags",
    ]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_cookies_say_slot_kind_and_whose_stream_zero_is(group: Group) -> None:
    symbols = {symbol.file_offset: symbol.name for symbol in library()}
    functions = {
        function.name: (slot, function.kind) for slot, function in zip(group.slots, group.functions, strict=True)
    }
    for place in placed(group, library()):
        assert set(place.costs) == {"cheap"}
        for offset, cookie in zip(place.offsets, place.cookies, strict=True):
            name = symbols[offset]
            per_thread = name.endswith("_ptsz")
            assert (cookie & 0xFFFF, cookie >> 16 & 0xFF) == functions[name.removesuffix("_ptsz")]
            assert cookie >> 24 == per_thread


def test_what_tells_the_end_is_attached_before_what_begins() -> None:
    order = [(place.program, place.on_return) for place in placed(COMPLETION, library())]
    assert order[-1] == ("cuda_event_record", False)
    assert order.index(("cuda_returned", True)) < order.index(("cuda_stream_sync", False))
    assert order.index(("cuda_switched", True)) < order.index(("cuda_switch", False))


def test_an_alias_counts_once() -> None:
    names = (("cudaMalloc", 0x1000), ("cudaFree", 0x2000), ("cudaFreeHost", 0x2000))
    found = [Found(name, at, at) for name, at in names]
    offsets = {place.program: place.offsets for place in placed(MEMORY, found)}
    assert offsets == {"cuda_free": [0x2000], "cuda_allocated": [0x1000], "cuda_allocate": [0x1000]}


def test_a_library_without_what_is_needed_is_refused() -> None:
    with pytest.raises(UnsupportedTarget, match="cudaEventQuery"):
        placed(COMPLETION, library("cudaEventQuery"))
    outside = [Found(symbol.name, symbol.address, None) for symbol in library()]
    with pytest.raises(UnsupportedTarget, match="cudaMalloc"):
        placed(MEMORY, outside)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (b"/usr/local/cuda/lib64/libcudart.so.12", True),
        (b"/venv/torch.libs/libcudart-d0da41ae.so.11.0", True),
        (b"/usr/lib/libcudart.so", True),
        (b"/usr/lib/libcudart_static.a", False),
        (b"/usr/lib/libcuda.so.1", False),
        (b"/usr/libcudart.so/libother.so", False),
        (b"", False),
    ],
)
def test_libraries_are_recognized_by_name(path: bytes, wanted: bool) -> None:
    assert is_cudart(path) is wanted
