"""Finds the owner of a job: the user who owns its processes according to the kernel. A job name belongs to one user.

Environment variables name a job, and any user can set them. So another user's job of the same name is another job,
``NAME (uid N)``: its processes are never joined, counted or diagnosed with the processes of the first job.

``container_of`` finds container and pod in the paths of control groups of docker, containerd, CRI-O and podman with the
cgroupfs and the systemd driver, Kubernetes' quality-of-service slices, nested nodes (kind), LXC, systemd-nspawn,
BuildKit and Amazon ECS. The innermost container counts.
"""

from __future__ import annotations

import array
import fcntl
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from probing.api.text import names_owner, with_owner
from probing.daemon.processes.identity import Job

__all__ = ("MAX_NAMES", "JobNames", "container_of", "owner_of")

_ID = r"[0-9a-f]{64}"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}"
_CONTAINERS = (
    # Names such as docker-ID.scope, cri-containerd-ID.scope, crio-ID.scope, ...slice:cri-containerd:ID.
    re.compile(
        rf"(?:^|[/:])(?:docker|cri-containerd|containerd|crio|libpod|cri-dockerd|nerdctl)[-:]({_ID})(?:\.scope)?(?=/|$)"
    ),
    # Paths such as /docker/ID, /kubepods/.../podUID/ID, /buildkit/ID, /ecs/TASK/ID, /default/ID (containerd).
    re.compile(rf"/({_ID})(?=/|$)"),
    # BuildKit names its containers in base 36.
    re.compile(r"/buildkit/([0-9a-z]{20,32})(?=/|$)"),
    re.compile(r"/ecs/[^/]+/([0-9a-f]{32}-[0-9]+)(?=/|$)"),
    re.compile(rf"/lxc(?:\.payload)?[/.]({_NAME})(?=/|$)"),
    re.compile(rf"/machine\.slice/(?:machine-|systemd-nspawn@)({_NAME}?)\.(?:scope|service)(?=/|$)"),
)
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:]|$)")


def container_of(paths: Iterable[str]) -> tuple[str | None, str | None]:
    """Returns (container id or name, pod uid) of a process in the control groups ``paths``. The first
    value is None outside of a container, the second outside of a pod."""
    container = pod = None
    for path in paths:
        pod = pod or _pod(path)
        container = container or _container(path)
    return container, pod


def _pod(path: str) -> str | None:
    found = _POD.findall(path)
    return found[-1].replace("_", "-") if found else None


def _container(path: str) -> str | None:
    matches = [match for shape in _CONTAINERS for match in shape.finditer(path)]
    return max(matches, key=lambda match: match.end())[1] if matches else None


MAX_NAMES = 4096
"""The maximum number of job names whose owners are kept."""
# include/uapi/linux/nsfs.h; ioctl_ns(2).
_NS_GET_PARENT, _NS_GET_OWNER_UID = 0xB702, 0xB704
# User namespaces nest at most 32 deep (kernel/user_namespace.c).
_MAX_DEPTH = 33


def owner_of(open_file: Callable[[str], int], uid: int, cgroup: Iterable[str]) -> int:
    """Returns the uid, on this host, of the user who owns a process.

    ``open_file`` returns a descriptor of a file of /proc/PID; ``uid``: the real uid of the process on this host. In a
    user namespace the owner is the creator of the outermost namespace, because all uids of a rootless container belong
    to one user. If root created the namespace, the owner is ``uid``. In a pod the owner is the uid inside the pod,
    because each pod has different uids on the host. Raises OSError and ProbingError.
    """
    try:
        namespace = open_file("ns/user")
    except FileNotFoundError:
        return uid
    creator = _creator(namespace)
    if creator is None:
        return uid
    if creator != 0 or container_of(cgroup)[1] is None:
        return creator or uid
    return _inside(open_file("uid_map"), uid)


def _creator(namespace: int) -> int | None:
    """Returns the uid of the user who made the outermost user namespace around ``namespace``; None for the namespace of
    this process. Closes ``namespace``.
    """
    ours = Path("/proc/self/ns/user").stat().st_ino
    try:
        for _ in range(_MAX_DEPTH):
            if os.fstat(namespace).st_ino == ours:
                return None
            try:
                parent = fcntl.ioctl(namespace, _NS_GET_PARENT)
            except PermissionError:
                break  # the namespace is not below the namespace of this process
            if os.fstat(parent).st_ino == ours:
                os.close(parent)
                break
            os.close(namespace)
            namespace = parent
        creator = array.array("I", [0])
        fcntl.ioctl(namespace, _NS_GET_OWNER_UID, creator)
        return creator[0]
    finally:
        os.close(namespace)


def _inside(uid_map: int, uid: int) -> int:
    """Returns the uid inside the namespace of ``uid_map`` for ``uid`` (user_namespaces(7)). Closes ``uid_map``."""
    with os.fdopen(uid_map, "rb") as file:
        for line in file.read(4096).splitlines():
            inside, outside, count = map(int, line.split())
            if outside <= uid < outside + count:
                return inside + uid - outside
    return uid


class _Holder(NamedTuple):
    """The owner of a job name. ``proven``: the scheduler's control group shows that the job belongs to ``owner``."""

    owner: int
    proven: bool


class JobNames:
    """Names the jobs of a node so that two owners never share a name.

    A name belongs to its first owner, or to the owner whose processes are in the control group of the scheduler's job.
    Once processes in control groups of a scheduler were seen, only processes in such groups can claim new names of the
    scheduler's jobs.
    """

    def __init__(self) -> None:
        self._holders: OrderedDict[str, _Holder] = OrderedDict()
        self._names_of: Counter[int] = Counter()
        # The schedulers (``Job.source``) whose control groups were seen.
        self._proving: set[str] = set()

    def name(self, job: Job, owner: int) -> str:
        """Returns the name that all tables show for a job of ``owner``."""
        if job.proven:
            self._proving.add(job.source)
        holder = self._holders.get(job.name)
        if holder is None or (job.proven and not holder.proven):
            if names_owner(job.name) or (job.source in self._proving and not job.proven):
                return with_owner(job.name, owner)
            self._hold(job.name, _Holder(owner, job.proven))
        elif holder.owner != owner:
            return with_owner(job.name, owner)
        return job.name

    def restore(self, name: str, owner: int) -> None:
        """Gives a name to its earlier owner, as stored by an earlier daemon."""
        if not names_owner(name) and name not in self._holders:
            self._hold(name, _Holder(owner, proven=False))

    def release(self, name: str, owner: int) -> None:
        """Takes the name away from ``owner``. To be called when no process with this name belongs to ``owner`` now."""
        holder = self._holders.get(name)
        if holder is not None and holder.owner == owner:
            del self._holders[name]
            self._names_of[owner] -= 1

    def _hold(self, name: str, holder: _Holder) -> None:
        if (before := self._holders.pop(name, None)) is not None:
            self._names_of[before.owner] -= 1
        elif len(self._holders) >= MAX_NAMES:
            # The user with the most names loses its oldest name; other users lose none.
            most = self._names_of.most_common(1)[0][0]
            oldest = next(name for name, holder in self._holders.items() if holder.owner == most)
            del self._holders[oldest]
            self._names_of[most] -= 1
        self._holders[name] = holder
        self._names_of[holder.owner] += 1
