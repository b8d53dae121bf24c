"""Loads objects into the kernel: opens the programs and maps that are already pinned, and loads the rest.

A layout is the folder of pins of one set of objects, constants, features and sizes; its name is a hash of these.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from probing.api.errors import AttachError, NotFound, PrivilegeError
from probing.daemon.bpf import attach, syscalls
from probing.daemon.bpf.capabilities import Features
from probing.daemon.bpf.libbpf import Object
from probing.daemon.bpf.maps import Map
from probing.daemon.bpf.ring import Ring

__all__ = ("ARCHITECTURES", "Loaded", "Loader", "plain_object", "read_object")

_FORMAT = "1"
ARCHITECTURES = {"x86_64": 1, "aarch64": 2}


def read_object(name: str | Path, features: Features) -> tuple[str, bytes]:
    """Returns (name, bytes) of a BPF object in the variant for ``features``. Raises NotFound.

    ``name`` is a name, such as ``lifecycle``, or the path of an object.
    """
    label, path = plain_object(name)
    if features.preempt:
        path = path.with_name(f"{label}.preempt.bpf.o")
    try:
        return label, path.read_bytes()
    except FileNotFoundError as e:
        raise NotFound(f"{path.name} is not built", hint="run `python -m probing.daemon.bpf.build`") from e


def plain_object(name: str | Path) -> tuple[str, Path]:
    """Returns (name, path) of an object's variant that calls no kernel functions. ``name`` as in ``read_object``."""
    path = name if isinstance(name, Path) else Path(__file__).with_name(f"{name}.bpf.o")
    return path.name.removesuffix(".bpf.o"), path


class Loaded:
    """Descriptors of loaded programs and maps. ``sections``: program -> section, which names the attach point.

    ``on_demand``: programs that are not attached at the start. ``refused``: optional objects that did not load.
    ``late``: objects whose maps exist, and whose programs are not loaded yet.
    """

    def __init__(self) -> None:
        self.maps: dict[str, Map] = {}
        self.rings: dict[str, Ring] = {}
        self.programs: dict[str, int] = {}
        self.sections: dict[str, str] = {}
        self.on_demand: set[str] = set()
        self.refused: dict[str, AttachError | PrivilegeError] = {}
        self.late: set[str] = set()

    def close(self) -> None:
        for bpf_map in self.maps.values():
            bpf_map.close()
        for ring in self.rings.values():
            ring.close()
        for fd in self.programs.values():
            os.close(fd)
        for names in (self.maps, self.rings, self.programs, self.sections):
            names.clear()
        self.on_demand.clear()
        self.late.clear()


