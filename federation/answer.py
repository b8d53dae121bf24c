"""What nodes answer, and what is made of it. Imports no engine, so that asking one node costs none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from probing.federation.fanout import Gathered

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("Answer", "Reply")


@dataclass(frozen=True, slots=True)
class Reply:
    """What one node answers to one part. ``warnings`` say what the rows lack."""

    node: str
    table: pa.Table
    rows_scanned: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class Answer:
    """``table`` has the rows of all that answered, ``gathered`` says who did."""

    table: pa.Table
    gathered: Gathered[tuple[Reply, ...]]

    @property
    def warnings(self) -> list[str]:
        found = [f"{r.node}: {w}" for a in self.gathered.answered for r in a.value for w in r.warnings]
        return list(dict.fromkeys(found))
