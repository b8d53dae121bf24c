"""Derives job and rank of a process from the environment variables that its launcher set.

Sources of the names: torch/distributed/run.py ("Environment Variables"), srun(1) "OUTPUT ENVIRONMENT VARIABLES", Open
MPI's FAQ on running jobs, Hydra's wiki (PMI_*), Intel MPI (MPI_LOCALRANKID), MVAPICH's user guide (MV2_*).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

__all__ = ("Job", "Ranks", "job_of", "meeting_place", "on_one_node", "ranks_of", "restarts_of", "slurm_job")

MAX_WORLD = 1 << 24
MAX_NAME = 200
Environ = Mapping[str, str]
# A reader in another group namespace sees paths such as /../../system.slice/...
_SLURM_GROUP = re.compile(
    r"(?:/\.\.)*/(?:slurm(?:_[^/]+)?/uid_[0-9]+|system\.slice/(?:[^/]+_)?slurmstepd\.scope)/job_([0-9]{1,10})(?=/|$)"
)
# The slice in which users make control groups of any name (systemd's Delegate=).
_OF_A_USER = re.compile(r"(?:/\.\.)*/user\.slice/")
_POD_INDEX = re.compile(r"(.+)-(?:master|worker|launcher|chief|trainer|node|head|ps)-[0-9]+(?:-[a-z0-9]{5})?")


class Ranks(NamedTuple):
    """The ranks of a process. ``certain``: the variables are set only for ranks. The variables of a scheduler are not
    certain, because helper processes inherit them. ``source``: the kind of evidence, see ``ranking``.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    node_rank: int | None = None
    certain: bool = True
    source: str = ""

    def same(self, other: Ranks | None) -> bool:
        """Returns whether ``other`` has the same rank and world size."""
        return other is not None and self[:2] == other[:2]


class Job(NamedTuple):
    """A job. ``source``: slurm, kubernetes, torchelastic, ray, master or pid.

    ``unique``: the name and the number of restarts together name one run of the job. ``proven``: the process is in a
    control group of this Slurm job or of a pod. Only the scheduler can create such a group.
    """

    name: str
    source: str
    unique: bool = False
    proven: bool = False


# Variables of rank, world size, local rank and node rank; the first complete set counts.
_RANK_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", ("GROUP_RANK", "NODE_RANK"), True),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ("SLURM_NODEID",), False),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_NODEID",), False),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", (), False),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", (), False),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", (), False),
)
# Variables of the number of ranks on this node, and of the number of ranks of the job.
_SIZES = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)


def ranks_of(environ: Environ, current: Collection[str] = ()) -> Ranks | None:
    """Returns the ranks in the variables of torchrun, Slurm, Open MPI, MVAPICH or MPICH, tried in this order; None if
    there is no valid set.

    ``current``: the names of the variables that the process has now; it had the rest of ``environ`` only at exec.
    """
    for rank_name, size_name, local_name, node_names, certain in _RANK_NAMES:
        rank, size = _number(environ, rank_name), _number(environ, size_name)
        if rank is None or size is None or not rank < size <= MAX_WORLD:
            continue
        node = next((n for name in node_names if (n := _index(environ, name)) is not None), None)
        source = ("environment" if rank_name in current else "exec") if certain else "scheduler"
        return Ranks(rank, size, _index(environ, local_name), node, certain, source)
    return None


