"""Probes the operators of torch that almost only optimizers call.

Every call of an operator, from Python or C++, goes through ``at::_ops::NAME::call`` (torchgen's Operators.h). The
probes see fused optimizers; Adam, AdamW and the like over lists of tensors (the default for CUDA parameters); SGD over
lists. They do not see loops over parameters (a hit for each parameter could slow the job down), optimizers with their
own kernels (apex, Transformer Engine, DeepSpeed), and compiled optimizers.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import NamedTuple

from probing.api.errors import UnsupportedTarget
from probing.daemon.bpf.probe_points import point_of
from probing.daemon.bpf.session import Link, Session
from probing.daemon.elf.symbols import Symbol, SymbolFinder
from probing.daemon.nccl_uprobes.steps.optimizer_steps import FOREACH, FUSED, LIST_ADD

__all__ = ("OBJECTS", "RING", "OptimizerSource")

OBJECTS = ("optimizer",)
RING = "optimizer_steps"
_PROGRAM = "optimizer_list"
_CALL = "_ZN2at4_ops{}4callE*"


class _Operators(NamedTuple):
    """Operators of one kind (``slot``). ``names``: as in mangled names, with the length before the name."""

    slot: int
    name: str
    names: tuple[str, ...]

    @property
    def patterns(self) -> list[str]:
        return [_CALL.format(name) for name in self.names]


_OPERATORS = (
    _Operators(
        FUSED,
        "fused optimizers",
        (
            "12_fused_adam_",
            "22_fused_adam__tensor_lr",
            "13_fused_adamw_",
            "23_fused_adamw__tensor_lr",
            "11_fused_sgd_",
            "21_fused_sgd__tensor_lr",
            "15_fused_adagrad_",
            "25_fused_adagrad__tensor_lr",
        ),
    ),
    _Operators(
        FOREACH,
        "_foreach_addcdiv_",
        ("24_foreach_addcdiv__Scalar", "28_foreach_addcdiv__ScalarList", "24_foreach_addcdiv__Tensor"),
    ),
    _Operators(LIST_ADD, "_foreach_add_ of lists", ("18_foreach_add__List",)),
)


class OptimizerSource:
    """The ``ProbedLibrary`` of optimizers. ``symbols`` finds symbols by pattern in the file at a descriptor."""

    name = "optimizer"
    table = "train.steps"
    files = (b"libtorch_cpu.so",)
    awaited = False

    def __init__(self, session: Session, symbols: SymbolFinder) -> None:
        self._session = session
        self._symbols = symbols
        self._attached: dict[tuple[int, int], Link] = {}
        self._attaching = threading.Lock()

    @property
    def slots(self) -> dict[int, str]:
        """Returns slot -> the operators whose calls the slot counts."""
        return {operators.slot: operators.name for operators in _OPERATORS}

    def interesting(self, path: bytes) -> bool:
        """Returns whether a file that a process maps can be libtorch_cpu, by its path."""
        return path.rpartition(b"/")[2].startswith(self.files)

    def attach(self, fd: int, path: bytes) -> int:
        """Attaches the probes to the library with descriptor ``fd``, for every process that maps it; the caller keeps
        ``fd``.

        Returns the number of new links: 0 if the file has a link already, perhaps from an earlier daemon. Raises
        UnsupportedTarget for a library without these operators, AttachError, PrivilegeError.
        """
        if not self.interesting(path):
            return 0
        identity = self._session.identity(fd)
        with self._attaching:
            if identity in self._attached:
                return 0
            link = self._attached[identity] = self._place(fd)
        return int(not link.adopted)

    def forget(self, identity: tuple[int, int]) -> None:
        """Drops a file whose probe the session has ended."""
        with self._attaching:
            self._attached.pop(identity, None)

    def _place(self, fd: int) -> Link:
        symbols = self._symbols(fd, [pattern for operators in _OPERATORS for pattern in operators.patterns])
        points = _points(symbols)
        if not points:
            hint = "steps come only from collectives or a watched variable; report the version of torch"
            raise UnsupportedTarget("this libtorch_cpu has no operator of an optimizer", hint=hint)
        return self._session.attach_uprobe(_PROGRAM, fd, list(points), list(points.values()), self.name)


def _points(symbols: Sequence[Symbol]) -> dict[int, int]:
    """Returns offset in the file -> slot; aliases of one address count once."""
    slots: dict[int, int] = {}
    for operators in _OPERATORS:
        patterns = [re.compile(".*".join(map(re.escape, p.split("*")))) for p in operators.patterns]
        for symbol in symbols:
            if symbol.file_offset is not None and any(pattern.fullmatch(symbol.name) for pattern in patterns):
                point = point_of(symbol)
                slots.setdefault(symbol.file_offset + point.offset, operators.slot)
    return slots
