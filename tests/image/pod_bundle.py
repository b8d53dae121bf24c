"""Runs the container of a rendered DaemonSet by runc, as a kubelet and containerd run it on a node.

What they add to the pod's own words is that of containerd 1.7: mounts, masked paths, namespaces and devices.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ("Bundle", "Image", "oci_config")

MOUNTS = (
    ("/proc", "proc", "proc", ("nosuid", "noexec", "nodev")),
    ("/dev", "tmpfs", "tmpfs", ("nosuid", "strictatime", "mode=755", "size=65536k")),
    ("/dev/pts", "devpts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5")),
    ("/dev/shm", "tmpfs", "shm", ("nosuid", "noexec", "nodev", "mode=1777", "size=65536k")),
    ("/dev/mqueue", "mqueue", "mqueue", ("nosuid", "noexec", "nodev")),
    ("/sys", "sysfs", "sysfs", ("nosuid", "noexec", "nodev", "ro")),
    ("/sys/fs/cgroup", "cgroup", "cgroup", ("nosuid", "noexec", "nodev", "relatime", "ro")),
)
MASKED = (
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
)
READ_ONLY = ("/proc/asound", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True)
class Image:
    """A mounted image: its root file system and what starts in it."""

    root: Path
    entrypoint: tuple[str, ...]
    environment: tuple[str, ...]


def oci_config(pod: dict[str, Any], image: Image, volumes: dict[str, Path], known: dict[str, str]) -> dict[str, Any]:
    """Returns the runtime's configuration (config.json of the OCI runtime specification) of the pod's only container.

    ``volumes``: what lies at each volume of the pod. ``known``: values of the fields that its environment names.
    """
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    granted = [f"CAP_{name}" for name in context["capabilities"]["add"]]
    environment = {
        each["name"]: each["value"] if "value" in each else known[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }
    arguments = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], word) for word in container["args"]]
    shared = {"pid": pod["hostPID"], "network": pod["hostNetwork"]}
    mounts = [_mount(each, volumes[each["name"]]) for each in container["volumeMounts"]]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {
                "uid": context["runAsUser"],
                "gid": context["runAsGroup"],
                "additionalGids": [gid for gid in (_group(pod),) if gid],
            },
            "args": [*image.entrypoint, *arguments],
            "env": [*image.environment, *(f"{name}={value}" for name, value in environment.items())],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), granted),
            "noNewPrivileges": False,
            "oomScoreAdj": 990,
        },
        "root": {"path": str(image.root), "readonly": context["readOnlyRootFilesystem"]},
        "hostname": "pod",
        # Sorted, so that a mount below another comes after it.
        "mounts": sorted([*(_default(*each) for each in MOUNTS), *mounts], key=lambda m: m["destination"].count("/")),
        "linux": {
            "namespaces": [
                {"type": kind} for kind in ("mount", "ipc", "uts", "cgroup", "pid", "network") if not shared.get(kind)
            ],
            "resources": {"devices": [{"allow": False, "access": "rwm"}], **_limits(container["resources"]["limits"])},
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
        },
    }


def _group(pod: dict[str, Any]) -> int:
    """Returns the group that the kubelet gives the files of Secrets."""
    return int(pod.get("securityContext", {}).get("fsGroup", 0))


def _default(destination: str, kind: str, source: str, options: tuple[str, ...]) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": list(options)}


def _mount(mount: dict[str, Any], source: Path) -> dict[str, Any]:
    at = source / mount["subPath"] if "subPath" in mount else source
    options = ["rbind", "rprivate", "ro" if mount.get("readOnly") else "rw"]
    return {"destination": mount["mountPath"], "type": "bind", "source": str(at), "options": options}


def _limits(limits: dict[str, str]) -> dict[str, Any]:
    number, unit = re.fullmatch(r"(\d+)(\w+)", limits["memory"]).groups()  # type: ignore[union-attr]
    return {
        "memory": {"limit": int(number) * UNITS[unit]},
        "cpu": {"quota": int(float(limits["cpu"]) * 100_000), "period": 100_000},
    }


@dataclass
class Bundle:
    """A container by runc: ``name``, and the directory of its configuration and volumes."""

    name: str
    base: Path
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self, pod: dict[str, Any], objects: list[dict[str, Any]], image: Image, node: str) -> None:
        """Starts the container; its output goes to the files ``out`` and ``err`` of the directory."""
        self.base.mkdir(exist_ok=True)
        volumes = {each["name"]: self._volume(each, objects, _group(pod)) for each in pod["volumes"]}
        config = oci_config(pod, image, volumes, {"spec.nodeName": node, "status.podIP": "127.0.0.1"})
        config["linux"]["cgroupsPath"] = f"/{self.name}"
        (self.base / "config.json").write_text(json.dumps(config, indent=1))
        with (self.base / "out").open("wb") as out, (self.base / "err").open("wb") as err:
            self.process = subprocess.Popen(
                ["runc", "run", "--bundle", str(self.base), self.name], stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def run(self, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container, as ``kubectl exec`` and the kubelet's probes do."""
        return subprocess.run(
            ["runc", "exec", self.name, *words], capture_output=True, text=True, timeout=seconds, check=False
        )

    def end(self, seconds: float) -> int:
        """Sends SIGTERM and returns the exit status; kills after ``seconds``, as the kubelet does."""
        assert self.process is not None
        subprocess.run(["runc", "kill", self.name, "TERM"], check=False, capture_output=True)
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        finally:
            subprocess.run(["runc", "delete", "--force", self.name], check=False, capture_output=True)

    def text(self, name: str) -> str:
        return (self.base / name).read_text()

    def _volume(self, volume: dict[str, Any], objects: list[dict[str, Any]], group: int) -> Path:
        """Makes what the kubelet makes for a volume."""
        name = volume["name"]
        if host := volume.get("hostPath"):
            path = Path(host["path"])
            if host["type"] == "DirectoryOrCreate":
                path.mkdir(mode=0o755, parents=True, exist_ok=True)
            assert path.is_dir()
            return path
        path = self.base / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        if "emptyDir" in volume:
            path.chmod(0o777)
            return path
        kind = "Secret" if "secret" in volume else "ConfigMap"
        wanted = volume["secret"]["secretName"] if kind == "Secret" else volume["configMap"]["name"]
        (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == wanted]
        for name, text in (found.get("stringData") or found["data"]).items():
            file = path / name
            file.write_text(text)
            if kind == "Secret":
                file.chmod(volume["secret"]["defaultMode"])
                os.chown(file, 0, group)
        return path
