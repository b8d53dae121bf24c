"""Facts about a node's hardware: its GPUs, network ports, connections, disks and file systems, and their reports.

Values are from the last one or two minutes, events from the last hour; None: unknown. ``ranks``: the ranks of the job
that use the part. Times are UTC ns on the clock of the node.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = (
    "NO_HARDWARE",
    "Disk",
    "FileSystem",
    "Gpu",
    "Hardware",
    "HardwareEvent",
    "NetworkPath",
    "NetworkPort",
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. ``state``: ``ok``, ``lost`` (the GPU fell off the bus, or needs a reset) or ``gone``; ``reason``: why it
    is not ``ok``.

    ``busy``, ``power_capped``, ``thermal`` and ``power_brake`` are shares of the time, 0 to 1; in the last three, the
    power limit, heat or the external power brake held the clock down. Clocks are in MHz; ``clock_mhz`` is a median.
    ``remap_pending`` and ``remap_failed``: rows of its memory wait for a remap, or could not be remapped. ``recovery``:
    the action that the driver asks for. ``lanes``: trained PCIe lanes. ``fabric``: "CLUSTER/CLIQUE", equal for all
    GPUs, also on other nodes, that NVLink switches connect with this GPU; None without such a switch.
    ``counts_nvlink``: whether the error counters of its NVLinks are read; their errors are then events.
    """

    device: int
    ranks: tuple[int, ...] = ()
    name: str | None = None
    state: str = "ok"
    reason: str | None = None
    busy: float | None = None
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_capped: float | None = None
    thermal: float | None = None
    power_brake: float | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    remapped_uncorrected: int | None = None
    retired_pages: int | None = None
    recovery: str | None = None
    lanes: int | None = None
    max_lanes: int | None = None
    total_bytes: int | None = None
    fabric: str | None = None
    counts_nvlink: bool | None = None


@dataclass(frozen=True, slots=True)
class HardwareEvent:
    """Events of one kind and part. ``source``: ``gpu`` (``kind`` as in gpu.events) or ``kernel`` (``kind`` as in
    process.kmsg).

    ``first_ns`` and ``last_ns``: the times of the first and the last of the ``count`` events. ``gpu``: number of the
    GPU; ``part``: the device as the source names it; ``code``: number of an XID; ``pid``: the process that the source
    names; ``text``: the text of the last event, or of the first event for errors of NVLink 5. Errors of NVLink 5 with
    different units or severities are separate events.
    """

    source: str
    kind: str
    first_ns: int
    last_ns: int
    count: int = 1
    text: str = ""
    gpu: int | None = None
    part: str | None = None
    code: int | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class NetworkPort:
    """A port of an InfiniBand or RoCE device. ``risen``: increases of its error counters in ``seconds``."""

    device: str
    port: int
    ranks: tuple[int, ...] = ()
    netdev: str | None = None
    state: str | None = None
    physical_state: str | None = None
    risen: tuple[tuple[str, int], ...] = ()
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """TCP connections of a rank with one peer host. ``segments``: the number of sent segments; ``resent``: how many of
    them were retransmitted; ``timeouts``: the highest number of consecutive retransmissions on a connection that waits
    for an answer now."""

    rank: int
    peer: str
    segments: int
    resent: int
    timeouts: int = 0
    round_trip_ns: int | None = None
    local: bool = False


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk. ``busy``: share of the time. The latencies are means over requests, ns. ``in_flight``: the number of
    requests in flight.
    """

    name: str
    busy: float | None = None
    read_latency_ns: float | None = None
    write_latency_ns: float | None = None
    in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system. ``rank``: the rank in whose container it is mounted; None: it is mounted on the node.

    ``used``: used share of the space that processes may use, 0 to 1. ``answers``: False if its server did not answer.
    """

    mount_point: str
    kind: str | None = None
    rank: int | None = None
    used: float | None = None
    available_bytes: int | None = None
    answers: bool | None = None
    read_only: bool | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """The parts of a node about which there are records."""

    gpus: tuple[Gpu, ...] = ()
    events: tuple[HardwareEvent, ...] = ()
    ports: tuple[NetworkPort, ...] = ()
    paths: tuple[NetworkPath, ...] = ()
    disks: tuple[Disk, ...] = ()
    file_systems: tuple[FileSystem, ...] = ()


NO_HARDWARE = Hardware()
