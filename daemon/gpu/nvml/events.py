"""Waits for the driver's events (Xid, memory errors, clocks) in a thread, and stamps each event on arrival."""

from __future__ import annotations

import threading
import time
from collections import deque
from ctypes import c_void_p, cast
from typing import Any

import pynvml

from probing.daemon.gpu.nvml.calls import Calls, DeviceLost, DriverFailed, Values
from probing.daemon.gpu.nvml.devices import Device

__all__ = ("EventThread",)

# The maximum wait for an event; the driver ends a wait at once when an event comes.
WAIT_MS = 2_000
MAX_WAITING = 4_096
_NO_INSTANCE = 0xFFFFFFFF
# The pause after an error of the wait itself, s.
RETRY_S = 1.0


class EventThread:
    """The thread that waits for events. ``take`` is thread-safe. The thread ends with the process."""

    def __init__(self, calls: Calls, devices: list[Device]) -> None:
        self._calls = calls
        self._gpus = [device for device in devices if device.parent is None]
        self._by_handle = {_address(gpu.handle): gpu for gpu in self._gpus}
        self._waiting: deque[Values] = deque()
        self._dropped = 0
        self._set: Any = None
        self.registered = 0
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Registers for all events that the GPUs support, and starts the thread if a GPU supports any. Raises
        DriverFailed.
        """
        try:
            self._set = self._calls.need("nvmlEventSetCreate")
        except pynvml.NVMLError:
            return
        for gpu in self._gpus:
            try:
                types = self._calls.ask("nvmlDeviceGetSupportedEventTypes", gpu.handle, device=gpu.key)
                if types:
                    self._calls.need("nvmlDeviceRegisterEvents", gpu.handle, types, self._set, device=gpu.key)
                    self.registered += 1
            except (pynvml.NVMLError, DeviceLost):
                # Without events of this GPU, the other GPUs can still register.
                continue
        if self.registered:
            self._thread.start()

    def take(self) -> tuple[list[Values], int]:
        """Returns the events since the last call, and the number of events that were dropped."""
        events = [self._waiting.popleft() for _ in range(len(self._waiting))]
        dropped, self._dropped = self._dropped, 0
        return events, dropped

    def _run(self) -> None:
        while True:
            try:
                data = self._calls.need("nvmlEventSetWait", self._set, WAIT_MS, more_s=WAIT_MS / 1000)
            except pynvml.NVMLError as e:
                if int(e.value) != pynvml.NVML_ERROR_TIMEOUT:
                    time.sleep(RETRY_S)
            except DeviceLost:
                time.sleep(RETRY_S)
            except DriverFailed:
                # The next reading reports the failure of the driver.
                return
            else:
                self._add(data)

    def _add(self, data: Any) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        gpu = self._by_handle.get(_address(data.device))
        instances = (int(data.gpuInstanceId), int(data.computeInstanceId))
        self._waiting.append(
            {
                "ts_ns": time.time_ns(),
                "device": gpu.key if gpu else None,
                "type": int(data.eventType),
                "data": int(data.eventData),
                "instances": [None if number == _NO_INSTANCE else number for number in instances],
            }
        )


def _address(handle: Any) -> int | None:
    return cast(handle, c_void_p).value
