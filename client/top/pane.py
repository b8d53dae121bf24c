"""Draws one rank in a few lines: CPU, memory and GPUs with their history, and what the rank does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from rich.cells import cell_len

from probing.api.text import escape
from probing.client.render.rows import Row
from probing.client.top.figures import Line, Span, brief_age, brief_size, fitted, number, spark

__all__ = ("cut", "filled", "pane")

_SPARK = 10


def pane(row: Row, width: int, gpus: int) -> list[Line]:
    """Returns the lines about a rank, each ``width`` cells wide: its names, its CPU, at most ``gpus`` GPUs, and its
    wait.
    """
    lines = [_who(row), _host(row, width)]
    devices = row["gpus"][:gpus]
    lines += [_gpu(gpu, width) for gpu in devices]
    if not devices:
        lines.append(_doing(row))
    elif len(row["gpus"]) > len(devices):
        lines.append((Span(f"and {len(row['gpus']) - len(devices)} more GPUs", "dim"),))
    return [cut(line, width) for line in lines]


def filled(lines: Iterable[Line], width: int, height: int) -> tuple[Line, ...]:
    """Returns the first ``height`` of ``lines``, each padded or cut to ``width`` cells."""
    return tuple(cut(line, width) for line in islice(lines, height))


def cut(line: Line, width: int) -> Line:
    """Returns ``line`` padded or cut to ``width`` cells."""
    spans, left = [], width
    for span in line:
        text = escape(span.text)
        if cell_len(text) >= left:
            spans.append(Span(fitted(text, left), span.style))
            left = 0
            break
        spans.append(Span(text, span.style))
        left -= cell_len(text)
    return (*spans, Span(" " * left)) if left else tuple(spans)


def _who(row: Row) -> Line:
    rank = "no rank" if row["rank"] is None else f"rank {row['rank']}"
    state = "" if row["state"] in (None, "running") else f" {row['state']}"
    return (
        Span(rank, "bold"),
        Span(f"  pid {row['pid']} on {row['node']}{state}  ", ""),
        Span(str(row.get("command") or ""), "dim"),
    )


def _host(row: Row, width: int) -> Line:
    history = row["history"]
    bars = _SPARK if width < 120 else 3 * _SPARK
    spans = [*_series("CPU", number(row["cpu_pct"], "%"), history["cpu_pct"], "cpu", bars, 100.0)]
    spans += _series("RSS", brief_size(row["rss_bytes"]), history["rss_bytes"], "mem", bars, None)
    if row["threads"] is not None:
        spans.append(Span(f"threads {row['threads']}  "))
    if row["delay_pct"] is not None:
        # The share of time in which the rank could run but had no CPU.
        spans.append(Span(f"run queue {number(row['delay_pct'], '%')}  ", "warn" if row["delay_pct"] >= 10 else ""))
    if row["step"] is not None:
        spans.append(Span(f"step {row['step']}  "))
    return tuple(spans) or (Span("CPU and memory are not known", "dim"),)


def _gpu(gpu: Row, width: int) -> Line:
    history = gpu["history"]
    bars = _SPARK if width < 120 else 2 * _SPARK
    name = f"GPU{gpu['device_id'] if gpu['device_id'] is not None else '?'}"
    total = gpu.get("total_bytes")
    memory = brief_size(gpu.get("gpu_used_bytes")) + (f"/{brief_size(total)}" if total else "")
    power = number(gpu.get("power_w")) + (f"/{number(gpu['power_limit_w'])}" if gpu.get("power_limit_w") else "")
    # The most important values must fit 80 cells.
    narrow = width < 120
    spans = [*_series(name, number(gpu.get("gpu_pct"), "%"), history["gpu_pct"], "gpu", bars, 100.0)]
    spans += _series("MEM", memory, history["gpu_used_bytes"], "mem", 0 if narrow else bars, total)
    spans += _series(
        "PWR",
        f"{power}W" if power else "",
        history["power_w"],
        "power",
        0 if narrow else bars,
        gpu.get("power_limit_w"),
    )
    spans += _series(
        "TEMP", number(gpu.get("temperature_c"), "C"), history["temperature_c"], "temp", 0 if narrow else bars, 100.0
    )
    spans += list(_clocks(gpu))
    if not narrow and gpu.get("name"):
        spans.append(Span(str(gpu["name"]), "dim"))
    return tuple(spans)


def _clocks(gpu: Row) -> Iterator[Span]:
    if gpu.get("sm_clock_mhz") is not None:
        yield Span(f"{gpu['sm_clock_mhz']}MHz  ")
    slow = [word for word in str(gpu.get("clock_event_reasons") or "").split(",") if word not in ("", "gpu_idle")]
    if slow:
        yield Span(f"{','.join(slow)}  ", "warn")
    if gpu.get("own_bytes") is not None:
        yield Span(f"own {brief_size(gpu['own_bytes'])}  ", "dim")


def _doing(row: Row) -> Line:
    if row["op"] is not None:
        where = f" of {row['comm']}" if row["comm"] else ""
        wait = f"in {row['op']} #{row['seq']}{where} for {brief_age(row['age_ns'])}  "
        return (Span(wait, "warn"), Span(row["python"] or "", ""))
    if row["waits_in"] is not None:
        return (Span(f"in {row['waits_in']}  ", "warn"), Span(row["python"] or ""))
    return (Span(row["python"] or "", ""),)


def _series(
    title: str, value: str, history: Sequence[float | None], style: str, bars: int, most: float | None
) -> list[Span]:
    """Returns the spans of a value with its history; no spans if the value is unknown."""
    if not value:
        return []
    spans = [Span(f"{title} ", "dim"), Span(f"{value:>5}", style)]
    # If the screen is too narrow for the history, ``bars`` is 0.
    if bars:
        spans.append(Span(f" {spark(history, bars, most)}", style))
    return [*spans, Span("  ")]
