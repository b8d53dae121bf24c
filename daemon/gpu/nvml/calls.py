"""Calls NVML. A watchdog sees each call while it runs. A call fails with NVMLError, DeviceLost or DriverFailed.

Codes are nvmlReturn_t of nvml.h. Arrays are decoded by struct: pynvml would call twice, first for the size, and make an
object of each entry, which costs several times as much as the call.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pynvml

__all__ = (
    "NEVER",
    "Calls",
    "DeviceLost",
    "DriverFailed",
    "Reading",
    "Running",
    "Values",
    "Watchdog",
    "layout",
    "process_list",
    "process_samples",
)

LOOK_S = 1.0
Values = dict[str, Any]
"""Values of a device, a process, a link or an event, by name."""

# Codes of a lost GPU, and the reason for each.
_LOST = {15: "the GPU has fallen off the bus", 16: "the GPU needs a reset"}
_ABSENT = {9: "the driver is not loaded", 12: "libnvidia-ml.so.1 was not found"}
_LIBRARY = {4: "no permission", 17: "the system refuses the device files", 1: "NVML is not initialized"}
_MISMATCH = {18: "library and kernel module of the driver have different versions"}
# Codes that mean that the device or the driver lacks a feature: another call would fail as well.
NEVER = frozenset((3, 13, 25, 26))


class DeviceLost(Exception):
    """One GPU does not answer any more; the message says why."""


class DriverFailed(Exception):
    """No GPU can be read. ``kind`` is absent, mismatch, denied or lost."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class Running(NamedTuple):
    """A call in progress, since ``since`` (time.monotonic()). It hangs if it takes longer than ``allowed_s``."""

    name: str
    device: str
    since: float
    allowed_s: float


class Calls:
    """Calls NVML, from one thread. Any thread may read ``running`` while it holds ``lock``.

    ``timeout_s``: the timeout of a call. A call that starts the driver and its devices may take at least ``START_S``.
    """

    START_S = 60.0

    def __init__(self, timeout_s: float) -> None:
        self.lock = threading.Lock()
        self.running: Running | None = None
        self.timeout_s = timeout_s
        self._problems: dict[tuple[str, str], str] = {}
        self._refused: set[tuple[str, str]] = set()

    @property
    def problems(self) -> list[str]:
        """The errors of the functions whose last call failed, each text once."""
        return list(dict.fromkeys(self._problems.values()))

    def forget(self) -> None:
        """Drops the list of features that devices lack, so that they are read again: a device may have changed its
        mode.
        """
        self._refused.clear()

    def need(
        self,
        name: str,
        *args: Any,
        device: str = "",
        starts: bool = False,
        more_s: float = 0.0,
        function: Callable[..., Any] | None = None,
    ) -> Any:
        """Returns the result of ``function``, by default pynvml's function ``name``.

        ``device`` names the GPU. ``starts``: the call starts the driver. ``more_s`` is added to the timeout. Raises
        DeviceLost or DriverFailed for a failure, and NVMLError for any other code.
        """
        allowed_s = max(self.timeout_s, self.START_S) if starts else self.timeout_s + more_s
        self.running = Running(name, device, time.monotonic(), allowed_s)
        try:
            return (function or getattr(pynvml, name))(*args)
        except pynvml.NVMLError as e:
            self._raise_failure(int(e.value), name, starts=starts)
            raise
        finally:
            # If the watchdog holds the lock, it has given up this call, and the process is about to end.
            with self.lock:
                self.running = None

    def ask(
        self,
        name: str,
        *args: Any,
        device: str = "",
        more_s: float = 0.0,
        function: Callable[..., Any] | None = None,
    ) -> Any:
        """Returns the result of ``need``, or None if the device does not support the value or has none now."""
        if (name, device) in self._refused:
            return None
        self._problems.pop((name, device), None)
        try:
            return self.need(name, *args, device=device, more_s=more_s, function=function)
        except pynvml.NVMLError as e:
            code = int(e.value)
        except UnicodeDecodeError as e:
            # pynvml decodes texts strictly, but a damaged board can have any bytes as its serial number.
            return e.object.decode("utf-8", "replace")
        except (pynvml.NVMLLibraryMismatchError, AttributeError):
            code = 13
        if code in NEVER:
            self._refused.add((name, device))
        elif code not in (0, 2, 4, 6, 10, 21, 27):
            self._problems[name, device] = f"{name} failed with code {code}"
        return None

    def reading(self, what: str) -> Reading:
        """Returns a context manager for reading files, which the watchdog sees as a call named ``what``."""
        return Reading(self, what)

    def _raise_failure(self, code: int, name: str, *, starts: bool) -> None:
        if code in _LOST and not starts:
            raise DeviceLost(_LOST[code])
        if code in _MISMATCH:
            raise DriverFailed("mismatch", _MISMATCH[code])
        if code in _ABSENT:
            raise DriverFailed("absent", _ABSENT[code])
        if code == 1 or starts:
            kind = "denied" if code in (4, 17) else "lost"
            raise DriverFailed(kind, {**_LIBRARY, **_LOST}.get(code, f"NVML does not start: {name} gives code {code}"))


