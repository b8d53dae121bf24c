"""Reads torch's tensors and process groups from the memory of a process.

For a tensor, the module reads shape, dtype and device, and the number of a scalar in host memory. For a process group,
it reads rank, size and timeout.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from probing.api.errors import CorruptTarget
from probing.daemon.processes.identity import MAX_WORLD
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.walk.snapshot import word

__all__ = (
    "Tensor",
    "process_group_text",
    "read_tensor",
    "torch_text",
)

MAX_DIMENSIONS = 64
_FLOAT32_MAX = 3.4028234e38
_INLINE_DIMENSIONS = 5
_TENSOR_HEAD = 256
# Possible offsets of the at::Tensor in a THPVariable. Before torch 2.11 a c10::MaybeOwned, whose flag comes first,
# contains the tensor.
_IMPL = (16, 24)
# Possible pairs of the end of c10::intrusive_ptr_target and the offset of the sizes, the likeliest first.
_SHAPES = ((16, 56), (24, 72), (24, 64), (16, 64), (24, 56), (24, 80), (16, 72), (16, 48))
# The dtypes of c10/core/ScalarType.h, in order: torch's name, and the code with which ``struct`` unpacks an element.
_DTYPES: tuple[tuple[str, str], ...] = (
    ("uint8", "B"),
    ("int8", "b"),
    ("int16", "h"),
    ("int32", "i"),
    ("int64", "q"),
    ("float16", "e"),
    ("float32", "f"),
    ("float64", "d"),
    ("complex32", ""),
    ("complex64", ""),
    ("complex128", ""),
    ("bool", "?"),
    ("qint8", ""),
    ("quint8", ""),
    ("qint32", ""),
    ("bfloat16", "bf"),
    ("quint4x2", ""),
    ("quint2x4", ""),
    ("bits1x8", ""),
    ("bits2x4", ""),
    ("bits4x2", ""),
    ("bits8", ""),
    ("bits16", ""),
    ("float8_e5m2", ""),
    ("float8_e4m3fn", ""),
    ("float8_e5m2fnuz", ""),
    ("float8_e4m3fnuz", ""),
    ("uint16", "H"),
    ("uint32", "I"),
    ("uint64", "Q"),
)
# The devices of c10/core/DeviceType.h, in order.
_DEVICES = (
    "cpu",
    "cuda",
    "mkldnn",
    "opengl",
    "opencl",
    "ideep",
    "hip",
    "fpga",
    "maia",
    "xla",
    "vulkan",
    "metal",
    "xpu",
    "mps",
    "meta",
    "hpu",
    "ve",
    "lazy",
    "ipu",
    "mtia",
    "privateuseone",
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor. ``number``: the value of a tensor with one element. ``reason``: why a tensor with one element has no
    number.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    number: float | int | bool | None = None
    reason: str = ""

    def __str__(self) -> str:
        what = _shortest(self.number) if self.number is not None else f"shape={list(self.shape)}"
        if isinstance(self.number, float) and self.dtype == "float64":
            what = repr(self.number)
        return f"tensor({what}, dtype={self.dtype}, device={self.device})"


def read_tensor(objects: Objects, address: int) -> Tensor:
    """Returns the tensor whose Python object is at ``address``. Raises CorruptTarget if no tensor is recognised."""
    heap = objects.heap
    pointers = [word(heap.read(address, _IMPL[-1] + 8, counted=True), at) for at in _IMPL]
    for impl in pointers:
        if impl < 4096 or impl % 8:
            continue
        try:
            heap.load([(impl, _TENSOR_HEAD)])
            data = heap.peek(impl, _TENSOR_HEAD)
        except CorruptTarget:
            continue
        for head, at in _SHAPES:
            if found := _shaped(objects, impl, data, head, at):
                return found
    raise CorruptTarget("its tensor cannot be read: this version of torch is not known")


def torch_text(objects: Objects, address: int, name: str) -> str | None:
    """Returns the text of a torch.dtype or torch.device at ``address``; None for other types."""
    if name not in ("torch.dtype", "torch.device"):
        return None
    kind, index = struct.unpack("<bb", objects.heap.read(address + 16, 2))
    if name == "torch.dtype":
        return f"torch.{_DTYPES[kind][0]}" if 0 <= kind < len(_DTYPES) else None
    if not 0 <= kind < len(_DEVICES):
        return None
    return f"device(type='{_DEVICES[kind]}'{'' if index < 0 else f', index={index}'})"


def _shaped(objects: Objects, impl: int, data: bytes, head: int, at: int) -> Tensor | None:
    dimensions = word(data, at)
    # SizesAndStrides keeps five sizes and strides in itself. storage_offset, numel, dtype and device follow it.
    inline = at + 8 + 16 * _INLINE_DIMENSIONS
    offset, elements = struct.unpack_from("<qq", data, inline)
    dtype, kind, index, known = struct.unpack_from("<HbbB", data, inline + 16)
    if dimensions > MAX_DIMENSIONS or dtype >= len(_DTYPES) or not 0 <= kind < len(_DEVICES):
        return None
    if known != 1 or not -1 <= index < 64 or not 0 < word(data, 8) & 0x7FFF_FFFF < 1 << 30 or offset < 0:
        return None
    try:
        shape = _sizes(objects, data, at, dimensions)
    except CorruptTarget:
        return None
    if any(not 0 <= size < 1 << 48 for size in shape) or math.prod(shape) != elements:
        return None
    objects.heap.read(impl + at, _TENSOR_HEAD - 8 - at)
    device = _DEVICES[kind] if index < 0 else f"{_DEVICES[kind]}:{index}"
    tensor = Tensor(shape, _DTYPES[dtype][0], device)
    return _scalar(objects, tensor, word(data, head), head, offset) if elements == 1 else tensor


def _sizes(objects: Objects, data: bytes, at: int, dimensions: int) -> tuple[int, ...]:
    if not dimensions:
        return ()
    if dimensions <= _INLINE_DIMENSIONS:
        return struct.unpack_from(f"<{dimensions}q", data, at + 8)
    return struct.unpack(f"<{dimensions}q", objects.heap.read(word(data, at + 8), 8 * dimensions))


def _scalar(objects: Objects, tensor: Tensor, storage: int, head: int, offset: int) -> Tensor:
    code = dict(_DTYPES)[tensor.dtype]
    if not tensor.device.startswith("cpu"):
        where = "on a GPU" if tensor.device.startswith(("cuda", "hip")) else f"on the device {tensor.device}"
        reason = f"{where}: its value cannot be read from outside"
        return Tensor(tensor.shape, tensor.dtype, tensor.device, None, reason)
    if not code or not storage:
        reason = f"a scalar of {tensor.dtype} is not read" if storage else "it has no memory of its own"
        return Tensor(tensor.shape, tensor.dtype, tensor.device, None, reason)
    try:
        # StorageImpl begins with its DataPtr: the data, a context with its deleter, and the device (0: CPU).
        data, _, _, device = struct.unpack("<QQQb", objects.heap.read(storage + head, 25))
        size = 2 if code == "bf" else struct.calcsize(code)
        if device:
            raise CorruptTarget("the memory of the tensor is not on the device that the tensor names")
        number = _number(code, objects.heap.read(data + offset * size, size))
    except CorruptTarget as e:
        return Tensor(tensor.shape, tensor.dtype, tensor.device, None, e.message)
    return Tensor(tensor.shape, tensor.dtype, tensor.device, number)


def _number(code: str, raw: bytes) -> float | int | bool:
    if code == "bf":
        # A bfloat16 is the upper half of a float32.
        raw, code = b"\0\0" + raw, "f"
    if code == "?":
        return raw != b"\0"
    number: float | int = struct.unpack(f"<{code}", raw)[0]
    return number


def _shortest(number: float | int | bool) -> str:
    """Returns the shortest text of ``number`` that is the same float32."""
    if not isinstance(number, float) or not math.isfinite(number):
        return repr(number)
    exact = struct.pack("<f", number)
    for digits in range(1, 9):
        text = repr(float(f"{number:.{digits}g}"))
        # The largest float32 may be rounded up to a number that does not fit into a float32.
        if abs(float(text)) < _FLOAT32_MAX and struct.pack("<f", float(text)) == exact:
            return text
    return repr(number)


_HELD = 16
_GROUP_HEAD = 48
_STORES = (16, 24)
_LOWEST = 4096
# The bytes of a group, and of a backend, that are searched. A ProcessGroupNCCL is large.
_GROUP_BYTES, _BACKEND_BYTES = 512, 4096
_PIECE = 1024
_MOST_BACKENDS = 4
_OPTIONS_BYTES = 64
_BACKENDS = (b"gloo", b"nccl")
# 1.0, the default load factor of a std::unordered_map.
_LOAD_FACTOR = 0x3F800000
_LONGEST_MS = 10**11


class _TimeOut(NamedTuple):
    """The timeout of a backend. ``backend``: gloo or nccl."""

    backend: str
    ms: int


def process_group_text(objects: Objects, address: int) -> str:
    """Returns a text such as "ProcessGroup(rank=3, size=8, gloo, timeout=1800000 ms)" for the object at ``address``.
    Backend and timeout are left out if they are not recognised. Raises the errors of ``_rank_and_size``."""
    rank, size = _rank_and_size(objects, address)
    limit = _time_out(objects, address, rank, size)
    more = f", {limit.backend}, timeout={limit.ms} ms" if limit is not None else ""
    return f"ProcessGroup(rank={rank}, size={size}{more})"


def _rank_and_size(objects: Objects, address: int) -> tuple[int, int]:
    """Returns rank and size of the process group at ``address``. Raises CorruptTarget if no group is recognised."""
    heap = objects.heap
    group = word(heap.read(address, _HELD + 8, counted=True), _HELD)
    if group >= _LOWEST and group % 8 == 0:
        heap.load([(group, _GROUP_HEAD)])
        data = heap.read(group, _GROUP_HEAD)
        for at in _STORES:
            store = word(data, at)
            rank, size = struct.unpack_from("<ii", data, at + 8)
            if 0 <= rank < size <= MAX_WORLD and store % 8 == 0 and (store >= _LOWEST or not store):
                return rank, size
    raise CorruptTarget("its process group cannot be read: this version of torch is not known")


def _time_out(objects: Objects, address: int, rank: int, size: int) -> _TimeOut | None:
    """Returns the timeout of the process group at ``address``; None unless exactly one timeout is recognised."""
    heap = objects.heap
    (data,) = heap.sample([(word(heap.peek(address, _HELD + 8), _HELD), _GROUP_BYTES)])
    if data is None:
        return None
    nodes = heap.sample([(node, 24) for node in _first_nodes(data)])
    backends = list(dict.fromkeys(word(node, 16) for node in nodes if node is not None))
    limits = set()
    for backend in [at for at in backends if _may_point(at)][:_MOST_BACKENDS]:
        # The size of the backend is unknown, and the addresses after it may have no memory.
        pieces = heap.sample([(backend + at, _PIECE) for at in range(0, _BACKEND_BYTES, _PIECE)])
        body = b"".join(piece or b"" for piece in takewhile(lambda piece: piece is not None, pieces))
        if body and any(struct.unpack_from("<ii", body, at) == (rank, size) for at in _STORES):
            pointers = dict.fromkeys(at for (at,) in struct.iter_unpack("<Q", body) if _may_point(at))
            options = heap.sample([(at, _OPTIONS_BYTES) for at in pointers])
            limits |= {_limit(at, head) for at, head in zip(pointers, options, strict=True) if head is not None}
    limits.discard(None)
    return limits.pop() if len(limits) == 1 else None


def _first_nodes(group: bytes) -> Iterator[int]:
    """Yields the first node of each std::unordered_map that is not empty (_Hashtable of libstdc++'s hashtable.h)."""
    for at in range(_GROUP_HEAD, len(group) - 56, 8):
        _, buckets, first, count, factor = struct.unpack_from("<QQQQI", group, at)
        if factor == _LOAD_FACTOR and 0 < count <= buckets <= 1024 and _may_point(first):
            yield first


def _limit(at: int, head: bytes) -> _TimeOut | None:
    """Returns the timeout in the options at ``at``, or None. They hold milliseconds, and after them a short std::string
    with the backend's name.
    """
    for begin in _STORES:
        ms, text, length = struct.unpack_from("<qQQ", head, begin)
        name = head[begin + 24 : begin + 24 + 4]
        if text == at + begin + 24 and length == len(name) and name in _BACKENDS and 0 < ms <= _LONGEST_MS:
            return _TimeOut(name.decode(), ms)
    return None


def _may_point(address: int) -> bool:
    return _LOWEST <= address < 1 << 47 and address % 8 == 0
