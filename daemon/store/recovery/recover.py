"""Recovers a state directory at the start, whatever its condition: the manifest, its segments, and the log with its bad
tails and gaps.

Damaged files do not make a start fail. A start fails only for a newer format, or if the directory cannot be read. Bad
files are set aside in ``corrupt/``, and their rows are losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from probing.api.errors import FormatError
from probing.daemon.clock import Clock
from probing.daemon.source import Loss
from probing.daemon.store.files import Files
from probing.daemon.store.format import NewerFormat
from probing.daemon.store.log.parts import TORN, ScannedPart, part_path, scan_part
from probing.daemon.store.log.records import ShortHeader
from probing.daemon.store.manifest import MANIFEST, Edit, LoadedManifest, Manifest, Segment, load_manifest
from probing.daemon.store.recovery.directory import Directory, Recovered, part_numbers, segment_paths
from probing.daemon.store.recovery.set_aside import SetAside
from probing.daemon.store.segments.reader import describe_segment

__all__ = ("recover",)


def _scan_log(directory: Directory, numbers: Sequence[int], recovered: Recovered) -> list[ScannedPart]:
    """Returns the good parts of ``numbers``, oldest first, without their bad tails. Bad parts are set aside.

    Adds losses and torn records to ``recovered``. Raises NewerFormat.
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
            if isinstance(e, ShortHeader) and not scanned and _same_boot(directory, recovered):
                recovered.torn += 1
                with contextlib.suppress(OSError):
                    directory.files.unlink(path)
                continue
            now = directory.clock.pair().real_ns
            recovered.losses.append(Loss("store", "", "log", f"log part {number} cannot be read: {e}", now, now))
            with contextlib.suppress(OSError):
                directory.aside.move(path)
            continue
        while part.voided > 1:
            # A failure writes at most one record twice. Parts that share more sequence numbers belong to two logs, so
            # one of the parts comes from another store.
            stranger = scanned.pop(0) if part.header.node == directory.node else part
            _send_away(directory, stranger, recovered)
            if stranger is part:
                break
            part = scan_part(directory.files, path, scanned[0].header.first_sequence if scanned else None)
        else:
            if part.size > part.part.length:
                _cut_tail(directory, part, recovered)
            scanned.insert(0, part)
        void_from = scanned[0].header.first_sequence if scanned else None
    return scanned


def _take_parts(recovered: Recovered, damaged: bool, scanned: Sequence[ScannedPart]) -> None:
    """Adds ``scanned`` to ``recovered``, with the positions after the parts; records that are missing before a part are
    losses.

    ``damaged``: the manifest does not tell which record comes first.
    """
    state = recovered.manifest.state
    expected = None if damaged or not state.sealed_to else state.next_sequence
    since: int | None = None
    recovered.positions = state.positions
    for part in scanned:
        first = part.header.first_sequence
        if expected is not None and first > expected:
            start = since if since is not None else part.header.created_ns
            reason = f"{first - expected} records are missing before log part {part.part.number}"
            recovered.losses.append(Loss("store", "", "log", reason, start, max(start, part.header.created_ns)))
        expected = max(expected or 0, part.part.next_sequence)
        since = part.last_clock.real_ns if part.last_clock else part.header.created_ns
        if part.part.next_sequence >= state.next_sequence:
            recovered.positions = part.part.positions
    recovered.parts = [s.part for s in scanned]
    recovered.next_sequence = max(state.next_sequence, expected or 1)


def _send_away(directory: Directory, part: ScannedPart, recovered: Recovered) -> None:
    now, number = directory.clock.pair().real_ns, part.part.number
    reason = f"log part {number} belongs to another store, of node {part.header.node[:80]}"
    recovered.losses.append(Loss("store", "", "log", reason, now, now))
    with contextlib.suppress(OSError):
        directory.aside.move(part.part.path)


