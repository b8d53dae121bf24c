"""The manifest lists the segments, and the log part up to which everything is sealed.

It is a text file of lines with checksums: the first line names the format, each other line is an edit. Because an edit
is one line, it is in the file completely or not at all. At each start, and when there are many edits, the manifest is
rewritten to a temporary file, which then replaces it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from probing.api.errors import FormatError
from probing.daemon.store.files import Files, write_all
from probing.daemon.store.format import (
    FORMAT_VERSION,
    MAX_NUMBER,
    MAX_PART,
    Positions,
    checked_positions,
    checked_table,
    decoded,
    newer_format,
    number_in,
)

__all__ = ("MANIFEST", "Edit", "LoadedManifest", "Manifest", "Segment", "load_manifest")

MANIFEST = "manifest"
MAX_MANIFEST = 1 << 28
# The file is rewritten once the edits appended since the last rewrite exceed the rewritten lines by this many bytes.
_SLACK_BYTES = 1 << 14
# The maximum length of a line, bytes. Even an edit that drops all segments of a large store needs less.
MAX_LINE = 1 << 24
_MAGIC = "probingd-manifest"
_PATH = re.compile(r"[\w.]+/date=[0-9-]{10}/[\w-]+\.parquet", re.ASCII)


class Segment(NamedTuple):
    """A sealed Parquet file, as listed in the manifest.

    ``path``: relative to the state directory. ``crc``: CRC32 of the whole file. ``ts_min`` and ``ts_max``: the first
    and last ``ts``, UTC ns. ``parts``: the first and last log part from which its rows come. ``jobs``: the values of
    the column ``job``, None if the segment lacks the column, or the column has a NULL or too many values.
    """

    table: str
    path: str
    size: int
    crc: int
    rows: int
    ts_min: int
    ts_max: int
    parts: tuple[int, int]
    jobs: tuple[str, ...] | None = None


class Edit(NamedTuple):
    """A change of the manifest. ``sealed_to``: all log parts up to this number are in segments."""

    add: tuple[Segment, ...] = ()
    drop: tuple[str, ...] = ()
    sealed_to: int | None = None
    next_sequence: int | None = None
    positions: Positions | None = None


@dataclass(slots=True)
class LoadedManifest:
    """The manifest as it was read.

    ``bad_lines``: the number of damaged lines. ``found``: whether there is a manifest. ``cut_short``: the last line has
    no end, because a daemon was killed while it wrote. ``unreadable``: why no line can be read. ``boot_id``: the boot
    in which the manifest was written.
    """

    segments: dict[str, Segment] = field(default_factory=dict)
    sealed_to: int = 0
    next_sequence: int = 1
    positions: Positions = field(default_factory=dict)
    bad_lines: int = 0
    found: bool = False
    cut_short: bool = False
    unreadable: str = ""
    boot_id: str = ""

    def apply(self, edit: Edit) -> None:
        """Applies ``edit`` to this state; ring positions older than the present positions are ignored."""
        for path in edit.drop:
            self.segments.pop(path, None)
        for segment in edit.add:
            self.segments[segment.path] = segment
        if edit.sealed_to is not None:
            self.sealed_to = max(self.sealed_to, edit.sealed_to)
        if edit.next_sequence is not None and edit.next_sequence >= self.next_sequence:
            self.next_sequence = edit.next_sequence
            self.positions = edit.positions or {}


def load_manifest(files: Files, root: Path) -> LoadedManifest:
    """Reads the manifest, including lines after damaged lines. Raises NewerFormat for the manifest of a newer
    probingd.
    """
    loaded = LoadedManifest()
    try:
        data = files.read(root / MANIFEST, MAX_MANIFEST)
    except FileNotFoundError:
        return loaded
    except (FormatError, OSError) as e:
        return LoadedManifest(bad_lines=1, found=True, unreadable=str(e))
    loaded.found = True
    lines = data.split(b"\n")
    loaded.cut_short = lines[-1] != b""
    for number, line in enumerate(lines[:-1]):
        fields = _unpack(line)
        if fields is not None and number == 0:
            _check_format(fields)
            loaded.boot_id = str(fields.get("boot_id", ""))
        elif fields is None or not _apply(loaded, fields):
            loaded.bad_lines += 1
    if len(lines) == 1:
        loaded.bad_lines += 1
    return loaded


def _check_format(fields: Mapping[str, Any]) -> None:
    version = fields.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise newer_format(version)


def _apply(loaded: LoadedManifest, fields: Mapping[str, Any]) -> bool:
    try:
        sealed_to, positions = fields.get("sealed_to"), fields.get("positions")
        next_sequence = fields.get("next_sequence")
        edit = Edit(
            tuple(map(_segment, fields.get("add", ()))),
            tuple(map(str, fields.get("drop", ()))),
            None if sealed_to is None else number_in(sealed_to, most=MAX_PART),
            None if next_sequence is None else number_in(next_sequence),
            None if positions is None else checked_positions(positions),
        )
    except (KeyError, TypeError, ValueError):
        return False
    loaded.apply(edit)
    return True


def _segment(fields: Mapping[str, Any]) -> Segment:
    # All values are checked, because they become paths, columns and SQL.
    first, last = (number_in(part, most=MAX_PART) for part in fields["parts"])
    # Older manifests lack the jobs.
    jobs = fields.get("jobs")
    return Segment(
        checked_table(fields["table"]),
        _path(fields["path"], fields["table"]),
        number_in(fields["size"]),
        number_in(fields["crc"]),
        number_in(fields["rows"]),
        number_in(fields["ts_min"], -MAX_NUMBER),
        number_in(fields["ts_max"], -MAX_NUMBER),
        (first, last),
        None if jobs is None else tuple(map(str, jobs)),
    )


def _path(path: Any, table: str) -> str:
    if not isinstance(path, str) or not _PATH.fullmatch(path) or path.partition("/")[0] != table:
        raise ValueError("a segment lies outside its folder")
    return path


class Manifest:
    """The manifest file of an open store.

    Calls raise OSError. It is unknown whether a failed edit is in the file, so the file is rewritten before the next
    edit.
    """

    def __init__(self, files: Files, root: Path, node: str, boot_id: str, state: LoadedManifest) -> None:
        self._files = files
        self._root = root
        self._first = {"magic": _MAGIC, "format_version": FORMAT_VERSION, "node": node, "boot_id": boot_id}
        self.state = state
        self._fd: int | None = None
        self._base_bytes = 0
        self._edit_bytes = 0

    def commit(self, edit: Edit) -> None:
        """Writes and syncs ``edit``, and applies it to ``state``."""
        if self._fd is not None and self._edit_bytes <= self._base_bytes + _SLACK_BYTES:
            fd, self._fd = self._fd, None
            line = _pack(_edit_fields(edit))
            try:
                write_all(self._files, fd, line)
                self._files.fsync(fd)
            except OSError:
                self._files.close(fd)
                raise
            self._fd = fd
            self._edit_bytes += len(line)
            self.state.apply(edit)
            return
        after = LoadedManifest(
            dict(self.state.segments), self.state.sealed_to, self.state.next_sequence, self.state.positions
        )
        after.apply(edit)
        self._rewrite(after)
        self.state = after

    def close(self) -> None:
        if self._fd is not None:
            self._files.close(self._fd)
            self._fd = None

    def _rewrite(self, state: LoadedManifest) -> None:
        self.close()
        aside = self._root / f"{MANIFEST}.tmp"
        self._files.unlink(aside)
        fd = self._files.create(aside)
        try:
            data = b"".join(self._lines(state))
            write_all(self._files, fd, data)
            self._files.fsync(fd)
            self._files.rename(aside, self._root / MANIFEST)
            self._files.fsync_dir(self._root)
        except OSError:
            self._files.close(fd)
            raise
        self._fd, self._base_bytes, self._edit_bytes = fd, len(data), 0

    def _lines(self, state: LoadedManifest) -> Iterable[bytes]:
        yield _pack(self._first)
        yield _pack(_edit_fields(Edit((), (), state.sealed_to, state.next_sequence, state.positions)))
        for segment in state.segments.values():
            yield _pack(_edit_fields(Edit((segment,))))


def _edit_fields(edit: Edit) -> dict[str, object]:
    fields: dict[str, object] = {"add": [s._asdict() for s in edit.add], "drop": list(edit.drop)}
    if edit.sealed_to is not None:
        fields["sealed_to"] = edit.sealed_to
    if edit.next_sequence is not None:
        fields |= {"next_sequence": edit.next_sequence, "positions": edit.positions or {}}
    return {name: value for name, value in fields.items() if value != []}


def _pack(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _unpack(line: bytes) -> dict[str, Any] | None:
    crc, _, text = line.partition(b" ")
    try:
        return decoded(text) if len(text) <= MAX_LINE and int(crc, 16) == zlib.crc32(text) else None
    except ValueError:
        return None
