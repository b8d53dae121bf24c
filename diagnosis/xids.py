"""The meaning of XIDs of NVIDIA's driver for a job, according to the classes of DCGM's health watch.

The sources are DcgmHealthWatch.cpp (classes and subsystems) and NVIDIA's "XID Errors" (meanings and remedies).

XIDs 144 to 150 are errors of NVLink 5, with unit, severity, link and reason in the driver's text:

``Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x00000000 ...)``. The fields are unit,
severity, whether other GPUs are affected, whether a test injected the error, the link (-1: no link), and hexadecimal
words, of which the first two have the details. Source: NVIDIA's "Analyzing Xid Errors with the Xid Catalog", sheet "Xid
144-150 Decode"; drivers from R565 on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = (
    "NVLINK_CODES",
    "NvlinkError",
    "Xid",
    "nvlink_error",
    "xid",
)

NVLINK_CODES = {144: "SAW", 145: "RLW", 146: "TLW", 147: "TREX", 148: "NVLPW_CTRL", 149: "NETIR", 150: "MSE"}
"""The part of NVLink 5 that reports, by XID."""
_LINE = re.compile(
    r"Xid \([^)]{1,32}\): (?P<code>\d{1,3}), .*?(?P<unit>\b[A-Z][A-Z0-9_]{2,31}(?:/[A-Z0-9_]{1,32})?(?: Degraded)?) +"
    r"(?:Link )?(?P<severity>Fatal|Nonfatal) +XC ?\d{1,3} +i ?(?P<injected>\d{1,3}) +Link (?P<link>-?\d{1,3})\b"
    r"(?: +[(\[](?P<info>0x[0-9a-fA-F]{1,8})(?: +(?P<status>0x[0-9a-fA-F]{1,8}))?)?"
)
_LINK_DOWN = ("NETIR_LINK_EVT", "NETIR_LINK_DOWN")
_BIT_ERRORS = "NETIR_BER_EVENT"
_RECEIVES = "RLW_RXPIPE"
# Bits 20 to 25 of the first word. For a link that went down they contain the reason.
_REASON_SHIFT, _REASON_MASK = 20, 0x3F
_PEER = frozenset((21, *range(32, 38)))
_HEAT_OF_PEER = 35
_SIGNAL, _CABLES = frozenset((2, 4, 10)), frozenset((42, 43))
_COMMAND = frozenset((15, 16, 17, 18, 22, 38))
_HOST = 40
# By unit: the status bits for which a restart of the program is enough (bucket XID_154_EVAL of the catalog).
_OF_PROGRAM = {"RLW_REMAP": 0x3F, "RLW_SRC_TRACK": 0x0C}
_RESET_LINK = "Drain the node and reset the GPU: `nvidia-smi --gpu-reset`; have it examined if the error returns."


@dataclass(frozen=True, slots=True)
class NvlinkError:
    """An error of NVLink 5. ``unit``: the part that reports, such as NETIR_LINK_DOWN. ``link``: None if it concerns no
    single link.

    ``reason``: why a link went down, 0 if unknown; None for other units. ``status``: the bits of the error; None if the
    line lacks them. ``injected``: a test caused it. ``resets``: the GPU has to be reset.
    """

    code: int
    unit: str
    fatal: bool
    link: int | None
    reason: int | None = None
    status: int | None = None
    injected: bool = False
    resets: bool = False

    @property
    def from_peer(self) -> bool:
        """Whether the reason is that the other end of the link went down."""
        return self.reason in _PEER

    @property
    def text(self) -> str:
        """A clause such as "NVLink 9 went down (NETIR_LINK_DOWN, fatal, reason 4: its signal is bad)"."""
        of_link = f" of NVLink {self.link}" if self.link is not None else ""
        if self.reason is not None:
            what = f"NVLink {self.link} went down" if self.link is not None else "an NVLink went down"
        elif self.unit == _BIT_ERRORS:
            what = f"many bit errors{of_link or ' of an NVLink'}"
        else:
            what = f"an error{of_link or ' of NVLink'}"
        more = [self.unit, "fatal" if self.fatal else "not fatal"]
        if self.reason:
            more.append(f"reason {self.reason}{_reason_text(self.reason)}")
        if self.status:
            more.append(f"status {self.status:#x}")
        if self.injected:
            more.append("injected by a test")
        return f"{what} ({', '.join(more)})"

    @property
    def remedy(self) -> str:
        """The remedy, according to the catalog's buckets."""
        link = f"NVLink {self.link}" if self.link is not None else "the link"
        if self.from_peer:
            heat = ", and at its cooling" if self.reason == _HEAT_OF_PEER else ""
            return f"Look at the other end of {link} first, a switch or a GPU{heat}; then reset the GPU."
        if self.reason in _SIGNAL | _CABLES or self.unit == _BIT_ERRORS:
            then = "; then reset the GPU" if self.fatal else ""
            return f"Examine the signal, the connectors and the cables of {link}{then}."
        if self.reason in _COMMAND:
            return f"Find out which software or operator took {link} down."
        if self.reason == _HOST:
            return "Look at the other logs of the node: this is the consequence of another fault."
        if self.resets:
            return _RESET_LINK
        if (self.status or 0) & _OF_PROGRAM.get(self.unit, 0):
            return "Restart the job, or do what XID 154 asks for; a link that went down just before explains it."
        return "Nothing now; report the error if it goes on."


def nvlink_error(line: str) -> NvlinkError | None:
    """Returns the error of NVLink 5 in a line of the kernel's log; None if it has none."""
    match = _LINE.search(line)
    if match is None or int(match["code"]) not in NVLINK_CODES:
        return None
    info = int(match["info"], 16) if match["info"] else None
    # A unit may have two names, as in "A/B"; later drivers write the second.
    unit = match["unit"].rpartition("/")[2]
    reason = None
    if unit in _LINK_DOWN:
        unit = _LINK_DOWN[1]
        reason = info >> _REASON_SHIFT & _REASON_MASK if info is not None else 0
    link, fatal = int(match["link"]), match["severity"] == "Fatal"
    status = int(match["status"], 16) if match["status"] else None
    lost = unit == _RECEIVES and bool((status or 0) & 7) and _lost_packets(info or 0)
    return NvlinkError(
        int(match["code"]),
        unit,
        fatal,
        link if link >= 0 else None,
        reason,
        status,
        int(match["injected"]) > 0,
        fatal or lost,
    )


def _lost_packets(info: int) -> bool:
    # "Decode for action 2" of RLW_RXPIPE. The first test is for drivers from R575 on, the second for earlier drivers.
    return info & 0xFF == 0x86 or info & 0x7FF == 0x4C2


def _reason_text(reason: int) -> str:
    if reason in _PEER:
        return ": its other end went down" + (" because of heat" if reason == _HEAT_OF_PEER else "")
    if reason in _SIGNAL:
        return ": its signal is bad"
    if reason in _CABLES:
        return ": its signal or cable is bad"
    if reason in _COMMAND:
        return ": software took it down"
    return ": the host failed" if reason == _HOST else ""


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
    """An XID. ``fails``: True if DCGM reports a failure of the GPU, False if it only warns. ``part``: ``memory``,
    ``pcie``, ``thermal``, ``power``, ``nvlink``, ``inforom``, ``driver`` or ``program``."""

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
    """Returns the meaning of an XID; an XID that DCGM does not list is a warning."""
    return _UNKNOWN if code is None else _XIDS.get(code, _UNKNOWN)
