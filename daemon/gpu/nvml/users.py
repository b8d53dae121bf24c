"""Finds the GPUs that processes use, from the driver's list, the PCI address of a NCCL communicator, or the
environment.

CUDA_VISIBLE_DEVICES: CUDA C++ Programming Guide, "CUDA Environment Variables"; indices count the devices that the
container shows. NVIDIA_VISIBLE_DEVICES: NVIDIA Container Toolkit, "Enumerating GPUs".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from probing.api.tables.schema import Row
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.liveness import is_alive
from probing.daemon.source import Identity, ProcessKey

__all__ = (
    "Place",
    "Users",
    "own_device",
    "visible_devices",
)

MAX_TEXT, MAX_DEVICES = 4_096, 128


class Place(NamedTuple):
    """A GPU (``mig`` None) or a MIG device. ``names``: its UUID and older forms of the UUID."""

    key: str
    device_id: int
    mig: int | None
    names: tuple[str, ...]


def visible_devices(environ: Mapping[str, str], places: Sequence[Place]) -> list[Place]:
    """Returns the devices that CUDA shows to a process, in CUDA's order; MIG devices replace a GPU in MIG mode."""
    shown = _in_container(environ.get("NVIDIA_VISIBLE_DEVICES"), places)
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return _usable(shown)
    found: list[Place] = []
    for word in _words(text):
        place = _named(word, shown) or _numbered(word, shown)
        # CUDA ignores the first unknown entry and all entries after it.
        if place is None or place in found:
            break
        found.append(place)
    return found


def own_device(environ: Mapping[str, str], places: Sequence[Place], local_rank: int | None) -> Place | None:
    """Returns the device of a rank: the only visible device, or, by convention, the device whose number is the local
    rank.

    None if no variable of the environment names devices: the process may use no device.
    """
    if "CUDA_VISIBLE_DEVICES" not in environ and "NVIDIA_VISIBLE_DEVICES" not in environ:
        return None
    found = visible_devices(environ, places)
    if len(found) == 1:
        return found[0]
    return found[local_rank] if local_rank is not None and 0 <= local_rank < len(found) else None


def _in_container(text: str | None, places: Sequence[Place]) -> list[Place]:
    """Returns the devices that a container shows if NVIDIA_VISIBLE_DEVICES is ``text``; all if ``text`` names none."""
    words = _words(text or "all")
    if not words or words[0] in ("all", "none", "void"):
        return list(places)
    found = []
    for word in words:
        gpu, colon, mig = word.partition(":")
        if colon and gpu.isdecimal() and mig.isdecimal():
            # The entry is GPU:MIG, both as numbers.
            found += [p for p in places if (str(p.device_id), str(p.mig)) == (gpu, mig)]
        elif (place := _named(word, places) or _numbered(word, places)) is not None:
            found += [p for p in places if p == place or (place.mig is None and p.device_id == place.device_id)]
    # The container numbers its devices in the order of the host.
    return [place for place in places if place in found] or list(places)


def _usable(places: Sequence[Place]) -> list[Place]:
    split = {place.device_id for place in places if place.mig is not None}
    return [place for place in places if place.mig is not None or place.device_id not in split]


def _named(word: str, places: Sequence[Place]) -> Place | None:
    """Returns the device whose name begins with ``word``; if it is a GPU in MIG mode, its first MIG device. None unless
    exactly one device matches.
    """
    if not word.startswith(("GPU-", "MIG-")):
        return None
    found = {place.key: place for place in places for name in place.names if name.startswith(word)}
    if len(found) != 1:
        return None
    (place,) = found.values()
    return _first_part(place, places)


def _numbered(word: str, places: Sequence[Place]) -> Place | None:
    if not word.isdecimal() or len(word) > 6:
        return None
    gpus = sorted({place.device_id for place in places})
    if int(word) >= len(gpus):
        return None
    of_gpu = [place for place in places if place.device_id == gpus[int(word)]]
    return _first_part(next((place for place in of_gpu if place.mig is None), of_gpu[0]), places)


def _first_part(place: Place, places: Sequence[Place]) -> Place:
    parts = (other for other in places if other.device_id == place.device_id and other.mig is not None)
    return place if place.mig is not None else next(parts, place)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text[:MAX_TEXT].split(",")[:MAX_DEVICES] if word.strip()]


MAX_ADDRESSES = 8
# If GPU addresses of more than this many processes are kept, those of ended processes are dropped.
MANY = 1_024
Facts = Mapping[str, Any]


