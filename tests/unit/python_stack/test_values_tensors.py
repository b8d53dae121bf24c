"""Tensors of versions of torch that are not installed here, built as their sources lay them out."""

from __future__ import annotations

import struct
import time

import pytest

from probing.api.errors import CorruptTarget
from probing.daemon.processes.memory import FakeMemory
from probing.daemon.python_stack.values.heap import Heap
from probing.daemon.python_stack.values.layout import object_layout
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.values.torch_objects import Tensor, read_tensor
from probing.daemon.python_stack.walk.layouts import TABLE

AT = 0x10000
# Where the pointer is in the object, where the counts of a c10::intrusive_ptr_target end, and where the sizes are.
NEW, OLD = (16, 16, 56), (24, 24, 72)
INT64, FLOAT32, FLOAT64, BFLOAT16 = 4, 6, 7, 15


def built(
    layout: tuple[int, int, int],
    shape: tuple[int, ...],
    dtype: int,
    device: tuple[int, int],
    data: bytes,
    offset: int = 0,
) -> Objects:
    pointer, head, sizes = layout
    memory = bytearray(4096)
    struct.pack_into("<QQ", memory, 0, 1, 0)
    struct.pack_into("<Q", memory, pointer, AT + 256)
    struct.pack_into("<QQ", memory, 256, AT, 1)
    struct.pack_into("<Q", memory, 256 + head, AT + 1024)
    struct.pack_into("<Q", memory, 256 + sizes, len(shape))
    struct.pack_into(f"<{len(shape)}q", memory, 256 + sizes + 8, *shape)
    elements = 1
    for size in shape:
        elements *= size
    struct.pack_into("<qqHbbB", memory, 256 + sizes + 88, offset, elements, dtype, *device, 1)
    struct.pack_into("<QQ", memory, 1024, AT, 1)
    struct.pack_into("<QQQb", memory, 1024 + head, AT + 2048, 0, 0, device[0])
    memory[2048 : 2048 + len(data)] = data
    heap = Heap(FakeMemory({AT: bytes(memory)}), time.monotonic() + 60)
    return Objects(heap, object_layout(TABLE[3, 11], b""))


@pytest.mark.parametrize("layout", [NEW, OLD])
def test_shapes_and_scalars(layout: tuple[int, int, int]) -> None:
    scalar = read_tensor(built(layout, (), FLOAT32, (0, -1), struct.pack("<f", 0.693)), AT)
    assert str(scalar) == "tensor(0.693, dtype=float32, device=cpu)"
    third = read_tensor(built(layout, (1, 1), INT64, (0, -1), struct.pack("<3q", 1, 2, -3), 2), AT)
    assert (third.shape, third.number) == ((1, 1), -3)
    brain = read_tensor(built(layout, (), BFLOAT16, (0, -1), struct.pack("<f", -1.5)[2:]), AT)
    assert str(brain) == "tensor(-1.5, dtype=bfloat16, device=cpu)"
    long = read_tensor(built(layout, (), FLOAT64, (0, -1), struct.pack("<d", 0.1 + 0.2)), AT)
    assert str(long) == "tensor(0.30000000000000004, dtype=float64, device=cpu)"
    assert read_tensor(built(layout, (2, 3), INT64, (0, -1), b""), AT) == Tensor((2, 3), "int64", "cpu")


@pytest.mark.parametrize("layout", [NEW, OLD])
def test_what_is_on_a_gpu_is_not_read(layout: tuple[int, int, int]) -> None:
    whole = read_tensor(built(layout, (2, 3), BFLOAT16, (1, 0), b""), AT)
    assert str(whole) == "tensor(shape=[2, 3], dtype=bfloat16, device=cuda:0)"
    scalar = read_tensor(built(layout, (), FLOAT32, (1, 3), b"\1\2\3\4"), AT)
    assert (scalar.device, scalar.number) == ("cuda:3", None)
    assert scalar.reason == "on a GPU: its value cannot be read from outside"


@pytest.mark.parametrize(("dtype", "device"), [(99, (0, -1)), (INT64, (99, -1)), (INT64, (0, -2))])
def test_what_is_no_tensor(dtype: int, device: tuple[int, int]) -> None:
    with pytest.raises(CorruptTarget, match="this version of torch is not known"):
        read_tensor(built(NEW, (2,), dtype, device, b""), AT)


def test_infinite_and_large_numbers() -> None:
    largest = 3.4028234663852886e38
    for number, text in ((float("inf"), "inf"), (float("nan"), "nan"), (largest, repr(largest))):
        tensor = read_tensor(built(NEW, (), FLOAT32, (0, -1), struct.pack("<f", number)), AT)
        assert str(tensor) == f"tensor({text}, dtype=float32, device=cpu)"
