"""The loaded objects of a daemon: maps, programs, rings and links, pinned so that they outlive it.

A restart finds what the daemon before it pinned and goes on with it: same layout, same maps, same links. A layout of
another version is stopped at once, and handed out as ``foreign`` to be drained by its own description.
"""

from __future__ import annotations

import hashlib
import os
import platform
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probing.api.errors import AttachError, FormatError, NotFound, PrivilegeError
from probing.daemon.bpf import attach, pins, syscalls
from probing.daemon.bpf.btf import dtype_from_json, dtype_to_json
from probing.daemon.bpf.capabilities import Features, detect
from probing.daemon.bpf.libbpf import Object
from probing.daemon.bpf.maps import Map
from probing.daemon.bpf.pins import PIN_ROOT
from probing.daemon.bpf.ring import Ring

__all__ = ("Foreign", "Link", "Session", "object_path")

STALE_NS = 60_000_000_000
_FORMAT = "1"
_CONTROL = struct.Struct("<QII")
_ARCHITECTURES = {"x86_64": 1, "aarch64": 2}


@dataclass(slots=True)
class Link:
    """A program placed on a file. ``adopted``: the daemon before this one placed it."""

    name: str
    adopted: bool
    fds: list[int] = field(default_factory=list)
    pins: list[Path] = field(default_factory=list)

    def detach(self) -> None:
        """End it, pinned or not."""
        for path in self.pins:
            path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Close our descriptors; what is pinned stays placed."""
        while self.fds:
            os.close(self.fds.pop())


@dataclass(slots=True)
class Foreign:
    """A layout of another version, already stopped: read ``rings`` to their end, ``maps`` too, then ``remove``."""

    name: str
    path: Path
    rings: dict[str, Ring]
    maps: dict[str, Map]

    def close(self) -> None:
        for item in (*self.rings.values(), *self.maps.values()):
            item.close()

    def remove(self) -> None:
        self.close()
        pins.remove_layout(self.path)


def object_path(name: str | Path) -> Path:
    """``lifecycle`` -> the built object beside this file. Raises NotFound."""
    path = name if isinstance(name, Path) else Path(__file__).with_name(f"{name}.bpf.o")
    if not path.is_file():
        raise NotFound(f"{path.name} is not built", hint="run `python -m probing.daemon.bpf.build`")
    return path


class Session:
    """Made by ``open``. Not safe for two threads, but ``heartbeat`` and ``counters`` may come from any."""

    def __init__(self, folder: Path, sources: Mapping[str, bytes], features: Features, constants: Mapping[str, int]):
        self.features = features
        self.maps: dict[str, Map] = {}
        self.rings: dict[str, Ring] = {}
        self.programs: dict[str, int] = {}
        self.links: dict[str, Link] = {}
        self.foreign: list[Foreign] = []
        self.adopted = False
        self.blind: tuple[int, int] | None = None
        """The interval (CLOCK_MONOTONIC ns) in which adopted programs did nothing, since nobody listened."""
        self._sources, self._folder = sources, folder
        self._constants = {
            "has_cookie": int(features.attach_cookie),
            "has_preempt": int(features.preempt),
            "target_arch": _ARCHITECTURES.get(platform.machine(), 1),
            **constants,
        }
        self._sections: dict[str, str] = {}
        self._owner: dict[str, str] = {}
        self._paused = False
        self._lock = -1
        self.path = folder / self._layout()

    @classmethod
    def open(
        cls,
        instance: str,
        objects: Sequence[str | Path],
        pin_root: Path = PIN_ROOT,
        fallback: bool = False,
        constants: Mapping[str, int] | None = None,
        features: Features | None = None,
    ) -> Session:
        """Load ``objects`` (names of built objects, or paths) or adopt them, attach their tracepoints, and beat once.

        ``fallback`` takes the road of kernels without uprobe_multi, as does PROBINGD_FORCE_FALLBACK=1. ``constants``
        sets ``const volatile`` variables. Raises AttachError, PrivilegeError, StateLocked, NotFound.
        """
        sources = {path.name.removesuffix(".bpf.o"): path.read_bytes() for path in map(object_path, objects)}
        found = features or detect()
        if fallback or os.environ.get("PROBINGD_FORCE_FALLBACK") == "1":
            found = found.without_multi()
        if not found.ringbuf:
            raise PrivilegeError("no BPF ring buffer can be made: rights or kernel (5.8) are missing")
        if not found.btf:
            raise PrivilegeError("the kernel has no BTF", hint="use a kernel built with CONFIG_DEBUG_INFO_BTF")
        session = cls(pins.prepare(instance, pin_root), sources, found, constants or {})
        try:
            session._start()
        except BaseException:
            session.close(keep=True)
            raise
        return session

    def _layout(self) -> str:
        digest = hashlib.sha256(_FORMAT.encode())
        for name, data in sorted(self._sources.items()):
            digest.update(f"{name}:{len(data)}:".encode() + data)
        digest.update(repr((sorted(self._constants.items()), self.features.uprobe_multi)).encode())
        return digest.hexdigest()[:16]

    def _start(self) -> None:
        self._lock = pins.take_lock(self._folder)
        try:
            self._stop_foreign()
            self.path.mkdir(exist_ok=True)
            for name, data in self._sources.items():
                with Object(name, data) as found:
                    self._take(name, found)
            self._describe()
            self._revive()
            for program, section in self._sections.items():
                self._attach_tracepoint(program, section)
        except PermissionError as e:
            hint = "the folder of the pins must belong to the collector's user; run `probingd cleanup` as root"
            raise PrivilegeError(f"cannot use the pins in {self._folder}: {e.strerror}", hint=hint) from e

    def _take(self, name: str, found: Object) -> None:
        """The programs and maps of one object: those pinned, or new ones on the maps that are pinned."""
        self._sections.update(found.sections)
        for program in found.sections:
            if self._owner.setdefault(program, name) != name:
                raise AttachError(f"program {program} is in both {name} and {self._owner[program]}")
        missing = [p for p in found.sections if not self._pin("prog", p).exists()]
        if missing or not all(self._pin("map", m).exists() for m in found.maps):
            self._load(found, missing)
        else:
            self.adopted = True
        for program in found.sections:
            self.programs[program] = syscalls.object_get(self._pin("prog", program))
        for map_name in found.maps:
            if map_name in self.maps or map_name in self.rings:
                continue
            fd = syscalls.object_get(self._pin("map", map_name))
            if map_name in found.rings:
                self.rings[map_name] = Ring.open(map_name, fd, found.btf.record(map_name))
            else:
                self.maps[map_name] = Map(map_name, fd, *found.btf.map_types(map_name))

    def _load(self, found: Object, programs: Sequence[str]) -> None:
        self._make_ready(found, programs, self._constants)
        found.load()
        for program in programs:
            fd = found.program_fd(program)
            try:
                syscalls.object_pin(self._pin("prog", program), fd)
            except OSError as e:
                raise attach.refused(e, f"program {program} cannot be pinned") from e
            finally:
                os.close(fd)

    def _make_ready(self, found: Object, programs: Sequence[str], constants: Mapping[str, int]) -> None:
        found.set_constants(constants)
        for program, section in found.sections.items():
            if program not in programs:
                found.skip(program)
            elif self.features.uprobe_multi and section.startswith(("uprobe", "uretprobe")):
                found.set_attach_type(program, syscalls.UPROBE_MULTI)
        for map_name in found.maps:
            found.pin_map(map_name, self._pin("map", map_name))

    def _pin(self, kind: str, name: str) -> Path:
        return self.path / f"{kind}_{name}"

    def _describe(self) -> None:
        """Leave word of the records for a later version."""
        if self._pin("meta", "v1").exists():
            return
        rings = {name: dtype_to_json(ring.record) for name, ring in self.rings.items()}
        maps = {name: [dtype_to_json(m.key), dtype_to_json(m.value)] for name, m in self.maps.items()}
        pins.write_meta(self._pin("meta", "v1"), {"rings": rings, "maps": maps})

    def _stop_foreign(self) -> None:
        for layout in pins.layouts(self._folder):
            if layout != self.path:
                pins.remove_links(layout)
                foreign = _open_foreign(layout)
                if foreign is None:
                    pins.remove_layout(layout)
                else:
                    self.foreign.append(foreign)

    def _revive(self) -> None:
        heartbeat, paused, _ = _CONTROL.unpack(self.maps["control"].lookup(0).tobytes())
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        if heartbeat and now > heartbeat + STALE_NS:
            self.blind = (heartbeat + STALE_NS, now)
        self._paused = bool(paused)
        self.heartbeat()

    def heartbeat(self) -> None:
        """Programs do nothing when this was not called for 60 s."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self.maps["control"].update(0, _CONTROL.pack(now, int(self._paused), 0))

    def pause(self, paused: bool) -> None:
        """Switch all programs off, or on again; a restart keeps it."""
        self._paused = paused
        self.heartbeat()

    @property
    def paused(self) -> bool:
        return self._paused

    def counters(self) -> dict[str, dict[str, int]]:
        """Sums over the CPUs: a ring's name -> pushed, lost; "probe:SLOT" -> hits, refused, off_ns."""
        found: dict[str, dict[str, int]] = {}
        for name in self.rings:
            loss = self.maps[f"{name}_loss"].lookup(0)
            found[name] = {"pushed": int(loss["pushed"].sum()), "lost": int(loss["lost"].sum())}
        slots, hits = self.maps["hits"].items()
        off = dict(zip(*(column.tolist() for column in self.maps["budgets"].items()), strict=True))
        for slot, hit in zip(slots.tolist(), hits, strict=True):
            if total := int(hit["hits"].sum()):
                off_ns = int(off.get(slot, (0, 0))[0])
                found[f"probe:{slot}"] = {"hits": total, "refused": int(hit["refused"].sum()), "off_ns": off_ns}
        return found

    def set_budget(self, slot: int, hits_a_second: int) -> None:
        """Let a probe be hit so often in a second on one CPU, 0 for ever, and switch it on if it was off."""
        self.maps["budgets"].update(slot, (0, hits_a_second))

    def run_program(self, name: str, context: bytes) -> int:
        """Run a raw tracepoint program once, with ``context`` (u64 arguments) as its own; returns what it returned."""
        try:
            return syscalls.run_raw_tracepoint(self.programs[name], context)
        except OSError as e:
            raise attach.refused(e, f"program {name} cannot be run") from e

    def attach_uprobe(
        self,
        program: str,
        fd: int,
        offsets: Sequence[int],
        cookie: int | Sequence[int],
        key: str = "",
        *,
        on_return: bool = False,
    ) -> Link:
        """Place ``program`` at file ``offsets`` of the file open at ``fd``, in every process that maps it.

        ``cookie`` is one number for all offsets or one each; its low 16 bits are the probe's slot (below 1024).
        The same file, offsets, cookies and ``key`` give the same link, whichever daemon placed it.
        Raises AttachError, PrivilegeError.
        """
        cookies = [cookie] * len(offsets) if isinstance(cookie, int) else list(cookie)
        if len(cookies) != len(offsets) or not offsets:
            raise AttachError(f"{program}: {len(offsets)} offsets, {len(cookies)} cookies")
        status = os.fstat(fd)
        # The kernel holds the inode while a probe is on it, so its number is not given to another file.
        what = hashlib.sha256(repr((list(offsets), cookies, key, on_return)).encode()).hexdigest()[:16]
        name = f"{program}-{status.st_dev:x}-{status.st_ino:x}-{what}"
        if name in self.links:
            return self.links[name]
        link = Link(name, adopted=True)
        try:
            self._place(link, program, fd, list(zip(offsets, cookies, strict=True)), on_return)
        except OSError as e:
            link.detach()
            raise attach.refused(e, f"{program} cannot be attached") from e
        except BaseException:
            link.detach()
            raise
        self.links[name] = link
        return link

    def detach(self, link: Link) -> None:
        """End a link."""
        link.detach()
        self.links.pop(link.name, None)

    def _place(self, link: Link, program: str, fd: int, points: list[tuple[int, int]], on_return: bool) -> None:
        if self.features.uprobe_multi:
            offsets, cookies = [o for o, _ in points], [c for _, c in points]
            handle = self.programs[program]
            self._join(link, 0, lambda: attach.attach_multi(handle, fd, offsets, cookies, on_return))
            return
        for part, (offset, cookie) in enumerate(points):
            if self.features.perf_link:
                handle = self.programs[program] if self.features.attach_cookie else self._copy(program, cookie)
                self._join(link, part, lambda h=handle, o=offset, c=cookie: attach.attach_perf(h, fd, o, c, on_return))
            else:
                copy = self._copy(program, cookie)
                link.adopted = False
                link.fds.append(attach.attach_perf_by_ioctl(copy, fd, offset, on_return))
                os.close(copy)

    def _join(self, link: Link, part: int, place: Any) -> None:
        """Adopt the pinned link, or place a new one and pin it."""
        path = self._pin("link", f"{link.name}-{part}")
        try:
            link.fds.append(syscalls.object_get(path))
        except FileNotFoundError:
            handle = place()
            link.adopted = False
            link.fds.append(handle)
            syscalls.object_pin(path, handle)
        link.pins.append(path)

    def _copy(self, program: str, cookie: int) -> int:
        """A copy of a program with its cookie built in, on the same maps."""
        owner = self._owner[program]
        with Object(owner, self._sources[owner]) as found:
            self._make_ready(found, [program], {**self._constants, "has_cookie": 0, "fixed_cookie": cookie})
            found.load()
            return found.program_fd(program)

    def _attach_tracepoint(self, program: str, section: str) -> None:
        """``raw_tp/NAME`` and ``tp_btf/NAME`` are attached; ``raw_tp`` alone is for ``run_program``."""
        kind, _, tracepoint = section.partition("/")
        if not tracepoint or kind not in ("raw_tp", "tp_btf"):
            return
        link = Link(program, adopted=True)
        target = tracepoint if kind == "raw_tp" else None
        try:
            self._join(link, 0, lambda: syscalls.open_raw_tracepoint(self.programs[program], target))
        except OSError as e:
            raise attach.refused(e, f"{program} cannot be attached") from e
        self.links[program] = link

    def close(self, keep: bool = True) -> None:
        """Let go of everything. ``keep`` leaves the pins, and so the programs, to the next daemon."""
        for link in self.links.values():
            if keep:
                link.release()
            else:
                link.detach()
        for foreign in self.foreign:
            foreign.close()
        for item in (*self.maps.values(), *self.rings.values()):
            item.close()
        for fd in self.programs.values():
            os.close(fd)
        if not keep and self._lock >= 0:
            for layout in pins.layouts(self._folder):
                pins.remove_layout(layout)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        for collection in (self.links, self.maps, self.rings, self.programs):
            collection.clear()  # type: ignore[attr-defined]
        self.foreign.clear()


def _open_foreign(layout: Path) -> Foreign | None:
    """None for one that never came so far as to run: nothing is in it."""
    foreign = Foreign(layout.name, layout, {}, {})
    try:
        meta = pins.read_meta(layout / "meta_v1")
        for name, record in meta["rings"].items():
            fd = syscalls.object_get(layout / f"map_{name}")
            foreign.rings[name] = Ring.open(name, fd, dtype_from_json(record))
        for name, (key, value) in meta["maps"].items():
            fd = syscalls.object_get(layout / f"map_{name}")
            foreign.maps[name] = Map(name, fd, dtype_from_json(key), dtype_from_json(value))
    except FileNotFoundError:
        foreign.close()
        return None
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        foreign.close()
        raise FormatError(f"the pins of layout {layout.name} cannot be read", hint="run `probingd cleanup`") from e
    return foreign
