"""Finds container and pod in the paths of control groups.

Shapes: docker, containerd, CRI-O and podman with the cgroupfs and the systemd driver, Kubernetes' quality-of-service
slices, nested nodes (kind), LXC, systemd-nspawn, BuildKit, Amazon ECS. The innermost container counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ("container_of",)

_ID = r"[0-9a-f]{64}"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}"
_CONTAINERS = (
    # docker-ID.scope, cri-containerd-ID.scope, crio-ID.scope, libpod-ID.scope, and ...slice:cri-containerd:ID
    re.compile(
        rf"(?:^|[/:])(?:docker|cri-containerd|containerd|crio|libpod|cri-dockerd|nerdctl)[-:]({_ID})(?:\.scope)?(?=/|$)"
    ),
    # /docker/ID, /kubepods/.../podUID/ID, /buildkit/ID, /ecs/TASK/ID, /libpod_parent/..., /default/ID of containerd
    re.compile(rf"/({_ID})(?=/|$)"),
    # BuildKit names its containers in base 36.
    re.compile(r"/buildkit/([0-9a-z]{20,32})(?=/|$)"),
    re.compile(r"/ecs/[^/]+/([0-9a-f]{32}-[0-9]+)(?=/|$)"),
    re.compile(rf"/lxc(?:\.payload)?[/.]({_NAME})(?=/|$)"),
    re.compile(rf"/machine\.slice/(?:machine-|systemd-nspawn@)({_NAME}?)\.(?:scope|service)(?=/|$)"),
)
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:]|$)")


def container_of(paths: Iterable[str]) -> tuple[str | None, str | None]:
    """(container id or name, pod uid) of a process whose control groups are ``paths``; None outside of them."""
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