def _places_of(devices: Mapping[str, Facts]) -> list[Place]:
    """Returns the devices by number, as places for ``visible_devices``."""
    places = []
    for key, facts in devices.items():
        names = [str(facts.get("uuid") or "")]
        if facts.get("mig") is not None:
            # The form of MIG names in drivers before R470.
            names.append("MIG-{parent_uuid}/{gpu_instance}/{compute_instance}".format_map(facts))
        places.append(Place(key, int(facts["device_id"]), facts.get("mig"), tuple(names)))
    return sorted(places, key=lambda place: (place.device_id, -1 if place.mig is None else place.mig))


class Users:
    """Finds the processes that use devices. The draining thread calls ``note``, one other thread all other methods."""

    def __init__(self, watched: Discovery) -> None:
        self._watched = watched
        self._addresses: dict[ProcessKey, tuple[str, ...]] = {}
        self._many = MANY
        # The devices at the last call of ``rows``.
        self._places: list[Place] = []
        # For each process: the environment and the local rank from which its device was derived, and the device.
        self._own: dict[ProcessKey, tuple[Mapping[str, str], int | None, Place | None]] = {}

    def note(self, batch: pa.RecordBatch) -> None:
        """Reads a batch of comm.communicators, in which NCCL names the GPU of each rank."""
        if "bus_id" not in batch.schema.names:
            return
        for row in batch.select(["pid", "start_ns", "bus_id"]).to_pylist():
            if row["bus_id"] and row["start_ns"] is not None:
                key = ProcessKey(int(row["pid"]), int(row["start_ns"]))
                known = self._addresses.get(key, ())
                if row["bus_id"].lower() not in known and len(known) < MAX_ADDRESSES:
                    self._addresses[key] = (*known, row["bus_id"].lower())

    def forget(self, pid: int, start_ns: int) -> None:
        self._addresses.pop(ProcessKey(pid, start_ns), None)

    def rows(
        self, devices: Mapping[str, Facts], listed: Mapping[str, Sequence[Row] | None], common: Row
    ) -> Iterator[Row]:
        """Yields a row of gpu.processes for each process and device; ``common``: values that all rows share.

        ``listed``: the processes that the driver lists, by device; None if it has no list.
        """
        live = self._watched.live()
        self._drop_ended(live)
        by_pid = {who.pid: who for who in live}
        seen: set[int] = set()
        for key, entries in listed.items():
            if not entries or key not in devices:
                continue
            shared = {**_of(devices[key]), **common, "source": "driver"}
            for entry in entries:
                pid = int(entry["pid"])
                seen.add(pid)
                yield {**entry, **shared, **_who(by_pid.get(pid))}
        places = _places_of(devices)
        if places != self._places:
            self._places = places
            self._own.clear()
        for ended in self._own.keys() - {who.key for who in live}:
            del self._own[ended]
        for who in live:
            if who.pid not in seen and who.role == "trainer":
                for row in self._unlisted(who, devices):
                    yield {**row, **common}

    def _drop_ended(self, live: Sequence[Identity]) -> None:
        """Drops the addresses of processes that have ended, if there are many. Nobody reports the exit of a process
        that was never identified, and a communicator can come after the exit.
        """
        if len(self._addresses) <= self._many:
            return
        watched = {who.key for who in live}
        for key in list(self._addresses):
            if key not in watched and not is_alive(*key):
                self.forget(*key)
        self._many = max(MANY, 2 * len(self._addresses))

    def _unlisted(self, who: Identity, devices: Mapping[str, Facts]) -> Iterator[Row]:
        """Yields rows for the devices of a trainer that the driver does not list, because the driver's pids and the
        daemon's pids belong to different namespaces.
        """
        addresses = self._addresses.get(who.key, ())
        found = [key for key, facts in devices.items() if facts.get("bus_id") in addresses and facts.get("mig") is None]
        source = "communicator"
        if not found:
            place = self._own_device(who)
            found, source = [place.key] if place else [], "environment"
        for key in found:
            yield {**_of(devices[key]), **_who(who), "pid": who.pid, "source": source}

    def _own_device(self, who: Identity) -> Place | None:
        """Returns ``own_device`` of a process, computed once: a hostile environment takes milliseconds."""
        environ = self._watched.environ(*who.key)
        before = self._own.get(who.key)
        if before is not None and before[:2] == (environ, who.local_rank):
            return before[2]
        place = own_device(environ, self._places, who.local_rank)
        self._own[who.key] = environ, who.local_rank, place
        return place


def _of(facts: Facts) -> Row:
    return {name: facts.get(name) for name in ("device_id", "uuid", "mig")}


def _who(who: Identity | None) -> Row:
    if who is None:
        return {}
    return {"job": who.job, "run": who.run, "start_ns": who.start_ns, "rank": who.rank, "role": who.role}
