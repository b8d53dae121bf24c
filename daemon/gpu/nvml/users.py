"""Joins processes to devices: by the driver's list, by the PCI address of a NCCL communicator, by the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from probing.daemon.gpu.nvml.visible import Place, own_device
from probing.daemon.source import Identity, ProcessKey

__all__ = ("Users", "Watched", "places_of")

MAX_ADDRESSES = 8
Row = dict[str, Any]
Facts = Mapping[str, Any]


class Watched(Protocol):
    """``processes.discovery.Discovery``."""

    def live(self) -> list[Identity]: ...

    def environ(self, pid: int, start_ns: int) -> Mapping[str, str]:
        """The allowed variables of a watched process."""


def places_of(devices: Mapping[str, Facts]) -> list[Place]:
    """Returns the devices, in the order of their numbers, for ``visible``."""
    places = []
    for key, facts in devices.items():
        names = [str(facts.get("uuid") or "")]
        if facts.get("mig") is not None:
            # The form of drivers before R470.
            names.append("MIG-{parent_uuid}/{gpu_instance}/{compute_instance}".format_map(facts))
        places.append(Place(key, int(facts["device_id"]), facts.get("mig"), tuple(names)))
    return sorted(places, key=lambda place: (place.device_id, -1 if place.mig is None else place.mig))


class Users:
    """``note`` is for the thread that drains, all else for one other thread."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._addresses: dict[ProcessKey, tuple[str, ...]] = {}

    def note(self, batch: pa.RecordBatch) -> None:
        """Takes a batch of comm.communicators: NCCL says which GPU each rank has."""
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
        """Yields a row of gpu.processes for each process and device; ``common``: values of all rows.

        ``listed``: the processes that the driver lists, by device; None where it has no list.
        """
        live = self._watched.live()
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
        places = places_of(devices)
        for who in live:
            if who.pid not in seen and who.role == "trainer":
                for row in self._unlisted(who, devices, places):
                    yield {**row, **common}

    def _unlisted(self, who: Identity, devices: Mapping[str, Facts], places: list[Place]) -> Iterator[Row]:
        """Yields the devices of a trainer that the driver does not list: its pids are those of another namespace."""
        addresses = self._addresses.get(who.key, ())
        found = [key for key, facts in devices.items() if facts.get("bus_id") in addresses and facts.get("mig") is None]
        source = "communicator"
        if not found:
            place = own_device(self._watched.environ(*who.key), places, who.local_rank)
            found, source = [place.key] if place else [], "environment"
        for key in found:
            yield {**_of(devices[key]), **_who(who), "pid": who.pid, "source": source}


def _of(facts: Facts) -> Row:
    return {name: facts.get(name) for name in ("device_id", "uuid", "mig")}


def _who(who: Identity | None) -> Row:
    if who is None:
        return {}
    return {"job": who.job, "run": who.run, "start_ns": who.start_ns, "rank": who.rank, "role": who.role}