def _cut_tail(directory: Directory, part: ScannedPart, recovered: Recovered) -> None:
    path, length = part.part.path, part.part.length
    # The copy is made first: after a crash in between, the next start sees the same bad tail.
    with contextlib.suppress(OSError):
        if part.problem:
            directory.aside.copy(path, directory.files.read(path, offset=length))
        directory.files.cut(path, length)
    if part.problem == TORN and _same_boot(directory, recovered):
        # A daemon was killed while it wrote this record, which was never acknowledged: the ring still has it.
        recovered.torn += 1
    elif part.problem:
        start = part.last_clock.real_ns if part.last_clock else part.header.created_ns
        reason = f"log part {part.part.number}: {part.problem}, {part.size - length} bytes"
        recovered.losses.append(Loss("store", "", "log", reason, start, max(start, directory.clock.pair().real_ns)))


def _same_boot(directory: Directory, recovered: Recovered) -> bool:
    # The cause of a reboot may have been a power failure, which can lose acknowledged records that were not synced.
    return recovered.manifest.state.boot_id in ("", directory.clock.boot_id)


def _rebuild(directory: Directory, recovered: Recovered, on_disk: Collection[str], parts: Collection[int]) -> None:
    """Adds segments from the files ``on_disk`` to a damaged or missing manifest. ``parts``: log parts on disk."""
    state = recovered.manifest.state
    adopted = _adopt(directory, state, on_disk, parts)
    # A daemon that is killed while it writes leaves a last line without an end: this loses nothing.
    if not (state.bad_lines or not state.found or adopted):
        return
    now = directory.clock.pair().real_ns
    damage = f"damaged ({state.unreadable or f'{state.bad_lines} bad lines'})" if state.found else "missing"
    reason = f"the manifest is {damage}; {adopted} segments were added from their files"
    recovered.losses.append(Loss("store", "", "store", reason, now, now))
    with contextlib.suppress(OSError):
        if state.unreadable:
            directory.aside.move(directory.root / MANIFEST)
        elif state.found:
            directory.aside.copy(directory.root / MANIFEST, directory.files.read(directory.root / MANIFEST))


def _drop_bad_segments(directory: Directory, recovered: Recovered, on_disk: Collection[str]) -> None:
    """Drops segments whose files are missing or have the wrong size. Their rows are losses."""
    state = recovered.manifest.state
    for segment in list(state.segments.values()):
        problem = _problem(directory, segment, on_disk)
        if problem:
            del state.segments[segment.path]
            reason = f"the segment {segment.path} {problem}"
            recovered.losses.append(
                Loss("store", segment.table, "store", reason, segment.ts_min, segment.ts_max, segment.rows)
            )
            if segment.path in on_disk:
                with contextlib.suppress(OSError):
                    directory.aside.move(directory.root / segment.path)


def _adopt(directory: Directory, state: LoadedManifest, on_disk: Collection[str], parts: Collection[int]) -> int:
    described = []
    # The order puts a damaged segment before the segment that was salvaged from it.
    for path in sorted(set(on_disk) - set(state.segments), key=lambda path: path.removesuffix(".parquet")):
        with contextlib.suppress(FormatError, OSError):
            described.append(describe_segment(directory.files, directory.root, path))
    sealed_to = max((_sealed_to(segment, parts) for segment in described), default=0)
    state.apply(Edit(sealed_to=sealed_to))
    known = set(state.segments)
    places = {_place(segment) for segment in state.segments.values() if not _problem(directory, segment, on_disk)}
    adopted = []
    for segment in described:
        # A kill can leave both a damaged segment and the segment of its good rows: only one of them is added.
        if segment.parts[1] <= state.sealed_to and _place(segment) not in places:
            places.add(_place(segment))
            adopted.append(segment)
    state.apply(Edit(tuple(adopted)))
    present = [s for s in state.segments.values() if s.path in on_disk]
    gone = dict(_superseded(state.segments.values(), present))
    state.apply(Edit(drop=tuple(gone)))
    # A merged segment adds no rows if the manifest named its sources.
    nothing_new = {other for path, other in gone.items() if path in known}
    return sum(s.path not in gone and s.path not in nothing_new for s in adopted)


