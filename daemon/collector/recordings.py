"""Opens the file into which all records of the rings are recorded (``probes.recordings``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from probing.api.errors import ConfigError
from probing.daemon.bpf.recording import Recorder
from probing.daemon.clock import Clock, ClockPair

__all__ = ("Record", "open_recorder")

Record = Callable[[str, ClockPair, npt.NDArray[Any]], None]
"""(ring, the clocks when it was read, its records)."""


def open_recorder(folder: Path, clock: Clock) -> Recorder:
    """Returns a recorder of a new file in ``folder``. Raises ConfigError where it cannot be created."""
    path = folder / f"rings-{clock.pair().real_ns}.recording"
    try:
        return Recorder(path)
    except OSError as e:
        hint = "the directory must be there and belong to the collector's user"
        raise ConfigError(f"no recording can be made at {path}: {e.strerror}", hint=hint) from e
