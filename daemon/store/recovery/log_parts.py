"""Recovers the log: scans its parts, cuts off bad tails, and finds gaps between them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from probing.api.errors import FormatError
from probing.daemon.source import Loss
from probing.daemon.store.format import NewerFormat
from probing.daemon.store.log.parts import TORN, ScannedPart, part_path, scan_part
from probing.daemon.store.log.records import ShortHeader
from probing.daemon.store.recovery.directory import Directory, Recovered

__all__ = ("scan_log", "take_parts")


def scan_log(directory: Directory, numbers: Sequence[int], found: Recovered) -> list[ScannedPart]:
    """Returns the good parts of ``numbers``, oldest first, without their bad tails. Bad parts are set aside.

    Adds losses and torn records to ``found``. Raises NewerFormat.
    """
    scanned: list[ScannedPart] = []
    void_from = None
    for number in sorted(numbers, reverse=True):
        path = part_path(directory.root, number)
        try:
            part = scan_part(directory.files, path, void_from)
        except NewerFormat:
            raise
        except (FormatError, OSError) as e:
            if isinstance(e, ShortHeader) and not scanned and _same_boot(directory, found):
                found.torn += 1
                with contextlib.suppress(OSError):
                    directory.files.unlink(path)
                continue
            now = directory.clock.pair().real_ns
            found.losses.append(Loss("store", "", "log", f"log part {number} cannot be read: {e}", now, now))
            with contextlib.suppress(OSError):
                directory.aside.move(path)
            continue
        while part.voided > 1:
            # After a failure one record may be written again, never more: one of these parts is of another log.
            stranger = scanned.pop(0) if part.header.node == directory.node else part
            _send_away(directory, stranger, found)
            if stranger is part:
                break
            part = scan_part(directory.files, path, scanned[0].header.first_sequence if scanned else None)
        else:
            if part.size > part.part.length:
                _cut_tail(directory, part, found)
            scanned.insert(0, part)
        void_from = scanned[0].header.first_sequence if scanned else None
    return scanned


def take_parts(found: Recovered, damaged: bool, scanned: Sequence[ScannedPart]) -> None:
    """Puts ``scanned`` into ``found``, with the positions behind them, and records missing before each as losses.

    ``damaged``: the manifest cannot say which record comes first.
    """
    state = found.manifest.state
    expected = None if damaged or not state.sealed_to else state.next_sequence
    since: int | None = None
    found.positions = state.positions
    for part in scanned:
        first = part.header.first_sequence
        if expected is not None and first > expected:
            start = since if since is not None else part.header.created_ns
            reason = f"{first - expected} records are missing before log part {part.part.number}"
            found.losses.append(Loss("store", "", "log", reason, start, max(start, part.header.created_ns)))
        expected = max(expected or 0, part.part.next_sequence)
        since = part.last_clock.real_ns if part.last_clock else part.header.created_ns
        if part.part.next_sequence >= state.next_sequence:
            found.positions = part.part.positions
    found.parts = [s.part for s in scanned]
    found.next_sequence = max(state.next_sequence, expected or 1)


def _send_away(directory: Directory, part: ScannedPart, found: Recovered) -> None:
    now, number = directory.clock.pair().real_ns, part.part.number
    reason = f"log part {number} is of another store, of node {part.header.node[:80]}"
    found.losses.append(Loss("store", "", "log", reason, now, now))
    with contextlib.suppress(OSError):
        directory.aside.move(part.part.path)


def _cut_tail(directory: Directory, part: ScannedPart, found: Recovered) -> None:
    path, length = part.part.path, part.part.length
    # The copy first: after a crash in between the next start finds the same bad tail.
    with contextlib.suppress(OSError):
        if part.problem:
            directory.aside.copy(path, directory.files.read(path, offset=length))
        directory.files.cut(path, length)
    if part.problem == TORN and _same_boot(directory, found):
        # A daemon was killed while it wrote this record, which was never acknowledged: the ring still has it.
        found.torn += 1
    elif part.problem:
        start = part.last_clock.real_ns if part.last_clock else part.header.created_ns
        reason = f"log part {part.part.number}: {part.problem}, {part.size - length} bytes"
        found.losses.append(Loss("store", "", "log", reason, start, max(start, directory.clock.pair().real_ns)))


def _same_boot(directory: Directory, found: Recovered) -> bool:
    # In another boot the power may have gone, and with it records that were acknowledged and not synced.
    return found.manifest.state.boot_id in ("", directory.clock.boot_id)
