"""Time-outs of process groups, read once from each process that waits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from probing.api.errors import TargetTimeout
from probing.daemon.diagnose.gather.processes import Key
from probing.daemon.diagnose.gather.readings import TimeOuts
from probing.diagnosis.facts import TimeOut

S = 10**9
WORLD = "ProcessGroup(rank=0, size=2, gloo, timeout=1800000 ms): '0'"
TENSOR = "ProcessGroup(rank=0, size=1, gloo, timeout=5000 ms): 'tp'"
NCCL = "ProcessGroup(rank=0, size=2, nccl, timeout=600000 ms): '{}'"


class Collector:
    """Answers a request for variables with ``text``; fails where that is None."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self.asked: list[list[int]] = []

    def variables(self, pids: Sequence[int], job: str, names: Sequence[str], timeout: float) -> Mapping[str, Any]:
        assert (job, len(names), timeout > 0) == ("j", 1, True)
        self.asked.append(list(pids))
        if self.text is None:
            raise TargetTimeout("it does not answer")
        return {"values": [{"pid": pid, "start_ns": 7, "value": self.text} for pid in pids], "failures": []}


def waits(comm: str = "0", backend: str = "gloo", pid: int = 100) -> dict[str, Any]:
    return {"pid": pid, "start_ns": 7, "comm": comm, "backend": backend}


def read(collector: Any, *rows: dict[str, Any], known: TimeOuts | None = None) -> dict[Key, tuple[TimeOut, ...]]:
    return (known or TimeOuts(collector)).of_job("j", rows, time.monotonic() + 5)


def texts(*groups: str) -> str:
    return f"{{{', '.join(groups)}}}"


@pytest.mark.parametrize(
    ("text", "row", "seconds"),
    [
        (texts(WORLD, TENSOR), waits("tp"), 5),
        (texts(WORLD, TENSOR), waits("0"), 1800),
        # It is not known which of the groups that is.
        (texts(WORLD, TENSOR), waits("0x1f"), None),
        (texts(NCCL.format(0), NCCL.format(1)), waits("0x1f", "nccl"), 600),
        (texts(NCCL.format(0), TENSOR), waits("0x1f", "nccl"), 600),
        # Groups that are not shown may have others.
        (texts(NCCL.format(0), "..."), waits("0x1f", "nccl"), None),
        (texts(NCCL.format(0), "ProcessGroup(rank=0, size=2): '1'"), waits("0x1f", "nccl"), None),
        (texts(NCCL.format(0))[:-1] + "...", waits("0x1f", "nccl"), None),
        (texts(NCCL.format(0)), waits("0", "gloo"), None),
        ("None", waits(), None),
        ("", waits(), None),
    ],
)
def test_the_time_out_of_the_group_in_which_a_rank_waits(text: str, row: dict[str, Any], seconds: int | None) -> None:
    found = read(Collector(text), row)
    assert found == {Key(100, 7): (TimeOut(row["comm"], seconds * S),) if seconds else ()}


def test_a_process_is_read_once_for_the_same_waits() -> None:
    collector = Collector(texts(WORLD))
    known = TimeOuts(collector)
    both = (waits(), waits(pid=101))
    assert read(None, *both, known=known) == read(None, *both, known=known)
    assert collector.asked == [[100, 101]]
    read(None, *both, waits("tp", pid=101), known=known)
    assert collector.asked[1:] == [[101]]


def test_what_could_not_be_read_is_tried_again() -> None:
    collector = Collector(None)
    known = TimeOuts(collector)
    assert read(None, waits(), known=known) == {}
    collector.text = texts(WORLD)
    assert read(None, waits(), known=known) == {Key(100, 7): (TimeOut("0", 1800 * S),)}
