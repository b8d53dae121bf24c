"""What an XID of NVIDIA's driver means for a job: the classes of DCGM's health watch.

Sources: DcgmHealthWatch.cpp (classes and subsystems), NVIDIA's "XID Errors" (meanings and remedies); of XIDs 144 to 150
``nvlink_errors`` reads more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from probing.diagnosis.nvlink_errors import NVLINK_CODES

__all__ = ("Xid", "xid")

_RESET = "Drain the node, and reset the GPU: `nvidia-smi --gpu-reset`; reboot where that fails."
_REPLACE = "Drain the node and have the board examined; replace it if the error returns after a reboot."
_LINK = "Reset the GPUs that share the link; examine the NVLink bridge, the switch and the cables if it returns."
_LOG = "Read the line of the error in the kernel's log: it has the unit, the link, and whether it is fatal."
_EARLIER = "Look for the errors of the GPU and the signals of its processes before it."
_RECOVERY = "Do what it asks for: `nvidia-smi -q` and the line in the kernel's log name it."
_PROGRAM = "Look at the program first: this error may come from a kernel of the job."
_COOLING = "Examine fans, airflow and the temperature of the room."
_POWER = "Examine the power supply and its cables, and the power limit: `nvidia-smi -q -d POWER`."


@dataclass(frozen=True, slots=True)
class Xid:
    """``fails``: DCGM calls the GPU failed, else it warns. ``part``: memory, pcie, thermal, power, nvlink, inforom,
    driver or program."""

    text: str
    part: str
    fails: bool
    remedy: str


_UNKNOWN = Xid("an error that is not in DCGM's list", "driver", False, "Look the number up in NVIDIA's list of XIDs.")
_XIDS: Mapping[int, Xid] = MappingProxyType(
    {
        48: Xid("a memory error that ECC cannot correct", "memory", True, _RESET),
        64: Xid("a row of memory that could not be remapped", "memory", True, _REPLACE),
        74: Xid("an error of NVLink", "nvlink", True, _LINK),
        79: Xid("the GPU has fallen off the bus", "pcie", True, _REPLACE),
        95: Xid("a memory error that was not contained", "memory", True, _RESET),
        119: Xid("the GPU's system processor (GSP) does not answer", "driver", True, _RESET),
        120: Xid("an error of the GPU's system processor (GSP)", "driver", True, _RESET),
        140: Xid("a memory error without recovery", "memory", True, _RESET),
        94: Xid("a memory error that was contained: it ended the process that met it", "memory", False, _RESET),
        31: Xid("an access to memory that is not mapped", "program", False, _PROGRAM),
        32: Xid("an invalid or corrupted command buffer", "memory", False, _PROGRAM),
        43: Xid("the GPU stopped processing for a process", "program", False, _PROGRAM),
        63: Xid("a row of memory was remapped, or a page retired", "memory", False, _RESET),
        38: Xid("a fault of the driver's firmware", "pcie", False, _RESET),
        39: Xid("a fault of PCIe", "pcie", False, _REPLACE),
        42: Xid("a fault of the video processor", "pcie", False, _RESET),
        **{code: Xid("a thermal fault", "thermal", False, _COOLING) for code in (60, 61, 62)},
        **{code: Xid("a power fault", "power", False, _POWER) for code in (54, 56, 57, 58, 78)},
        **{code: Xid("an error of NVLink", "nvlink", False, _LINK) for code in (67, 73, 121, 137)},
        **{code: Xid(f"an error of NVLink 5 ({unit})", "nvlink", False, _LOG) for code, unit in NVLINK_CODES.items()},
        93: Xid("an error of the board's InfoROM", "inforom", False, _REPLACE),
        45: Xid("the end of a process's work, after another error", "program", False, _EARLIER),
        154: Xid("a change of the recovery that the driver asks for", "driver", False, _RECOVERY),
    }
)


def xid(code: int | None) -> Xid:
    """Returns the meaning of an XID; one that DCGM does not list warns."""
    return _UNKNOWN if code is None else _XIDS.get(code, _UNKNOWN)
