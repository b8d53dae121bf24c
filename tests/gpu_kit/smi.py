"""What says the truth about GPUs: nvidia-smi, or in a rehearsal the file that the double of NVML reads."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ("FIELDS", "Reading", "bounds", "read_double", "read_smi")

Reading = dict[str, str | float | None]
# Field of nvidia-smi -> column of gpu.utilization or gpu.devices, and what to multiply it with.
FIELDS: dict[str, tuple[str, float]] = {
    "uuid": ("uuid", 0),
    "name": ("name", 0),
    "memory.total": ("total_bytes", 1 << 20),
    "memory.used": ("used_bytes", 1 << 20),
    "utilization.gpu": ("gpu_util_pct", 1),
    "power.draw": ("power_w", 1),
    "temperature.gpu": ("temperature_c", 1),
    "clocks.sm": ("sm_clock_mhz", 1),
    "clocks.mem": ("mem_clock_mhz", 1),
    "enforced.power.limit": ("power_limit_w", 1),
}
# The same in the double's file, and what to divide by.
_DOUBLE: dict[str, tuple[str, float]] = {
    "uuid": ("uuid", 0),
    "name": ("name", 0),
    "memory.total": ("total_bytes", 1),
    "memory.used": ("used_bytes", 1),
    "util.gpu": ("gpu_util_pct", 1),
    "power_mw": ("power_w", 1000),
    "temperature.0": ("temperature_c", 1),
    "clock_mhz.1": ("sm_clock_mhz", 1),
    "clock_mhz.2": ("mem_clock_mhz", 1),
    "power_limit_mw": ("power_limit_w", 1000),
}


def read_smi(command: str = "nvidia-smi") -> list[Reading]:
    """Returns a reading of each GPU, by column of ours. Raises RuntimeError where nvidia-smi fails."""
    query = [command, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=15)
    if done.returncode:
        raise RuntimeError(f"nvidia-smi: {(done.stdout + done.stderr).strip()[:200]}")
    return [_reading(line.split(", ")) for line in done.stdout.splitlines() if line]


def _reading(words: Sequence[str]) -> Reading:
    found: Reading = {}
    for word, (column, factor) in zip(words, FIELDS.values(), strict=True):
        found[column] = word.strip() if not factor else _number(word, factor)
    return found


def _number(word: str, factor: float) -> float | None:
    # "[N/A]", "[Not Supported]"
    return None if word.strip().startswith("[") else float(word) * factor


def read_double(values: Path) -> list[Reading]:
    """Returns the same from the file of the double of NVML."""
    lines = dict(line.split(" ", 1) for line in values.read_text().splitlines())
    return [
        {
            column: lines[f"gpu{number}.{name}"] if not by else float(lines[f"gpu{number}.{name}"]) / by
            for name, (column, by) in _DOUBLE.items()
        }
        for number in range(int(lines["count"]))
    ]


def bounds(readings: Sequence[Reading], column: str, slack: float) -> tuple[float, float] | None:
    """Returns from the least to the most that ``readings`` of one GPU have in a column, with ``slack`` around it."""
    known = [value for reading in readings if isinstance(value := reading[column], (int, float))]
    return (min(known) - slack, max(known) + slack) if known else None