def _place(segment: Segment) -> tuple[str, tuple[int, int]]:
    """Returns the folder and the log parts of ``segment``. Only one segment may have the rows of such a pair."""
    return segment.path.rpartition("/")[0], segment.parts


def _sealed_to(segment: Segment, parts: Collection[int]) -> int:
    # A part is removed once the manifest names its segments, and its segments are merged only after that. So if the
    # first or the last part is gone, all parts of the segment were sealed.
    first, last = segment.parts
    return last if first not in parts or last not in parts else first - 1


def _superseded(segments: Iterable[Segment], present: Iterable[Segment]) -> Iterator[tuple[str, str]]:
    """Yields (path, merged path) of each segment that was merged into another segment."""
    folders: dict[str, list[Segment]] = {}
    for segment in present:
        folders.setdefault(segment.path.rsplit("/", 1)[0], []).append(segment)
    for segment in segments:
        for other in folders.get(segment.path.rsplit("/", 1)[0], ()):
            inside = other.parts[0] <= segment.parts[0] and segment.parts[1] <= other.parts[1]
            if inside and other.parts != segment.parts:
                yield segment.path, other.path
                break


def _problem(directory: Directory, segment: Segment, on_disk: Collection[str]) -> str:
    if segment.path not in on_disk:
        return "is missing"
    try:
        size = directory.files.size(directory.root / segment.path)
    except OSError as e:
        return f"cannot be read: {e.strerror or e}"
    return "" if size == segment.size else f"has {size} bytes instead of {segment.size}"


_MAX_FOREIGN = 100


def recover(files: Files, root: Path, node: str, clock: Clock, aside: SetAside) -> Recovered:
    """Makes manifest, segments and log consistent, and writes a new manifest.

    Raises NewerFormat, or OSError when the directory itself cannot be read.
    """
    directory = Directory(files, root, node, clock, aside)
    state = load_manifest(files, root)
    recovered = Recovered(Manifest(files, root, node, clock.boot_id, state))
    numbers = part_numbers(directory, recovered.foreign)
    on_disk = list(segment_paths(directory, recovered.foreign))
    damaged = state.bad_lines > 0 or state.cut_short or (not state.found and bool(numbers or on_disk))
    scanned = _scan_log(directory, [n for n in numbers if n > state.sealed_to], recovered)
    if damaged:
        _rebuild(directory, recovered, set(on_disk), {s.part.number for s in scanned})
    _drop_bad_segments(directory, recovered, set(on_disk))
    _clear(directory, root / f"{MANIFEST}.tmp")
    try:
        recovered.manifest.commit(Edit())
    except OSError as e:
        recovered.degraded = f"the manifest cannot be written: {e.strerror or e}"
    if not recovered.degraded or not damaged:
        _sweep(directory, recovered, numbers, on_disk)
    _take_parts(recovered, damaged, [s for s in scanned if s.part.number > state.sealed_to])
    recovered.next_part = max([state.sealed_to, *numbers]) + 1
    del recovered.foreign[_MAX_FOREIGN:]
    return recovered


def _clear(directory: Directory, path: Path) -> None:
    # A folder cannot be unlinked, so it is moved aside. Otherwise it would occupy the name forever.
    with contextlib.suppress(OSError):
        try:
            directory.files.unlink(path)
        except OSError:
            directory.aside.move(path)


def _sweep(directory: Directory, recovered: Recovered, numbers: Sequence[int], on_disk: Sequence[str]) -> None:
    """Removes sealed log parts, and segments that the manifest does not name."""
    state = recovered.manifest.state
    with contextlib.suppress(OSError):
        for number in sorted(numbers):
            if number <= state.sealed_to:
                directory.files.unlink(part_path(directory.root, number))
        for path in on_disk:
            if path not in state.segments:
                _remove_orphan(directory, path)


def _remove_orphan(directory: Directory, path: str) -> None:
    try:
        describe_segment(directory.files, directory.root, path)
    except FileNotFoundError:
        return
    except (FormatError, OSError):
        directory.aside.move(directory.root / path)
        return
    directory.files.unlink(directory.root / path)
