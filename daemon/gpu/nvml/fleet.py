"""The GPU devices of the node: their facts, and which of them are lost or gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probing.api.tables.schema import Row
from probing.daemon.gpu.nvml.session import Content

__all__ = ("Fleet",)

MAX_DEVICES = 1_024
_PCIE = {
    "pcie_width": "width",
    "pcie_width_max": "width_max",
    "pcie_gen": "generation",
    "pcie_gen_max": "generation_max",
}
_SHARED = ("numa_node", "cpu_list", *_PCIE)


class Fleet:
    """The GPU devices of the node. ``devices``: columns of gpu.devices by key. Any thread may call ``rows``; only one
    thread calls the other methods.
    """

    def __init__(self) -> None:
        self.devices: Mapping[str, Row] = {}
        self.lost: Mapping[int, str] = {}
        self.backend = "cuda"
        self._driver: Row = {}
        # GPUs that are not listed any more. Another GPU may have their number now.
        self._gone: list[Row] = []
        # The uuids of GPUs that were lost and have not answered since, by number; None: unknown.
        self._missing: dict[int, str | None] = {}

    @property
    def known(self) -> bool:
        """Whether the last list of devices has a device."""
        return bool(self.devices)

    @property
    def uuids(self) -> dict[str, str | None]:
        """The uuid of each device by key. A key is made of numbers, which another device can get later."""
        return {key: facts.get("uuid") for key, facts in self.devices.items()}

    @property
    def detail(self) -> str:
        gpus = sum(facts.get("mig") is None for facts in self.devices.values())
        migs = len(self.devices) - gpus
        driver = self._driver.get("driver_version")
        text = f"{gpus} GPUs" + (f", {migs} MIG devices" if migs else "")
        return f"{text}, driver {driver}" if driver else text if self.devices else ""

    def take(self, content: Content) -> dict[int, str | None]:
        """Stores an answer. Returns the changes since the last answer, by the number of the GPU: why a GPU was lost,
        or None for a GPU that answers again.
        """
        if "devices" in content:
            self._take_devices(content)
        before, now = self.lost, {int(n): text[:200] for n, text in content.get("lost", {}).items()}
        self.lost = now
        changes: dict[int, str | None] = {number: text for number, text in now.items() if number not in before}
        self._missing |= {number: self.gpu_row(str(number)).get("uuid") for number in changes if number < MAX_DEVICES}
        return changes | dict.fromkeys(self._take_back())

    def gpu_row(self, key: str) -> Row:
        """Returns device_id and uuid of a device for an event; empty for an unknown device."""
        number = int(key) if key.isdecimal() and len(key) < 4 else None
        facts = self.devices.get(key) or next((facts for facts in self._gone if facts.get("device_id") == number), None)
        if facts is None:
            return {} if number is None else {"device_id": number}
        return {"device_id": facts.get("device_id"), "uuid": facts.get("uuid")}

    def add_pcie(self, key: str, link: Mapping[str, Any]) -> None:
        """Adds columns of ``link``, a row of a PCIe link, to the facts of its GPU and of the MIG devices on the GPU."""
        found = {name: link.get(column) for name, column in _PCIE.items()}
        found |= {name: link.get(name) for name in ("numa_node", "cpu_list")}
        number = (self.devices.get(key) or {}).get("device_id")
        self.devices = {
            other: {**facts, **found} if facts.get("device_id") == number else facts
            for other, facts in self.devices.items()
        }

    def rows(self, node: str, ts_ns: int) -> list[Row]:
        """Returns the rows of gpu.devices."""
        common = {"node": node, "ts": ts_ns, "backend": self.backend, **self._driver}
        devices, gone, lost = self.devices, self._gone, self.lost
        numbers = {int(facts["device_id"]) for facts in devices.values()}
        rows = []
        for facts, listed in [*((facts, False) for facts in gone), *((facts, True) for facts in devices.values())]:
            number = int(facts["device_id"])
            reason = lost.get(number) if listed or number not in numbers else None
            state = "lost" if reason else "ok" if listed else "gone"
            text = "the driver does not list the device any more" if state == "gone" else reason
            total = facts.get("total_bytes")
            rows.append({**facts, **common, "total_mem_bytes": total, "state": state, "reason": text})
        return sorted(rows, key=lambda row: (row["device_id"], -1 if row.get("mig") is None else row["mig"]))

    def _take_back(self) -> list[int]:
        """Returns the numbers of the GPUs that were missing and answer again."""
        numbers = {facts["device_id"]: facts.get("uuid") for facts in self.devices.values() if facts.get("mig") is None}
        back = []
        for lost_number, uuid in list(self._missing.items()):
            number = next((n for n, other in numbers.items() if (other == uuid if uuid else n == lost_number)), None)
            if number is not None and number not in self.lost:
                del self._missing[lost_number]
                back.append(number)
        return back

    def _take_devices(self, content: Content) -> None:
        fresh = {str(facts["device"]): dict(facts) for facts in content["devices"][:MAX_DEVICES]}
        for key, facts in fresh.items():
            # A lost GPU is listed without the facts that only the GPU itself can give: the earlier facts are kept.
            facts.pop("device")
            old = self.devices.get(key) or {}
            if old.get("uuid") == facts.get("uuid"):
                fresh[key] = {**{name: old.get(name) for name in _SHARED}, **old, **facts}
        uuids = {facts.get("uuid") for facts in fresh.values()}
        before = [*self._gone, *self.devices.values()]
        # MIG devices that are gone are dropped: they come and go whenever their GPU is divided in another way.
        gone = [facts for facts in before if facts.get("uuid") not in uuids and facts.get("mig") is None]
        self._gone = gone[:MAX_DEVICES]
        self.devices = fresh
        self.backend = content.get("backend", "cuda")[:32]
        self._driver = {name: content.get("driver", {}).get(name) for name in ("driver_version", "cuda_version")}
