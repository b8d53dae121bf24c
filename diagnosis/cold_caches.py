"""Recognizes a cache, of compiled code or of file pages, that is cold on one rank and warm on its peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from statistics import median

from probing.api.text import size
from probing.diagnosis.activity.processor import is_compiling
from probing.diagnosis.facts import Condition, Rank, Sample
from probing.diagnosis.waits import Wait, main_thread

__all__ = ("ALONE", "WARM_UP", "busy_ranks", "cold_pages_text", "compiling_share")

WARM_UP = (
    "Let all ranks share the compiler's cache: TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR on one file system.",
    "Look for shapes that only this rank has: TORCH_LOGS=recompiles.",
)
"""What to do if only one rank compiles."""
ALONE = ", and no other rank does: its cache is cold, or its shapes are new"
"""A clause for a rank that compiles while all others wait. The others had the code in a cache, or did not need it."""
_TIMES = 4
# A rank that reads this many times more than its peers does different work.
_ALIKE = 3


def compiling_share(samples: Iterable[Sample]) -> float:
    """Returns the share of the window in which samples show a compiler, 0 to 1."""
    return sum(sample.share for sample in samples if any(is_compiling(frame) for frame in sample.frames))


def busy_ranks(ranks: Mapping[int, Rank], waits: Mapping[int, Wait]) -> list[int]:
    """Returns the first two ranks that compile or are not known to wait in an operation."""
    return list(islice((number for number, one in ranks.items() if not _only_waits(one, waits)), 2))


def _only_waits(rank: Rank, waits: Mapping[int, Wait]) -> bool:
    main = main_thread(rank)
    return rank.rank in waits and main is not None and not any(is_compiling(frame) for frame in main.frames)


def cold_pages_text(rank: Rank, peers: Sequence[Rank], least: int) -> str:
    """Returns a clause if ``rank`` reads from storage what its peers read from the page cache; else "".

    ``least``: the minimum rate of reads from storage, bytes per second.
    """
    mine, theirs = _reads(rank), [_reads(peer) for peer in peers if peer.condition is not None]
    if mine is None or not theirs or any(one is None for one in theirs):
        return ""
    stored, read = mine
    usual = median(one[0] for one in theirs if one is not None)
    usual_read = median(one[1] for one in theirs if one is not None)
    if stored < max(least, _TIMES * usual) or read > _ALIKE * usual_read or stored > 2 * read:
        return ""
    return (
        f"its page cache is cold: it reads {size(stored)} a second from storage; the others read as much, but only"
        f" {size(usual)} a second from storage"
    )


def _reads(rank: Rank) -> tuple[float, float] | None:
    """Returns the bytes a second that a rank with its data loader reads: from storage, and by all read calls."""
    own = [rank.condition, *(helper.condition for helper in rank.helpers if helper.role == "data_loader")]
    known = [rate for condition in own if condition is not None and (rate := _rates(condition)) is not None]
    return (sum(one[0] for one in known), sum(one[1] for one in known)) if known else None


def _rates(condition: Condition) -> tuple[float, float] | None:
    if not condition.interval_ns or condition.storage_read_bytes is None or condition.read_bytes is None:
        return None
    seconds = condition.interval_ns / 1e9
    return condition.storage_read_bytes / seconds, condition.read_bytes / seconds