class Loader:
    """The objects of one session. ``path`` is the folder of their layout, which follows from code and constants.

    ``late``: name -> path (as in ``plain_object``) of each late object.
    """

    def __init__(
        self,
        folder: Path,
        sources: Mapping[str, bytes],
        features: Features,
        constants: Mapping[str, int],
        sizes: Mapping[str, int],
        optional: Collection[str] = (),
        late: Mapping[str, Path] | None = None,
    ) -> None:
        self.features = features
        self._optional = optional
        self._late = late or {}
        self._sizes = sizes
        self._sources = sources
        self._owner: dict[str, str] = {}
        self._constants = {
            "has_cookie": int(features.attach_cookie),
            "target_arch": ARCHITECTURES.get(platform.machine(), 1),
            **constants,
        }
        self.path = folder / self._layout()

    def _layout(self) -> str:
        digest = hashlib.sha256(_FORMAT.encode())
        for name, data in sorted(self._sources.items()):
            digest.update(f"{name}:{len(data)}:".encode() + data)
        settings = (self._constants, asdict(self.features), self._sizes)
        digest.update(repr([sorted(group.items()) for group in settings]).encode())
        return digest.hexdigest()[:16]

    def pin(self, kind: str, name: str) -> Path:
        return self.path / f"{kind}_{name}"

    def load(self, loaded: Loaded) -> bool:
        """Opens pinned programs and maps, then loads and pins the rest, except the programs of late objects. Returns
        whether all were pinned already.
        Raises AttachError, PrivilegeError, OSError.
        """
        adopted = True
        for name in self._sources:
            adopted &= self._load(name, loaded, late=name in self._late)
        return adopted

    def load_late(self, name: str, loaded: Loaded) -> None:
        """Loads the programs of the object ``name``, which ``load`` had left out. Raises the errors of ``load``."""
        self._load(name, loaded, late=False)
        loaded.late.discard(name)

    def copy(self, program: str, cookie: int) -> int:
        """Returns the descriptor of a copy of ``program`` with ``cookie`` as a constant and the same maps."""
        owner = self._owner[program]
        with Object(owner, self._sources[owner]) as bpf_object:
            self._make_ready(bpf_object, [program], {**self._constants, "has_cookie": 0, "fixed_cookie": cookie})
            bpf_object.load()
            return bpf_object.program_fd(program)

    def owner(self, program: str) -> str:
        """Returns the name of the object that contains a program. Raises NotFound."""
        try:
            return self._owner[program]
        except KeyError as e:
            raise NotFound(f"no object has a program {program}") from e

    def _load(self, name: str, loaded: Loaded, *, late: bool) -> bool:
        """Opens or loads the object ``name``. Returns whether all its programs and maps were pinned already."""
        with self._open(name, late=late) as bpf_object:
            try:
                missing = self._missing(name, bpf_object)
                if missing is not None:
                    self._complete(bpf_object, () if late else missing)
            except (AttachError, PrivilegeError) as e:
                if name not in self._optional:
                    raise
                loaded.refused[name] = e
                return True
            if late and missing:
                loaded.late.add(name)
            self._collect(bpf_object, loaded)
            for program in () if late and missing else bpf_object.sections:
                loaded.programs[program] = syscalls.object_get(self.pin("prog", program))
        return missing is None

    def _open(self, name: str, *, late: bool) -> Object:
        if not late:
            return Object(name, self._sources[name])
        # Reading the kernel's types takes 10 ms. Calls of kernel functions need these types; maps do not.
        path = self._late[name]
        return Object(name, path.read_bytes(), types=path)

    def _missing(self, name: str, bpf_object: Object) -> list[str] | None:
        """Returns the programs that are not pinned, None if all programs and maps of the object are pinned."""
        for program in bpf_object.sections:
            if self._owner.setdefault(program, name) != name:
                raise AttachError(f"program {program} is in both {name} and {self._owner[program]}")
        missing = [p for p in bpf_object.sections if not self.pin("prog", p).exists()]
        return missing if missing or not all(self.pin("map", m).exists() for m in bpf_object.maps) else None

    def _complete(self, bpf_object: Object, programs: Sequence[str]) -> None:
        self._make_ready(bpf_object, programs, self._constants)
        bpf_object.load()
        for program in programs:
            self._pin_program(bpf_object, program)

    def _pin_program(self, bpf_object: Object, program: str) -> None:
        fd = bpf_object.program_fd(program)
        try:
            syscalls.object_pin(self.pin("prog", program), fd)
        except OSError as e:
            raise attach.refused(e, f"program {program} cannot be pinned") from e
        finally:
            os.close(fd)

    def _make_ready(self, bpf_object: Object, programs: Sequence[str], constants: Mapping[str, int]) -> None:
        bpf_object.set_constants(constants)
        for program, section in bpf_object.sections.items():
            if program not in programs:
                bpf_object.skip(program)
            elif self.features.uprobe_multi and section.startswith(("uprobe", "uretprobe")):
                bpf_object.set_attach_type(program, syscalls.UPROBE_MULTI)
        for map_name in bpf_object.maps:
            bpf_object.pin_map(map_name, self.pin("map", map_name))
            if not self.features.growing_maps:
                bpf_object.preallocate(map_name)
            if map_name in self._sizes:
                bpf_object.resize(map_name, self._sizes[map_name])

    def _collect(self, bpf_object: Object, loaded: Loaded) -> None:
        loaded.sections.update(bpf_object.sections)
        # ON_DEMAND() of guard.bpf.h defines these variables.
        variables = bpf_object.btf.variables(".rodata")
        loaded.on_demand.update(program for program in bpf_object.sections if f"{program}_on_demand" in variables)
        for name in bpf_object.maps:
            if name in loaded.maps or name in loaded.rings:
                continue
            fd = syscalls.object_get(self.pin("map", name))
            if name in bpf_object.rings:
                loaded.rings[name] = Ring.open(name, fd, bpf_object.btf.record(name))
            else:
                loaded.maps[name] = Map(name, fd, *bpf_object.btf.map_types(name))