class Reading:
    """A context manager for reading files, which the watchdog sees as a call."""

    def __init__(self, calls: Calls, what: str) -> None:
        self._calls, self._what = calls, what

    def __enter__(self) -> None:
        self._calls.running = Running(self._what, "", time.monotonic(), self._calls.timeout_s)

    def __exit__(self, *_: object) -> None:
        with self._calls.lock:
            self._calls.running = None


class Watchdog:
    """Calls ``give_up(call, seconds)`` once a call hangs. It holds the lock of the call's ``Calls`` meanwhile, so that
    the call cannot end. ``give_up`` must not return.
    """

    def __init__(self, calls: Sequence[Calls], give_up: Callable[[Running, float], object]) -> None:
        self._calls = calls
        self._give_up = give_up
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        before = time.monotonic()
        # The time in which this process itself did not run, which is not counted as the time of a call.
        pauses = 0.0
        started: dict[int, tuple[float, float]] = {}
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            pauses += max(0.0, now - before - 2 * LOOK_S)
            before = now
            for number, calls in enumerate(self._calls):
                with calls.lock:
                    running = calls.running
                    if running is None:
                        continue
                    if started.get(number, (0.0, 0.0))[0] != running.since:
                        started[number] = running.since, pauses
                    taken = now - running.since - (pauses - started[number][1])
                    if taken > running.allowed_s:
                        self._give_up(running, now - running.since)
                        return


_INSUFFICIENT_SIZE = 7
FIRST, MOST = 64, 4_096


def layout(kind: type[ctypes.Structure], *names: str) -> struct.Struct:
    """Returns a Struct that unpacks the members ``names`` of the structure ``kind`` as unsigned numbers, in the order
    in which ``kind`` has them.
    """
    text, at = "=", 0
    for name, member in ((field[0], field[1]) for field in kind._fields_ if field[0] in names):
        begin, size = getattr(kind, name).offset, ctypes.sizeof(member)
        code = "d" if member is ctypes.c_double else {2: "H", 4: "I", 8: "Q"}[size]
        text += f"{begin - at}x{code}"
        at = begin + size
    return struct.Struct(f"{text}{ctypes.sizeof(kind) - at}x")


class _Array:
    """An array of entries of ``kind``, into which calls write. It grows when the driver needs more entries, up to MOST,
    and does not shrink.
    """

    def __init__(self, kind: type[ctypes.Structure], *names: str) -> None:
        self._kind, self._layout = kind, layout(kind, *names)
        self._entries: Any = (kind * FIRST)()
        self._count = ctypes.c_uint()

    def filled(self, call: Callable[[Any, Any], int]) -> Iterator[tuple[Any, ...]]:
        """Returns the entries that ``call(entries, pointer to the count)`` writes. Raises NVMLError if the call returns
        an error code.
        """
        while True:
            self._count.value = len(self._entries)
            code = call(self._entries, ctypes.byref(self._count))
            room = len(self._entries)
            if code != _INSUFFICIENT_SIZE or room >= MOST:
                break
            self._entries = (self._kind * min(MOST, max(2 * room, self._count.value + FIRST)))()
        if code:
            raise pynvml.NVMLError(code)
        count = min(room, self._count.value)
        return self._layout.iter_unpack(ctypes.string_at(self._entries, self._layout.size * count))


_LISTED = _Array(pynvml.c_nvmlProcessInfo_v3_t, "pid", "usedGpuMemory")
_SAMPLED = _Array(
    pynvml.c_nvmlProcessUtilizationSample_t, "pid", "timeStamp", "smUtil", "memUtil", "encUtil", "decUtil"
)


def process_list(name: str) -> Callable[[Any], Iterator[tuple[int, int]]]:
    """Returns a function that yields (pid, used bytes) of the processes of a device, from NVML's function ``name``."""

    def read(handle: Any) -> Any:
        function = getattr(pynvml.nvmlLib, name)
        return _LISTED.filled(lambda entries, count: function(handle, count, entries))

    return read


def process_samples(handle: Any, since_us: int) -> Any:
    """Yields (pid, time in us, SM, memory, encoder, decoder in per cent) of samples after ``since_us``."""
    function, since = pynvml.nvmlLib.nvmlDeviceGetProcessUtilization, ctypes.c_ulonglong(since_us)
    return _SAMPLED.filled(lambda entries, count: function(handle, entries, count, since))
