"""A watched value is NaN or infinite, or a loss jumps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import median

from probing.api.text import ranks_of
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Rank, Series
from probing.diagnosis.verdict import ERROR, WARNING, Culprit, Finding, Verdict
from probing.diagnosis.words import clean, who

__all__ = ("BAD_VALUES", "VERDICTS", "find")

BAD_VALUES = Verdict(
    "bad_values",
    "numbers",
    "A loss is NaN, infinite, or jumps",
    "The last reading of a watched variable is NaN or infinite, and the variable was finite before or is a loss. Or the"
    " last three readings of a loss are ten times its median, and ten median deviations above it. Only ranks that had"
    " the bad value two seconds before the others are named: gradients carry it to all ranks.",
    "Readings of watched variables (`variables.watch`), by rank.",
    "0.9; 0.6 for a jump.",
    "The next readings are finite, and as before.",
    (
        "Go back to the last checkpoint before it, and skip the batches since.",
        "Look at the batch of the first rank, its learning rate, and its loss scale.",
    ),
    situations=("bad_numbers",),
)
VERDICTS: tuple[Verdict, ...] = (BAD_VALUES,)

_OURS = frozenset({"rss_bytes", "device_bytes"})
_LOSSES = frozenset({"loss", "train_loss"})
_HISTORY = 20
_LAST = 3
_TIMES = 10
# Variables are read once a second, one process after the other, so the times of the same event may differ by this much
# between ranks, ns.
_APART_NS = 2_000_000_000
_MAX_NAMES = 4


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each variable with bad values."""
    by_name: dict[str, list[tuple[Rank, Series]]] = {}
    for rank in case.facts.ranks:
        for series in rank.series:
            if series.name not in _OURS and series.values:
                by_name.setdefault(series.name, []).append((rank, series))
    bad = [one for name in sorted(by_name) if (one := _bad(case, name, by_name[name])) is not None]
    yield from bad[:_MAX_NAMES]


def _bad(case: Case, name: str, known: Sequence[tuple[Rank, Series]]) -> Finding | None:
    broken = [(rank, since, series) for rank, series in known if (since := _not_finite(series)) is not None]
    if broken:
        value = broken[0][2].values[-1]
        return _finding(case, name, broken, known, f"is {value:g}", ERROR)
    jumped = [(rank, since, series) for rank, series in known if (since := _jump(series)) is not None]
    if jumped:
        usual, now = median(jumped[0][2].values[:-_LAST]), jumped[0][2].values[-1]
        return _finding(case, name, jumped, known, f"jumps from {usual:.3g} to {now:.3g}", WARNING)
    return None


def _not_finite(series: Series) -> int | None:
    """Returns the time since which all values are NaN or infinite, UTC ns; None if the last value is finite, or if no
    value was finite and the variable is no loss.
    """
    if isfinite(series.values[-1]):
        return None
    first = len(series.values)
    while first and not isfinite(series.values[first - 1]):
        first -= 1
    # Variables such as best_loss start with infinity.
    return series.ts_ns[first] if first or _last_part(series.name) in _LOSSES else None


def _jump(series: Series) -> int | None:
    """Returns the time since which a training loss is far above its earlier values, UTC ns; None if it is not."""
    before, last = series.values[:-_LAST], series.values[-_LAST:]
    if "loss" not in _last_part(series.name) or len(before) < _HISTORY or not all(map(isfinite, series.values)):
        return None
    usual = median(before)
    deviation = median(abs(value - usual) for value in before)
    least = usual + max(_TIMES * deviation, (_TIMES - 1) * abs(usual))
    return series.ts_ns[-_LAST] if min(last) > least > usual else None


def _last_part(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _finding(
    case: Case,
    name: str,
    bad: Sequence[tuple[Rank, int, Series]],
    known: Sequence[tuple[Rank, Series]],
    what: str,
    severity: str,
) -> Finding:
    since = {rank.rank: case.time(rank.rank, ns) for rank, ns, _ in bad}
    start = min(since.values())
    first = [rank for rank, _, _ in bad if since[rank.rank] - start < _APART_NS]
    alone = len(first) < len(known)
    names = who([rank for rank, _, _ in bad])
    later = f", first on {ranks_of(r.rank for r in first)}" if alone and len(first) < len(bad) else ""
    watched = {rank.rank for rank, _ in known}
    unwatched = [rank.rank for rank in case.facts.ranks if rank.rank not in watched]
    variable = clean(name)
    return Finding(
        BAD_VALUES,
        severity,
        round((0.9 if severity == ERROR else 0.6) - (0.2 if unwatched else 0.0), 2),
        f"{variable} of {names} {what}{later}",
        culprits=tuple(Culprit(r.rank, r.node, r.pid, f"its {variable} {what}", "computing") for r in first if alone),
        victims=tuple(sorted(set(since) - {r.rank for r in first})),
        since_ns=start,
        about=name,
        evidence=tuple(f"rank {rank.rank}: {variable} was {_texts(series)}" for rank, _, series in bad[:8]),
        missing=(f"{variable} of {ranks_of(unwatched)}: not watched there",) if unwatched else (),
        refuted_by=(BAD_VALUES.refuted_by,),
        next_steps=BAD_VALUES.next_steps,
    )


def _texts(series: Series) -> str:
    return ", ".join(f"{value:.4g}" for value in series.values[-5:])
