"""Builds the double of libnvidia-ml.so.1, and writes the values that it answers with.

``recorded(8)`` are values like those of a machine with eight H100, each number another prime where it can be, so that
no two metrics can be mistaken for each other.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

__all__ = ("ALL", "EVENT_TYPES", "GPM", "NvmlDouble", "build_nvml", "gpu", "mig", "primes", "recorded")

HERE = Path(__file__).resolve().parent
ALL = "all"
EVENT_TYPES = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x400 | 0x800 | 0x1000 | 0x4000 | 0x8000
# By GPM number.
GPM = {
    1: 97.25,
    2: 89.5,
    3: 41.75,
    5: 61.25,
    10: 53.5,
    11: 2.5,
    12: 7.25,
    13: 11.5,
    20: 13.0,
    21: 17.0,
    60: 19.0,
    61: 23.0,
}
Value = int | float | str


def build_nvml(folder: Path) -> Path:
    """Returns the path of the library, in ``folder``, which must exist. A process compiles it once."""
    return Path(shutil.copy2(_compiled(), folder))


@cache
def _compiled() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="probingd-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libnvidia-ml.so.1"
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers", "-fPIC", "-shared")
    words = ["cc", *flags, "-fvisibility=hidden", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, HERE / "nvml.c"]
    done = subprocess.run([*words, "-lpthread", "-ldl"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cc failed:\n{done.stderr[-4000:]}")
    return library


class NvmlDouble:
    """``library`` answers with ``values`` as they were when ``write`` was last called."""

    def __init__(self, library: Path, values: Mapping[str, Value]) -> None:
        self.library = library
        self.values: dict[str, Value] = dict(values)
        self._events = 0
        self.write()

    def write(self, **changes: Value) -> None:
        self.set(changes)

    def set(self, changes: Mapping[str, Value], *, drop: tuple[str, ...] = ()) -> None:
        """Changes values all at once; ``drop`` are keys that the driver does not know any more."""
        self.values.update(changes)
        for key in drop:
            self.values.pop(key, None)
        text = "".join(f"{key} {value}\n" for key, value in self.values.items())
        path = self.library.parent / "nvml.values"
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        # Replaced whole: a call sees the old values or the new ones.
        fresh.replace(path)

    def event(self, number: int, kind: int, data: int = 0, instances: tuple[int, int] | None = None) -> None:
        """Lets an event happen to GPU ``number``."""
        more = f",{instances[0]},{instances[1]}" if instances else ""
        self.set({f"events.{self._events}": f"{number},{kind},{data}{more}", "events.count": self._events + 1})
        self._events += 1


def primes(first: int, count: int) -> list[int]:
    """The first ``count`` primes from ``first``."""
    found: list[int] = []
    number = first
    while len(found) < count:
        if number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found


def recorded(count: int) -> dict[str, Value]:
    """A driver with ``count`` GPUs, two NVLinks each to a switch, in pairs below a PCIe switch."""
    values: dict[str, Value] = {
        "driver_version": "550.54.15",
        "nvml_version": "12.550.54.15",
        "cuda_version": 12040,
        "count": count,
        "p2p": 0,
    }
    for number in range(count):
        values |= gpu(number)
        for other in range(number + 1, count):
            values[f"topology.{number}.{other}"] = 10 if number // 2 == other // 2 else 50
    return values


def gpu(number: int) -> dict[str, Value]:
    """The values of one H100."""
    p = primes(101 + 1000 * number, 60)
    own: dict[str, Value] = {
        "uuid": f"GPU-{number:08x}-1111-2222-3333-444444444444",
        "name": "NVIDIA H100 80GB HBM3",
        "serial": f"16520{number}",
        "minor": number,
        "architecture": 9,
        "bus_id": f"00000000:{0x17 + number:02X}:00.0",
        "compute_capability": "9.0",
        "memory.total": 85520809984,
        "memory.used": p[0] << 20,
        "memory.reserved": p[1] << 20,
        "memory.free": 85520809984 - ((p[0] + p[1]) << 20),
        "util.gpu": p[2] % 100,
        "util.memory": p[3] % 100,
        "util.encoder": p[4] % 100,
        "util.decoder": p[5] % 100,
        "power_mw": p[6] * 1000 + 7,
        "power_limit_mw": 700000 + p[7],
        "temperature.0": p[8] % 90,
        "pstate": 0,
        "clock_mhz.1": p[9],
        "clock_mhz.2": p[10],
        "clock_max_mhz.1": 1980,
        "clock_max_mhz.2": 2619,
        "clock_event_reasons": 4,
        "ecc.mode": 1,
        "mig.mode": 0,
        "mig.max": 7,
        "gpm": 1,
        "event_types": EVENT_TYPES,
        "pcie.generation": 5,
        "pcie.generation_max": 5,
        "pcie.width": 16,
        "pcie.width_max": 16,
        "compute.count": 0,
        "graphics.count": 0,
        "mps.count": 0,
        "samples.count": 0,
        "numa_node": number // 4,
        "cpus.first": 48 * (number // 4),
        "cpus.last": 48 * (number // 4) + 47,
        "field.82": f"u{p[11] % 90}",
        "field.83": p[12] * 1000 + 3,
        "field.74": p[13],
        "field.269": p[14],
        "field.270": p[15],
        "field.271": p[16],
        "field.197": p[17],
        "field.198": p[18],
        "field.138.all": p[19],
        "field.139.all": p[20],
        "field.3": p[21],
        "field.4": p[22],
        "field.5": p[23],
        "field.6": p[24],
        "field.94": p[25],
        "field.142": f"u{p[26]}",
        "field.143": f"u{p[27]}",
        "field.144": "u0",
        "field.145": "u0",
        "field.179": p[28],
        "field.180": p[29],
        "field.230": "u0",
        "field.176": p[30],
        "field.178": p[31],
    }
    own |= {f"gpm.{metric}": value for metric, value in GPM.items()}
    for link in range(2):
        scope = f".{link}" if link else ""
        own |= {
            f"nvlink{link}.state": 1,
            f"nvlink{link}.version": 4,
            f"nvlink{link}.remote_type": 2,
            f"nvlink{link}.remote": f"00000000:{0xA0 + link:02X}:00.0",
            f"field.138{scope}": p[32 + link],
            f"field.139{scope}": p[34 + link],
            f"field.161{scope}": p[36 + link],
            f"field.162{scope}": p[38 + link],
            f"field.163{scope}": p[40 + link],
            f"field.164{scope}": "u26562",
        }
    return {f"gpu{number}.{name}": value for name, value in own.items()}


def mig(number: int, at: int, instance: int, memory: int) -> dict[str, Value]:
    """MIG device ``at`` of GPU ``number``, whose mode has to be set as well."""
    own: dict[str, Value] = {
        "uuid": f"MIG-{number:08x}-{at:04x}-5555-6666-777777777777",
        "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "gpu_instance": instance,
        "compute_instance": 0,
        "sm_count": 16,
        "memory.total": memory,
        "memory.used": memory // 3,
        "memory.free": memory - memory // 3,
        "memory.reserved": 0,
        "compute.count": 0,
        "graphics.count": 0,
    }
    made: dict[str, Value] = {f"gpu{number}.mig{at}.{name}": value for name, value in own.items()}
    return made | {f"gpu{number}.instance{instance}.gpm.{metric}": value + at for metric, value in GPM.items()}
