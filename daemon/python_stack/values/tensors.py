"""Reads torch tensors from outside: shape, dtype, device, and the number of a scalar in host memory.

A Tensor object points at its ``c10::TensorImpl`` (``c10/core/TensorImpl.h``), which wheels ship without debug
information. So its fields are found by what must hold: sizes whose product is the number of elements, beside a known
dtype and device. Measured with torch 2.13. In versions whose ``intrusive_ptr_target`` has a word for each of its two
counts, and a flag before the pointer, all lies one or two words further: the other candidates.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from probing.api.errors import CorruptTarget
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.walk.snapshot import word

__all__ = ("Tensor", "read_tensor", "torch_text")

MAX_DIMENSIONS = 64
_FLOAT32_MAX = 3.4028234e38
_INLINE_DIMENSIONS = 5
_HEAD = 256
# THPVariable holds an at::Tensor, before torch 2.11 in a c10::MaybeOwned, whose flag comes first.
_IMPL = (16, 24)
# Where c10::intrusive_ptr_target ends, and where the sizes then are, likeliest first.
_SHAPES = ((16, 56), (24, 72), (24, 64), (16, 64), (24, 56), (24, 80), (16, 72), (16, 48))
# c10/core/ScalarType.h, in order: the dtype as torch writes it, and how struct reads one element.
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
# c10/core/DeviceType.h, in order.
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
    """``number``: the value of a tensor with one element. ``reason``: why a tensor with one element has none."""

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
    """The tensor whose Python object is at ``address``. Raises CorruptTarget when no tensor is recognised there."""
    heap = objects.heap
    pointers = [word(heap.read(address, _IMPL[-1] + 8, counted=True), at) for at in _IMPL]
    for impl in pointers:
        if impl < 4096 or impl % 8:
            continue
        try:
            heap.load([(impl, _HEAD)])
            data = heap.peek(impl, _HEAD)
        except CorruptTarget:
            continue
        for head, at in _SHAPES:
            if found := _shaped(objects, impl, data, head, at):
                return found
    raise CorruptTarget("its tensor cannot be made out: a version of torch that is not known")


def torch_text(objects: Objects, address: int, name: str) -> str | None:
    """The text of a torch.dtype or torch.device at ``address``; None for other types."""
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
    # SizesAndStrides keeps five of each in place, then come storage_offset, numel, the dtype and the device.
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
    objects.heap.read(impl + at, _HEAD - 8 - at)
    device = _DEVICES[kind] if index < 0 else f"{_DEVICES[kind]}:{index}"
    found = Tensor(shape, _DTYPES[dtype][0], device)
    return _scalar(objects, found, word(data, head), head, offset) if elements == 1 else found


def _sizes(objects: Objects, data: bytes, at: int, dimensions: int) -> tuple[int, ...]:
    if not dimensions:
        return ()
    if dimensions <= _INLINE_DIMENSIONS:
        return struct.unpack_from(f"<{dimensions}q", data, at + 8)
    return struct.unpack(f"<{dimensions}q", objects.heap.read(word(data, at + 8), 8 * dimensions))


def _scalar(objects: Objects, found: Tensor, storage: int, head: int, offset: int) -> Tensor:
    code = dict(_DTYPES)[found.dtype]
    if not found.device.startswith("cpu"):
        where = "on a GPU" if found.device.startswith(("cuda", "hip")) else f"on the device {found.device}"
        reason = f"{where}: its value cannot be read from outside"
        return Tensor(found.shape, found.dtype, found.device, None, reason)
    if not code or not storage:
        reason = f"a scalar of {found.dtype} is not read" if storage else "it has no memory of its own"
        return Tensor(found.shape, found.dtype, found.device, None, reason)
    try:
        # StorageImpl begins with its DataPtr: the data, a context with its deleter, and the device (0: CPU).
        data, _, _, device = struct.unpack("<QQQb", objects.heap.read(storage + head, 25))
        size = 2 if code == "bf" else struct.calcsize(code)
        if device:
            raise CorruptTarget("its memory is not where the tensor is")
        number = _number(code, objects.heap.read(data + offset * size, size))
    except CorruptTarget as e:
        return Tensor(found.shape, found.dtype, found.device, None, e.message)
    return Tensor(found.shape, found.dtype, found.device, number)


def _number(code: str, raw: bytes) -> float | int | bool:
    if code == "bf":
        # The upper half of a float32.
        raw, code = b"\0\0" + raw, "f"
    if code == "?":
        return raw != b"\0"
    number: float | int = struct.unpack(f"<{code}", raw)[0]
    return number


def _shortest(number: float | int | bool) -> str:
    """The shortest text that is the same float32."""
    if not isinstance(number, float) or not math.isfinite(number):
        return repr(number)
    wanted = struct.pack("<f", number)
    for digits in range(1, 9):
        text = repr(float(f"{number:.{digits}g}"))
        # Rounded up, the largest would not fit any more.
        if abs(float(text)) < _FLOAT32_MAX and struct.pack("<f", float(text)) == wanted:
            return text
    return repr(number)
