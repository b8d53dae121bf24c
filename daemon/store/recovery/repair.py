"""Repairs the manifest: takes segments from their files when it is damaged, and drops those whose files are bad."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

from probing.api.errors import FormatError
from probing.daemon.source import Loss
from probing.daemon.store.manifest import MANIFEST, Edit, LoadedManifest, Segment
from probing.daemon.store.recovery.directory import Directory, Recovered
from probing.daemon.store.segments.reader import describe_segment

__all__ = ("drop_bad_segments", "rebuild")


def rebuild(directory: Directory, found: Recovered, on_disk: Collection[str], parts: Collection[int]) -> None:
    """Adds segments from the files ``on_disk`` to a damaged or missing manifest. ``parts``: log parts on disk."""
    state = found.manifest.state
    adopted = _adopt(directory, state, on_disk, parts)
    # A daemon that is killed while it writes leaves a last line without an end: then nothing is lost.
    if not (state.bad_lines or not state.found or adopted):
        return
    now = directory.clock.pair().real_ns
    damage = f"damaged ({state.unreadable or f'{state.bad_lines} bad lines'})" if state.found else "missing"
    reason = f"the manifest is {damage}; {adopted} segments were added from their files"
    found.losses.append(Loss("store", "", "store", reason, now, now))
    with contextlib.suppress(OSError):
        if state.unreadable:
            directory.aside.move(directory.root / MANIFEST)
        elif state.found:
            directory.aside.copy(directory.root / MANIFEST, directory.files.read(directory.root / MANIFEST))


def drop_bad_segments(directory: Directory, found: Recovered, on_disk: Collection[str]) -> None:
    """Drops segments whose files are missing or have the wrong size. Their rows are losses."""
    state = found.manifest.state
    for segment in list(state.segments.values()):
        problem = _problem(directory, segment, on_disk)
        if problem:
            del state.segments[segment.path]
            reason = f"the segment {segment.path} {problem}"
            found.losses.append(
                Loss("store", segment.table, "store", reason, segment.ts_min, segment.ts_max, segment.rows)
            )
            if segment.path in on_disk:
                with contextlib.suppress(OSError):
                    directory.aside.move(directory.root / segment.path)


def _adopt(directory: Directory, state: LoadedManifest, on_disk: Collection[str], parts: Collection[int]) -> int:
    found = []
    for path in sorted(set(on_disk) - set(state.segments)):
        with contextlib.suppress(FormatError, OSError):
            found.append(describe_segment(directory.files, directory.root, path))
    sealed_to = max((_sealed_to(segment, parts) for segment in found), default=0)
    state.apply(Edit(sealed_to=sealed_to))
    adopted = [segment for segment in found if segment.parts[1] <= state.sealed_to]
    known = set(state.segments)
    state.apply(Edit(tuple(adopted)))
    there = [s for s in state.segments.values() if s.path in on_disk]
    gone = dict(_superseded(state.segments.values(), there))
    state.apply(Edit(drop=tuple(gone)))
    # A merged segment whose sources the manifest named adds no rows.
    nothing_new = {other for path, other in gone.items() if path in known}
    return sum(s.path not in gone and s.path not in nothing_new for s in adopted)


def _sealed_to(segment: Segment, parts: Collection[int]) -> int:
    # Parts are sealed in order, and removed once the manifest names their segments; only then are these merged.
    first, last = segment.parts
    return last if first not in parts or last not in parts else first - 1


def _superseded(segments: Iterable[Segment], there: Iterable[Segment]) -> Iterator[tuple[str, str]]:
    """Yields the path of each segment that was merged into another one, and the path of that one."""
    folders: dict[str, list[Segment]] = {}
    for segment in there:
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