def job_of(
    environ: Environ, node: str, in_pod: bool = False, coordinator: str = "", cgroup: Collection[str] = ()
) -> Job | None:
    """Returns the job that ``environ`` names, or None. ``coordinator``: "HOST:PORT" where the job's ranks meet, if
    known.

    ``cgroup``: the paths of the process's control groups. If Slurm's group and SLURM_JOB_ID differ, the group counts.
    """
    if slurm := _digits(environ, "SLURM_JOB_ID"):
        step, group = _digits(environ, "SLURM_STEP_ID"), slurm_job(cgroup)
        if group and group != slurm:
            return Job(group, "slurm", proven=True)
        return Job(f"{slurm}.{step}" if step else slurm, "slurm", unique=bool(step), proven=bool(group))
    if (in_pod or "KUBERNETES_SERVICE_HOST" in environ) and (name := _kubernetes_job(environ)):
        space = environ.get("POD_NAMESPACE", "")
        proven = in_pod and not any(map(_OF_A_USER.match, cgroup))
        return Job(_cut(f"{space}/{name}" if space else name), "kubernetes", proven=proven)
    if (elastic := environ.get("TORCHELASTIC_RUN_ID", "")) and elastic != "none":
        return Job(_cut(elastic), "torchelastic")
    if ray := environ.get("RAY_JOB_ID", ""):
        # A Ray job id is unique only within its Ray cluster. But no other value is equal on all nodes of the job.
        return Job(_cut(ray), "ray", unique=True)
    if place := meeting_place(environ, coordinator):
        return Job(_cut(f"{node}/{place}" if _local(_host(place)) else place), "master")
    return None


def slurm_job(cgroup: Iterable[str]) -> str:
    """Returns the id of the Slurm job in whose control group a process is; empty outside of Slurm's groups.

    Only root creates groups below Slurm's (slurm.conf's ProctrackType=proctrack/cgroup; cgroup.conf(5), v1 and v2).
    """
    return next((match[1] for path in cgroup if (match := _SLURM_GROUP.match(path))), "")


def meeting_place(environ: Environ, coordinator: str = "") -> str:
    """Returns the "HOST:PORT" where the ranks of a torch or JAX job meet; empty if unknown."""
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    return f"{address}:{port}" if address and port else environ.get("JAX_COORDINATOR_ADDRESS", "") or coordinator


def restarts_of(environ: Environ) -> str:
    """Returns the number of restarts by scheduler and launcher: ``0``, or ``1.2`` if both count their restarts."""
    counts = [_digits(environ, name) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
    return ".".join(count for count in counts if count) or "0"


def on_one_node(environ: Environ, job: Job, coordinator: str = "") -> bool:
    """Returns whether all ranks of the job run on this node, so that local facts can name the run.

    Without a variable that shows the number of nodes, only a job whose master has a local address is on one node.
    """
    if job.source == "pid" or _local(environ.get("MASTER_ADDR", "") or _host(meeting_place(environ, coordinator))):
        return True
    counted = [(_number(environ, here), _number(environ, all_)) for here, all_ in _SIZES]
    sizes = [here == all_ for here, all_ in counted if here is not None and all_ is not None]
    if sizes:
        return all(sizes)
    return 1 in (_number(environ, "SLURM_STEP_NUM_NODES"), _number(environ, "SLURM_NNODES"))


def _kubernetes_job(environ: Environ) -> str | None:
    for name in ("JOBSET_NAME", "JOB_NAME"):
        if environ.get(name):
            return environ[name]
    pod = environ.get("POD_NAME") or environ.get("HOSTNAME", "")
    if index := _digits(environ, "JOB_COMPLETION_INDEX"):
        # In an indexed job the host is called JOB-INDEX, the pod JOB-INDEX-RANDOM (kubernetes.io, "Indexed Job").
        match = re.fullmatch(rf"(.+)-{index}(?:-[a-z0-9]{{5}})?", pod)
        return match[1] if match else None
    if index := _digits(environ, "VC_TASK_INDEX"):
        match = re.fullmatch(rf"(.+)-[^-]+-{index}", pod)  # Volcano: JOB-TASK-INDEX
        return match[1] if match else None
    match = _POD_INDEX.fullmatch(pod)
    return match[1] if match else None


def _host(place: str) -> str:
    return place.rpartition(":")[0]


def _local(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def _number(environ: Environ, name: str) -> int | None:
    text = _digits(environ, name)
    return int(text) if text else None


def _index(environ: Environ, name: str) -> int | None:
    number = _number(environ, name)
    return number if number is not None and number < MAX_WORLD else None


def _digits(environ: Environ, name: str) -> str:
    text = environ.get(name, "").strip()
    return text if len(text) <= 10 and text.isascii() and text.isdigit() else ""


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "\u2026"
