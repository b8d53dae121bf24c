"""What a start makes of a state directory, whatever it finds there.

Nothing found makes a start fail but a newer format: what is bad is set aside in ``corrupt/``, and told as a loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from probing.api.errors import FormatError
from probing.daemon.clock import Clock
from probing.daemon.source import Loss
from probing.daemon.store.files import Files, write_all
from probing.daemon.store.log.parts import TORN, WAL_DIR, Part, ScannedPart, part_number, part_path, scan_part
from probing.daemon.store.log.records import NewerFormat, Positions, ShortHeader
from probing.daemon.store.manifest import MANIFEST, Edit, LoadedManifest, Manifest, Segment, load_manifest
from probing.daemon.store.segments.reader import describe_segment, is_date_dir, segment_parts

__all__ = ("CORRUPT_DIR", "OWN_NAMES", "Recovered", "SetAside", "recover")

CORRUPT_DIR = "corrupt"
# What other parts of the daemon keep beside the tables, and while it is written.
_OTHERS = ("changes", "flight_dumps", "nccl_layouts", "user_tables")
OWN_NAMES = {"lock", "imports.jsonl", MANIFEST, f"{MANIFEST}.tmp", WAL_DIR, CORRUPT_DIR} | {
    f"{name}.{end}" for name in _OTHERS for end in ("json", "new")
}
_MAX_CORRUPT = 32
_MAX_FOREIGN = 100


class SetAside:
    """Moves what is bad out of the way: the newest are kept for whoever looks into it, as far as ``limit`` allows."""

    def __init__(self, files: Files, root: Path, clock: Clock) -> None:
        self._files = files
        self._root = root
        self._clock = clock
        self.count = 0
        self._most_bytes: int | None = None

    def limit(self, most_bytes: int) -> None:
        """Keep at most so many bytes from now on. Raises OSError."""
        self._most_bytes = most_bytes
        self._prune()

    def move(self, path: Path) -> None:
        """Raises OSError."""
        self._files.rename(path, self._target(path))
        self._prune()

    def copy(self, path: Path, data: bytes) -> None:
        """Bytes out of the file ``path``. Raises OSError."""
        fd = self._files.create(self._target(path))
        try:
            write_all(self._files, fd, data)
        finally:
            self._files.close(fd)
        self._prune()

    @property
    def bytes(self) -> int:
        return sum(self._size(name) for name in self._files.listdir(self._root / CORRUPT_DIR))

    def _target(self, path: Path) -> Path:
        self.count += 1
        flat = "_".join(path.relative_to(self._root).parts)
        stamp = f"{self._clock.pair().real_ns:020d}-{self.count:04d}"
        return self._root / CORRUPT_DIR / f"{stamp}-{flat}.corrupt"

    def _prune(self) -> None:
        size = 0
        for kept, name in enumerate(reversed(self._files.listdir(self._root / CORRUPT_DIR)), 1):
            size += self._size(name)
            if kept > _MAX_CORRUPT or (self._most_bytes is not None and size > self._most_bytes):
                # What is no file stays, and keeps no other from going.
                with contextlib.suppress(OSError):
                    self._files.unlink(self._root / CORRUPT_DIR / name)

    def _size(self, name: str) -> int:
        with contextlib.suppress(OSError):
            return self._files.size(self._root / CORRUPT_DIR / name)
        return 0


@dataclass(slots=True)
class Recovered:
    """``parts`` are not sealed yet, oldest first. ``torn`` counts last records that were not written to their end:
    never acknowledged, so no losses. ``foreign`` names files that are not ours, which are left alone."""

    manifest: Manifest
    parts: list[Part] = field(default_factory=list)
    positions: Positions = field(default_factory=dict)
    next_sequence: int = 1
    next_part: int = 1
    losses: list[Loss] = field(default_factory=list)
    torn: int = 0
    foreign: list[str] = field(default_factory=list)
    degraded: str = ""


def recover(files: Files, root: Path, node: str, clock: Clock, aside: SetAside) -> Recovered:
    """Raises NewerFormat, or OSError when the directory itself cannot be read."""
    state = load_manifest(files, root)
    found = Recovered(Manifest(files, root, node, clock.boot_id, state))
    numbers = _part_numbers(files, root, found)
    on_disk = list(_segment_paths(files, root, found))
    damaged = state.bad_lines > 0 or state.cut_short or (not state.found and bool(numbers or on_disk))
    scanned = _scan(files, root, node, [n for n in numbers if n > state.sealed_to], found, aside, clock)
    _reconcile(files, root, clock, aside, found, set(on_disk), damaged, {s.part.number for s in scanned})
    _clear(files, root / f"{MANIFEST}.tmp", aside)
    try:
        found.manifest.commit(Edit())
    except OSError as e:
        found.degraded = f"the manifest cannot be written: {e.strerror or e}"
    if not found.degraded or not damaged:
        _sweep(files, root, aside, found, numbers, on_disk)
    _take_parts(found, damaged, [s for s in scanned if s.part.number > state.sealed_to])
    found.next_part = max([state.sealed_to, *numbers]) + 1
    del found.foreign[_MAX_FOREIGN:]
    return found


def _clear(files: Files, path: Path, aside: SetAside) -> None:
    # What is no file, and so cannot be unlinked, would keep the name for ever.
    with contextlib.suppress(OSError):
        try:
            files.unlink(path)
        except OSError:
            aside.move(path)


def _part_numbers(files: Files, root: Path, found: Recovered) -> list[int]:
    numbers = []
    for name in files.listdir(root / WAL_DIR):
        number = part_number(name)
        if number is None:
            found.foreign.append(f"{WAL_DIR}/{name}")
        else:
            numbers.append(number)
    return numbers


def _segment_paths(files: Files, root: Path, found: Recovered) -> Iterator[str]:
    for table in files.listdir(root):
        if table in OWN_NAMES:
            continue
        dates = files.listdir(root / table)
        if "." not in table or not dates:
            found.foreign.append(table)
            continue
        for date in dates:
            for name in files.listdir(root / table / date) if is_date_dir(date) else ():
                path = f"{table}/{date}/{name}"
                if segment_parts(name):
                    yield path
                elif segment_parts(name.removesuffix(".tmp")):
                    with contextlib.suppress(OSError):
                        files.unlink(root / path)
                else:
                    found.foreign.append(path)
            if not is_date_dir(date):
                found.foreign.append(f"{table}/{date}")


def _scan(
    files: Files, root: Path, node: str, numbers: list[int], found: Recovered, aside: SetAside, clock: Clock
) -> list[ScannedPart]:
    scanned: list[ScannedPart] = []
    void_from = None
    for number in sorted(numbers, reverse=True):
        path = part_path(root, number)
        try:
            part = scan_part(files, path, void_from)
        except NewerFormat:
            raise
        except (FormatError, OSError) as e:
            if isinstance(e, ShortHeader) and not scanned and _same_boot(found, clock):
                found.torn += 1
                with contextlib.suppress(OSError):
                    files.unlink(path)
                continue
            now = clock.pair().real_ns
            found.losses.append(Loss("store", "", "log", f"log part {number} cannot be read: {e}", now, now))
            with contextlib.suppress(OSError):
                aside.move(path)
            continue
        while part.voided > 1:
            # A record may be written again behind a failure, but one alone: one of these parts is not of this log.
            stranger = scanned.pop(0) if part.header.node == node else part
            _send_away(stranger, found, aside, clock)
            if stranger is part:
                break
            part = scan_part(files, path, scanned[0].header.first_sequence if scanned else None)
        else:
            if part.size > part.part.length:
                _cut_tail(files, part, found, aside, clock)
            scanned.insert(0, part)
        void_from = scanned[0].header.first_sequence if scanned else None
    return scanned


def _send_away(part: ScannedPart, found: Recovered, aside: SetAside, clock: Clock) -> None:
    now, number = clock.pair().real_ns, part.part.number
    reason = f"log part {number} is of another store, of node {part.header.node[:80]}"
    found.losses.append(Loss("store", "", "log", reason, now, now))
    with contextlib.suppress(OSError):
        aside.move(part.part.path)


def _cut_tail(files: Files, part: ScannedPart, found: Recovered, aside: SetAside, clock: Clock) -> None:
    path, length = part.part.path, part.part.length
    # A copy first: a crash in between leaves the same bad tail to find.
    with contextlib.suppress(OSError):
        if part.problem:
            aside.copy(path, files.read(path, offset=length))
        files.cut(path, length)
    if part.problem == TORN and _same_boot(found, clock):
        # Written by a daemon that was killed while it wrote, and so never acknowledged: the ring still has it.
        found.torn += 1
    elif part.problem:
        start = part.last_clock.real_ns if part.last_clock else part.header.created_ns
        reason = f"log part {part.part.number}: {part.problem}, {part.size - length} bytes"
        found.losses.append(Loss("store", "", "log", reason, start, max(start, clock.pair().real_ns)))


def _same_boot(found: Recovered, clock: Clock) -> bool:
    # Else the power may have gone, and with it what was acknowledged and not synced.
    return found.manifest.state.boot_id in ("", clock.boot_id)


def _reconcile(
    files: Files,
    root: Path,
    clock: Clock,
    aside: SetAside,
    found: Recovered,
    on_disk: set[str],
    damaged: bool,
    parts: set[int],
) -> None:
    state = found.manifest.state
    if damaged:
        adopted = _adopt(files, root, state, on_disk, parts)
        # A last line without an end is what a daemon leaves that was killed while it wrote: then nothing is amiss.
        if state.bad_lines or not state.found or adopted:
            now = clock.pair().real_ns
            what = f"damaged ({state.unreadable or f'{state.bad_lines} bad lines'})" if state.found else "missing"
            reason = f"the manifest is {what}; {adopted} segments were added from their files"
            found.losses.append(Loss("store", "", "store", reason, now, now))
            with contextlib.suppress(OSError):
                if state.unreadable:
                    aside.move(root / MANIFEST)
                elif state.found:
                    aside.copy(root / MANIFEST, files.read(root / MANIFEST))
    for segment in list(state.segments.values()):
        problem = _missing(files, root, segment, on_disk)
        if problem:
            del state.segments[segment.path]
            found.losses.append(_segment_loss(segment, problem))
            if segment.path in on_disk:
                with contextlib.suppress(OSError):
                    aside.move(root / segment.path)


def _adopt(files: Files, root: Path, state: LoadedManifest, on_disk: set[str], parts: set[int]) -> int:
    found = []
    for path in sorted(on_disk - set(state.segments)):
        with contextlib.suppress(FormatError, OSError):
            found.append(describe_segment(files, root, path))
    sealed_to = max((_sealed_to(segment, parts) for segment in found), default=0)
    state.apply(Edit(sealed_to=sealed_to))
    adopted = [segment for segment in found if segment.parts[1] <= state.sealed_to]
    known = set(state.segments)
    state.apply(Edit(tuple(adopted)))
    there = [s for s in state.segments.values() if s.path in on_disk]
    gone = dict(_superseded(state.segments.values(), there))
    state.apply(Edit(drop=tuple(gone)))
    # A merged segment that stands for known ones adds nothing.
    nothing_new = {other for path, other in gone.items() if path in known}
    return sum(s.path not in gone and s.path not in nothing_new for s in adopted)


def _sealed_to(segment: Segment, parts: set[int]) -> int:
    # Parts are sealed one after the other, and go once their segments are in the manifest; only then these are merged.
    first, last = segment.parts
    return last if first not in parts or last not in parts else first - 1


def _superseded(segments: Iterable[Segment], there: Iterable[Segment]) -> Iterator[tuple[str, str]]:
    """Paths of those whose rows are in another one, merged from them, and the path of that one."""
    folders: dict[str, list[Segment]] = {}
    for segment in there:
        folders.setdefault(segment.path.rsplit("/", 1)[0], []).append(segment)
    for segment in segments:
        for other in folders.get(segment.path.rsplit("/", 1)[0], ()):
            inside = other.parts[0] <= segment.parts[0] and segment.parts[1] <= other.parts[1]
            if inside and other.parts != segment.parts:
                yield segment.path, other.path
                break


def _missing(files: Files, root: Path, segment: Segment, on_disk: set[str]) -> str:
    if segment.path not in on_disk:
        return "is missing"
    try:
        size = files.size(root / segment.path)
    except OSError as e:
        return f"cannot be read: {e.strerror or e}"
    return "" if size == segment.size else f"has {size} bytes instead of {segment.size}"


def _segment_loss(segment: Segment, problem: str) -> Loss:
    reason = f"the segment {segment.path} {problem}"
    return Loss("store", segment.table, "store", reason, segment.ts_min, segment.ts_max, segment.rows)


def _sweep(files: Files, root: Path, aside: SetAside, found: Recovered, numbers: list[int], on_disk: list[str]) -> None:
    state = found.manifest.state
    with contextlib.suppress(OSError):
        for number in sorted(numbers):
            if number <= state.sealed_to:
                files.unlink(part_path(root, number))
        for path in on_disk:
            if path not in state.segments:
                _remove_orphan(files, root, aside, path)


def _remove_orphan(files: Files, root: Path, aside: SetAside, path: str) -> None:
    try:
        describe_segment(files, root, path)
    except FileNotFoundError:
        return
    except (FormatError, OSError):
        aside.move(root / path)
        return
    files.unlink(root / path)


def _take_parts(found: Recovered, damaged: bool, scanned: list[ScannedPart]) -> None:
    state = found.manifest.state
    expected = None if damaged or not state.sealed_to else state.next_sequence
    since: int | None = None
    found.positions = state.positions
    for part in scanned:
        first = part.header.first_sequence
        if expected is not None and first > expected:
            count = first - expected
            start = since if since is not None else part.header.created_ns
            found.losses.append(
                Loss(
                    "store",
                    "",
                    "log",
                    f"{count} records are missing before log part {part.part.number}",
                    start,
                    max(start, part.header.created_ns),
                )
            )
        expected = max(expected or 0, part.part.next_sequence)
        since = part.last_clock.real_ns if part.last_clock else part.header.created_ns
        if part.part.next_sequence >= state.next_sequence:
            found.positions = part.part.positions
    found.parts = [s.part for s in scanned]
    found.next_sequence = max(state.next_sequence, expected or 1)
