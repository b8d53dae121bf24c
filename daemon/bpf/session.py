"""The loaded objects of a daemon: maps, programs, rings and links, pinned so that they outlive it.

A restarted daemon adopts the pins of the previous daemon: same layout, same maps, same links. The programs of another
version's layout are stopped at once, and the layout is kept as ``foreign``, to be drained by its own description.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from probing.api.errors import AttachError, PrivilegeError
from probing.daemon.bpf import attach, pins, syscalls
from probing.daemon.bpf.btf import dtype_to_json
from probing.daemon.bpf.capabilities import Features, detect
from probing.daemon.bpf.foreign import Foreign, stop_foreign
from probing.daemon.bpf.links import Link, Links, checked_points
from probing.daemon.bpf.loader import Loaded, Loader, plain_object, read_object
from probing.daemon.bpf.maps import Map
from probing.daemon.bpf.pins import PIN_ROOT
from probing.daemon.bpf.ring import Ring

__all__ = ("Foreign", "Link", "Session")

STALE_NS = 60_000_000_000
_CONTROL = struct.Struct("<QIIQ")
# Values of ``paused`` in struct control: a client asked for the pause, or something that ends the pause when it ends.
_ASKED, _HELD = 1, 2
# Returned by real_inode while another thread of this process changes its memory map; the pause between tries, s.
_BUSY, _PAUSE_S, _TRIES = 2, 0.001, 1000


class Session:
    """The loaded objects; ``open`` makes a session. For one thread; only ``heartbeat``, ``counters``, ``identity`` and
    the loading of late objects are safe for any.

    ``adopted``: all objects were pinned already, except the ``refused`` ones. ``blind``: the interval (CLOCK_MONOTONIC
    ns) in which adopted or replaced programs did nothing, since no daemon ran. ``links`` at first holds the links of
    the previous daemon. ``paused_ns``: when the last pause began, also under an earlier daemon, CLOCK_MONOTONIC ns; 0:
    unknown.
    """

    def __init__(self, folder: Path, loader: Loader) -> None:
        self._folder, self._loader, self._loaded = folder, loader, Loaded()
        self._lock = -1
        self._paused = 0
        self._generation = 0
        self.paused_ns = 0
        self._loading, self._identifying = threading.Lock(), threading.Lock()
        self.links = Links(loader)
        self.foreign: list[Foreign] = []
        self.adopted = False
        self.blind: tuple[int, int] | None = None

    @classmethod
    def open(
        cls,
        instance: str,
        objects: Sequence[str | Path],
        pin_root: Path = PIN_ROOT,
        fallback: bool = False,
        constants: Mapping[str, int] | None = None,
        features: Features | None = None,
        sizes: Mapping[str, int] | None = None,
        optional: Sequence[str | Path] = (),
        late: Collection[str] = (),
    ) -> Session:
        """Loads or adopts ``objects`` (names of built objects, or paths), attaches their tracepoints, calls
        ``heartbeat`` and returns the session.

        Objects of ``optional`` come last, and are left out if the kernel refuses them. For objects of ``late`` only the
        maps are made; their programs load when one of them is used, or by ``load_late``.

        ``fallback`` attaches as on kernels without uprobe_multi. The environment variable PROBINGD_WITHOUT lists
        features that are treated as missing, separated by commas. ``constants`` sets ``const volatile`` variables,
        ``sizes`` the bytes of rings and the entries of maps. Raises AttachError, PrivilegeError, StateLocked, NotFound.
        """
        avoided = [name for name in os.environ.get("PROBINGD_WITHOUT", "").split(",") if name]
        usable = (features or detect()).without(*avoided, *(["uprobe_multi"] if fallback else []))
        if not usable.ringbuf:
            raise PrivilegeError("no BPF ring buffer can be made: a right is missing, or the kernel is older than 5.8")
        if not usable.btf:
            raise PrivilegeError("the kernel has no BTF", hint="use a kernel built with CONFIG_DEBUG_INFO_BTF")
        own = ["identity"] if usable.real_inode and usable.test_run else []
        folder = pins.prepare(instance, pin_root)

        extra = dict(read_object(name, usable) for name in optional)
        sources = dict(read_object(name, usable) for name in (*objects, *own)) | extra
        plain = dict(plain_object(name) for name in (*objects, *optional))
        loader = Loader(
            folder, sources, usable, constants or {}, sizes or {}, extra, {name: plain[name] for name in late}
        )
        return cls._opened(folder, loader)

    @classmethod
    def _opened(cls, folder: Path, loader: Loader) -> Session:
        session = cls(folder, loader)
        try:
            session._start()
        except PermissionError as e:
            session.close()
            hint = "the folder of the pins must belong to the collector's user; run `probingd cleanup` as root"
            raise PrivilegeError(f"cannot use the pins in {folder}: {e.strerror}", hint=hint) from e
        except BaseException:
            session.close()
            raise
        return session

    def _start(self) -> None:
        self._lock = pins.take_lock(self._folder)
        self.foreign = stop_foreign(self._folder, self._loader.path)
        self._loader.path.mkdir(exist_ok=True)
        self.adopted = self._loader.load(self._loaded)
        self._describe()
        self._revive()
        self.links.adopt()
        for program, section in self._loaded.sections.items():
            kind, _, tracepoint = section.partition("/")
            if tracepoint and kind in ("raw_tp", "tp_btf") and program not in self._loaded.on_demand:
                self.links.tracepoint(program, self.program(program), tracepoint if kind == "raw_tp" else None)

    def _describe(self) -> None:
        """Writes the layouts of the records into ``meta_v1``, by which another version of the daemon reads them."""
        path = self._loader.path / pins.META
        if not path.exists():
            rings = {name: dtype_to_json(ring.record) for name, ring in self.rings.items()}
            maps = {name: [dtype_to_json(m.key), dtype_to_json(m.value)] for name, m in self.maps.items()}
            pins.write_meta(path, {"rings": rings, "maps": maps})

    def _revive(self) -> None:
        control = self.maps["control"].lookup(0).tobytes()
        heartbeat, self._paused, self._generation, self.paused_ns = _CONTROL.unpack(control)
        self.blind = self._beat(heartbeat or self._inherit())

    def _inherit(self) -> int:
        """Takes over the pause of the version that ran last, whose programs these replace. Returns its last heartbeat,
        or 0.
        """
        controls = [found.maps["control"].lookup(0) for found in self.foreign if "control" in found.maps]
        if not controls:
            return 0
        last = max(controls, key=lambda control: int(control["heartbeat_ns"]))
        self._paused = int(last["paused"])
        self.paused_ns = int(last["paused_ns"]) if "paused_ns" in (last.dtype.names or ()) else 0
        return int(last["heartbeat_ns"])

    @property
    def path(self) -> Path:
        """The folder of the pins."""
        return self._loader.path

    @property
    def features(self) -> Features:
        return self._loader.features

    @property
    def maps(self) -> dict[str, Map]:
        return self._loaded.maps

    @property
    def rings(self) -> dict[str, Ring]:
        return self._loaded.rings

    @property
    def refused(self) -> dict[str, AttachError | PrivilegeError]:
        """Returns the error of each optional object that did not load."""
        return self._loaded.refused

    @property
    def programs(self) -> dict[str, int]:
        """Returns name -> descriptor of the loaded programs."""
        return self._loaded.programs

    def program(self, name: str) -> int:
        """Returns a program's descriptor; a late object is loaded first. Raises NotFound, AttachError,
        PrivilegeError.
        """
        owner = self._loader.owner(name)
        self.load_late(owner)
        if (error := self.refused.get(owner)) is not None:
            raise type(error)(error.message, hint=error.hint)
        return self.programs[name]

    @property
    def late(self) -> frozenset[str]:
        """Returns the late objects whose programs are not loaded yet."""
        return frozenset(self._loaded.late)

    def load_late(self, *names: str) -> None:
        """Loads the programs of the late objects ``names``, or of all late objects if no name is given.

        If the kernel refuses an optional object, ``refused`` has its error afterwards. Raises AttachError,
        PrivilegeError.
        """
        for name in names or sorted(self._loaded.late):
            with self._loading:
                if name in self._loaded.late:
                    self._loader.load_late(name, self._loaded)

    @property
    def paused(self) -> bool:
        return self._paused != 0

    @property
    def pause_asked(self) -> bool:
        """Returns whether a client asked for the pause, perhaps an earlier daemon."""
        return self._paused == _ASKED

    def heartbeat(self) -> tuple[int, int] | None:
        """Records that the daemon runs: programs stop recording 60 s after the last heartbeat.

        Returns the interval (CLOCK_MONOTONIC ns) until now in which they did nothing for this reason, None if there is
        none.
        """
        return self._beat(int(self.maps["control"].lookup(0)["heartbeat_ns"]))

    def _beat(self, last: int) -> tuple[int, int] | None:
        """Does the same as ``heartbeat`` after a heartbeat at ``last``; 0: there was none."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        blind = (last + STALE_NS, now) if last and now > last + STALE_NS else None
        if blind is not None:
            self._renew()
        self.maps["control"].update(0, _CONTROL.pack(now, self._paused, self._generation, self.paused_ns))
        return blind

    def pause(self, paused: bool, *, asked: bool = True) -> None:
        """Switches all programs off (True) or on. A restart and an upgrade keep the state, and whether a client
        ``asked`` for the pause.
        """
        if paused != self.paused:
            self.paused_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) if paused else 0
            self._renew()
        self._paused = (_ASKED if asked else _HELD) if paused else 0
        self.heartbeat()

    def _renew(self) -> None:
        # A new generation voids operations that were in flight when the programs were off: their ends may be missed.
        self._generation = (self._generation + 1) & 0xFFFF_FFFF

    def counters(self) -> dict[str, dict[str, int]]:
        """Returns counters, each summed over the CPUs: ring name -> pushed, lost; "probe:SLOT" -> hits, refused,
        off_ns.
        """
        found: dict[str, dict[str, int]] = {}
        for name in self.rings:
            loss = self.maps[f"{name}_loss"].lookup(0)
            found[name] = {"pushed": int(loss["pushed"].sum()), "lost": int(loss["lost"].sum())}
        slots, hits = self.maps["hits"].items()
        totals = hits["hits"].sum(axis=1)
        for row in totals.nonzero()[0].tolist():
            slot = int(slots[row])
            off_ns = int(self.maps["budgets"].lookup(slot)["off_ns"])
            refused = int(hits["refused"][row].sum())
            found[f"probe:{slot}"] = {"hits": int(totals[row]), "refused": refused, "off_ns": off_ns}
        return found

    def refusals(self, before_ns: int | None = None) -> dict[tuple[int, int], int]:
        """Returns (slot, pid) -> number of refused hits of the probe, counted since the process exceeded its budget.

        The kernel keeps the last 4,096 pairs; a count that is smaller than before was reset. ``before_ns``: only pairs
        whose last refusal was before this time, CLOCK_MONOTONIC ns.
        """
        keys, values = self.maps["process_budgets"].items()
        chosen = values["refused"] > 0
        if before_ns is not None:
            chosen &= values["refused_ns"] < max(before_ns, 0)
        keys, refused = keys[chosen], values["refused"][chosen].tolist()
        return {(int(key["slot"]), int(key["tgid"])): count for key, count in zip(keys, refused, strict=True)}

    def reported_refusals(self, slot: int) -> tuple[int, int]:
        """Returns the number of refused hits of a probe that were reported as losses, and the UTC time of the report,
        ns, or 0.
        """
        reported = self.maps["refusals_reported"].lookup(slot)
        return int(reported["refused"]), int(reported["ts"])

    def set_reported_refusals(self, slot: int, refused: int, ts: int) -> None:
        """Stores the values that ``reported_refusals`` returns, also in the next collector."""
        self.maps["refusals_reported"].update(slot, (refused, ts))

    def set_budget(self, slot: int, hits_a_second: int) -> None:
        """Sets the budget of a probe and switches the probe on. ``hits_a_second``: of one process on one CPU; 0:
        unlimited.
        """
        # refused_ns = now makes the programs check the refusals of each process (``guard_refused_since``).
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self.maps["budgets"].update(slot, (0, hits_a_second, now))

    def run_program(self, name: str, context: bytes) -> int:
        """Runs a raw tracepoint program once, with ``context`` (u64) as its arguments. Returns the program's result."""
        try:
            return syscalls.run_raw_tracepoint(self.program(name), context)
        except OSError as e:
            raise attach.refused(e, f"program {name} cannot be run") from e

    def attach_tracepoint(self, program: str) -> Link:
        """Attaches a tracepoint program marked ON_DEMAND until ``detach`` or the end of this process. A second call
        changes nothing.

        The caller must discard the program's state from an earlier attachment, since attaching begins no new
        generation. Raises AttachError, PrivilegeError, NotFound.
        """
        handle = self.program(program)
        if program not in self.links:
            kind, _, tracepoint = self._loaded.sections[program].partition("/")
            if not tracepoint or kind not in ("raw_tp", "tp_btf"):
                raise AttachError(f"{program} cannot be attached: it is not a program for a tracepoint")
            self.links.tracepoint(program, handle, tracepoint if kind == "raw_tp" else None, pinned=False)
        return self.links[program]

    def attach_uprobe(
        self,
        program: str,
        fd: int,
        offsets: Sequence[int],
        cookie: int | Sequence[int],
        key: str = "",
        *,
        on_return: bool = False,
        pid: int = 0,
    ) -> Link:
        """Attaches ``program`` at file ``offsets`` of the file with descriptor ``fd``, in every process that maps it,
        or in ``pid``.

        ``cookie`` is one number for all offsets or a number for each; its low 16 bits are the probe's slot (below 256).
        The same file, offsets, cookies and ``key`` give the same link, even if an earlier daemon attached it. A link
        for one ``pid`` costs other processes nothing, and ends with this process; Linux 6.6 to 6.9 probe only its main
        thread. Raises AttachError, PrivilegeError, NotFound.
        """
        points = checked_points(program, offsets, cookie)
        status = os.fstat(fd)
        file = (status.st_dev, status.st_ino) if pid else self.identity(fd)
        return self.links.uprobe(program, self.program(program), fd, file, points, key, on_return, pid)

    def identity(self, fd: int) -> tuple[int, int]:
        """Returns (st_dev, st_ino) of the file that probes attach to: for an overlay, of the lower file (Linux 5.17+).

        So a file has the same identity in all mounts that show it. Raises AttachError if the file cannot be mapped, or
        if the mapping cannot be looked up.
        """
        status = os.fstat(fd)
        if "real_inode" in self.programs and status.st_size:
            try:
                mapping = mmap.mmap(fd, 1, mmap.MAP_PRIVATE, mmap.PROT_READ)
            except OSError as e:
                raise attach.refused(e, "the file cannot be mapped") from e
            with mapping:
                # Nothing reads through this mapping, since the file's storage may not answer.
                found = self._real_inode(np.frombuffer(mapping, "u1").ctypes.data)
            if found is not None:
                return found
        return status.st_dev, status.st_ino

    def _real_inode(self, address: int) -> tuple[int, int] | None:
        """Returns (device, inode) of the file mapped at ``address``, None if nothing is mapped there. Raises
        AttachError.
        """
        for _ in range(_TRIES):
            # The program writes into a map that all threads share.
            with self._identifying:
                error = self.run_program("real_inode", struct.pack("<Q", address))
                identity = self.maps["identity"].lookup(0)
            if error != _BUSY:
                # The kernel's internal dev_t: 12 bits of major number, 20 of minor.
                device = int(identity["device"])
                return None if error else (os.makedev(device >> 20, device & 0xFFFFF), int(identity["inode"]))
            time.sleep(_PAUSE_S)
        raise AttachError("a mapped file cannot be identified: this process changes its memory map all the time")

    def detach(self, link: Link) -> None:
        """Ends a link, pinned or not."""
        self.links.end(link)

    def probed_files(self) -> set[tuple[int, int]]:
        """Returns the ``identity`` of each file that has probes for all processes."""
        return {link.file for link in self.links.on_files().values() if link.file is not None}

    def end_file(self, identity: tuple[int, int]) -> None:
        """Ends all links for all processes on a file, so that the kernel releases the file."""
        self.links.end(*(link for link in self.links.on_files().values() if link.file == identity))

    def close(self, keep: bool = True) -> None:
        """Closes all descriptors. ``keep``: the pins, and so the programs, stay for the next daemon."""
        if not keep:
            self.links.end(*self.links.values())
        for link in self.links.values():
            link.release()
        self.links.clear()
        for foreign in self.foreign:
            foreign.close()
        self.foreign.clear()
        self._loaded.close()
        if self._lock >= 0:
            if not keep:
                for layout in pins.layouts(self._folder):
                    pins.remove_layout(layout)
            os.close(self._lock)
            self._lock = -1
