"""The facts that nodes report about themselves before a job, and the input of the checks. A value that the node does
not know is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = (
    "Case",
    "Device",
    "FileSystem",
    "Interface",
    "Master",
    "NodeFacts",
    "NodeRank",
    "Port",
    "Problem",
    "Reached",
    "Transfer",
    "Variable",
    "Version",
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a part of the facts is missing. ``what``: ``versions``, ``gpus``, ``interfaces``, ``ports``,
    ``file_systems``, ``ranks`` or ``master``.
    """

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a component. ``name``: python, torch, cuda, nccl, driver or kernel."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of the node. ``state``: the kernel's operstate."""

    name: str
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device, as in ``rdma.ports``."""

    hca: str
    port: int
    link_layer: str | None = None
    state: str | None = None
    phys_state: str | None = None
    rate_gbps: float | None = None


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system, as in ``host.file_systems``."""

    mount_point: str
    fs_type: str | None = None
    answers: bool | None = None
    read_only: bool | None = None
    size_bytes: int | None = None
    available_bytes: int | None = None
    inodes: int | None = None
    inodes_used: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or MIG device, as in ``gpu.devices`` and its last row of ``gpu.utilization``."""

    device_id: int | None = None
    uuid: str | None = None
    mig: int | None = None
    name: str | None = None
    state: str | None = None
    reason: str | None = None
    total_bytes: int | None = None
    temperature_c: float | None = None
    clock_event_reasons: str | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retirement_pending: bool | None = None
    recovery_action: str | None = None


@dataclass(frozen=True, slots=True)
class Master:
    """MASTER_ADDR as the node resolves it. ``port``: the state of MASTER_PORT (``free``, ``listening`` or ``taken``);
    None unless one of ``addresses`` is local to the node.
    """

    addresses: tuple[str, ...] = ()
    local: bool = False
    port: str | None = None


@dataclass(frozen=True, slots=True)
class Reached:
    """The shortest of several round trips to the daemon at ``address``. If the daemon did not answer, ``round_trip_ns``
    is None and ``why`` says why.
    """

    address: str
    round_trip_ns: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The bytes sent to the daemon at ``address`` in ``duration_ns``. If sending failed, ``why`` says why."""

    address: str
    sent_bytes: int = 0
    duration_ns: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class NodeRank:
    """A rank of the job that will run, or runs, on the node. ``variables``: NCCL_*, TORCH_* and others."""

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    node_rank: int | None = None
    pid: int = 0
    box: str = ""
    variables: tuple[Variable, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts of a node. ``boot_id`` identifies the machine, on which two daemons may run."""

    node: str
    boot_id: str = ""
    versions: tuple[Version, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    file_systems: tuple[FileSystem, ...] = ()
    devices: tuple[Device, ...] = ()
    master: Master | None = None
    reached: tuple[Reached, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    ranks: tuple[NodeRank, ...] = ()
    problems: tuple[Problem, ...] = ()

    def problem(self, what: str) -> str:
        """Returns why the facts of ``what`` are missing, or ""."""
        return "; ".join(problem.why for problem in self.problems if problem.what == what)


@dataclass(frozen=True)
class Case:
    """The input of the checks.

    ``silent``: why nodes sent no facts, by name or address. ``addresses``: HOST:PORT at which other nodes reach a node,
    by the node's name. ``offsets``: a node's clock minus the asker's clock, and the error of this difference, both in
    ns, by the node's name. ``variables``: the variables that --env-file sets for all ranks. ``planned``: whether the
    ranks come from --env-file, and not from a running job. ``python``: the interpreter whose versions are compared;
    ``iface``: an interface that every node must have.
    """

    nodes: tuple[NodeFacts, ...]
    silent: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    planned: bool = False
    python: str = ""
    iface: str = ""
    bandwidth: bool = False

    def variable(self, node: NodeFacts, name: str) -> str:
        """Returns the value of ``name`` for the first rank on ``node``, or for all ranks; empty if it is not set."""
        own = (v.value for rank in node.ranks for v in rank.variables if v.name == name)
        return next(own, self.variables.get(name, ""))
