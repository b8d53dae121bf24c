"""Examines a state directory without changing it: ``probingd verify``.

Reads all files of the store, and also reports files that the store does not use, and files with a wrong owner or mode.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from probing.api.errors import FormatError, StoreError
from probing.daemon.store.decoder import Decoder
from probing.daemon.store.directory_lock import lock_holder
from probing.daemon.store.files import SystemFiles, open_file
from probing.daemon.store.format import FORMAT_VERSION
from probing.daemon.store.log.parts import TORN, WAL_DIR, part_number, part_path, scan_part
from probing.daemon.store.log.records import ShortHeader
from probing.daemon.store.manifest import MANIFEST, LoadedManifest, Segment, load_manifest
from probing.daemon.store.recovery.directory import NODE_KEY, OWN_NAMES
from probing.daemon.store.recovery.set_aside import CORRUPT_DIR
from probing.daemon.store.segments.files import is_date_dir, segment_parts
from probing.daemon.store.segments.reader import check_segment

__all__ = (
    "Findings",
    "examine",
    "verify_directory",
)


@dataclass(frozen=True, slots=True)
class _Problem:
    """A problem of the file ``path`` in the state directory. ``then``: what the next start does about it.

    ``wrong``: False for files that a crash leaves behind and a start removes, and for files that do not belong to
    probingd.
    """

    path: str
    what: str
    then: str
    wrong: bool = True

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; the next start {self.then}"


@dataclass(slots=True)
class Findings:
    """The problems and the sizes of a state directory. ``daemon_pid``: the pid of the daemon that has locked the
    directory, or "". The numbers of rows come from manifest and log.
    """

    state_dir: str
    format_version: int = FORMAT_VERSION
    daemon_pid: str = ""
    segments: int = 0
    rows: int = 0
    bytes: int = 0
    log_parts: int = 0
    log_rows: int = 0
    set_aside: int = 0
    problems: list[_Problem] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return any(problem.wrong for problem in self.problems)

    @property
    def summary(self) -> str:
        """Returns the findings as one line to print."""
        count = sum(problem.wrong for problem in self.problems)
        verdict = f"{count} things are wrong" if count > 1 else "one thing is wrong" if count else "nothing is wrong"
        used = f", while probingd (pid {self.daemon_pid}) uses it" if self.daemon_pid else ""
        aside = f", {self.set_aside} files set aside earlier" if self.set_aside else ""
        return (
            f"{self.state_dir}: {verdict}; format {self.format_version}, {self.segments} segments with {self.rows} rows"
            f" in {self.bytes} bytes, {self.log_parts} log parts with {self.log_rows} rows{aside}{used}"
        )

    def to_dict(self) -> dict[str, object]:
        """Returns the findings as JSON values."""
        return {**asdict(self), "wrong": self.wrong}


def _stray_files(root: Path, manifest: LoadedManifest, running: bool) -> Iterator[_Problem]:
    """Yields the problems of files that the store does not use, that other users can write, or that the daemon cannot
    use.

    ``running``: a daemon uses the directory, so its temporary files are not a problem.
    """
    owner = root.lstat().st_uid
    for path in _walk(root):
        try:
            state = path.lstat()
        except FileNotFoundError:
            continue
        name = path.relative_to(root).as_posix()
        if reason := _wrong_rights(state, 0 if name == NODE_KEY and state.st_uid == 0 else owner):
            yield _Problem(name, reason, "goes on, but the daemon may not be able to use or remove it")
            continue
        kind = None if stat.S_ISDIR(state.st_mode) else _leftover(name, manifest)
        if kind is not None and not (running and kind.transient):
            yield _Problem(name, kind.what, kind.then, wrong=False)


def _walk(root: Path) -> Iterator[Path]:
    yield root
    for folder, names, files in os.walk(root):
        names.sort()
        yield from (Path(folder, name) for name in (*names, *sorted(files)))


def _wrong_rights(state: os.stat_result, owner: int) -> str:
    mode = stat.S_IMODE(state.st_mode)
    if not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
        return "it is neither a file nor a directory"
    if state.st_uid != owner:
        return f"it belongs to uid {state.st_uid}, the state directory to {owner}"
    if mode & 0o022:
        return f"other users may write to it (mode {mode:04o})"
    needed = 0o700 if stat.S_ISDIR(state.st_mode) else 0o600
    return "" if mode & needed == needed else f"its owner has no permission to use it (mode {mode:04o})"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of file that the store does not use. ``transient``: a running daemon has such files for a short time."""

    what: str
    then: str
    transient: bool = True


_UNFINISHED = _Kind("it was not finished", "removes it")
_SEALED = _Kind("its rows are in segments", "removes it")
_UNNAMED = _Kind("the manifest does not name it", "removes it, because other files have its rows")
_FOREIGN = _Kind("it is not a file of probingd", "leaves it alone", transient=False)


def _leftover(name: str, manifest: LoadedManifest) -> _Kind | None:
    parts = name.split("/")
    if parts[0] == CORRUPT_DIR or (len(parts) == 1 and name in OWN_NAMES):
        return _UNFINISHED if name == f"{MANIFEST}.tmp" else None
    if parts[0] == WAL_DIR and len(parts) == 2 and (number := part_number(parts[1])) is not None:
        return _SEALED if number <= manifest.sealed_to else None
    if len(parts) == 3 and "." in parts[0] and is_date_dir(parts[1]):
        if segment_parts(parts[2]):
            return None if name in manifest.segments else _UNNAMED
        if segment_parts(parts[2].removesuffix(".tmp")):
            return _UNFINISHED
    return _FOREIGN


_FILES = SystemFiles()
_LOSS = "records the loss of its {} rows and goes on without it"
_SALVAGE = "moves it to corrupt/ once it is checked, keeps its good row groups and records the loss of the others"


def verify_directory(path: str | Path) -> list[str]:
    """Returns the problems of the state directory ``path``, one line each.

    Compares checksums without decoding any file. Raises the errors of ``examine``.
    """
    return [str(problem) for problem in examine(path, None).problems if problem.wrong]


def examine(path: str | Path, decoder: Decoder | None) -> Findings:
    """Examines the state directory ``path`` without changing it. With a ``decoder`` every page of every file is read.

    A running daemon may seal, merge and drop meanwhile: a missing file is not a problem if the manifest no longer names
    the file. Raises StoreError if there is no state directory, FormatError for a newer format, and PermissionError if
    this process has no permission to read a file, because missing rights are not damage.
    """
    root = Path(path)
    if not root.is_dir():
        raise StoreError(f"there is no state directory {root}", hint="name the daemon's directory: --state-dir")
    return _Examination(root, decoder).run()


class _Examination:
    def __init__(self, root: Path, decoder: Decoder | None) -> None:
        self._root = root
        self._decoder = decoder
        self._found = Findings(str(root))

    def run(self) -> Findings:
        found = self._found
        found.daemon_pid = lock_holder(self._root)
        manifest = self._manifest()
        if manifest.bad_lines:
            self._problem(
                MANIFEST, f"{manifest.bad_lines} damaged lines", "lists the segments from their files, records the loss"
            )
        for segment in manifest.segments.values():
            self._segment(segment)
        self._log(manifest)
        found.problems += _stray_files(self._root, self._manifest(), bool(found.daemon_pid))
        found.set_aside = len(_FILES.listdir(self._root / CORRUPT_DIR))
        return found

    def _manifest(self) -> LoadedManifest:
        try:
            found = load_manifest(_FILES, self._root)
            if found.unreadable:
                # ``unreadable`` does not say whether rights are missing. If they are, this open raises PermissionError.
                os.close(open_file(self._root / MANIFEST))
            return found
        except PermissionError:
            raise
        except OSError as e:
            raise StoreError(f"the manifest of {self._root} cannot be read: {e.strerror or e}") from e

    def _problem(self, path: str, what: str, then: str, *, wrong: bool = True) -> None:
        self._found.problems.append(_Problem(path, what, then, wrong))

    def _segment(self, segment: Segment) -> None:
        found = self._found
        found.segments += 1
        found.rows += segment.rows
        found.bytes += segment.size
        what = check_segment(_FILES, self._root, segment) if self._decoder is None else self._decoded(segment)
        if what and segment.path in self._manifest().segments:
            at_once = not (self._root / segment.path).exists() or "bytes instead" in what
            then = _LOSS.format(segment.rows) if at_once else _SALVAGE
            self._problem(segment.path, what, then)

    def _decoded(self, segment: Segment) -> str:
        """Returns how the file differs from its entry in the manifest, or ""."""
        assert self._decoder is not None
        try:
            fd = open_file(self._root / segment.path)
        except FileNotFoundError:
            return "it is missing"
        except PermissionError:
            raise
        except (OSError, FormatError) as e:
            return f"it cannot be read: {e}"
        try:
            size, crc = _checksum(fd)
            if size != segment.size:
                return f"it has {size} bytes instead of {segment.size}"
            if crc != segment.crc:
                return "its checksum is wrong"
            found = self._decoder.segment(fd)
        except (OSError, FormatError) as e:
            return f"it cannot be read: {e}"
        finally:
            os.close(fd)
        compared = [
            ("table", found.table, segment.table),
            ("rows", found.rows, segment.rows),
            ("ts_min", found.ts_min, segment.ts_min),
            ("ts_max", found.ts_max, segment.ts_max),
        ]
        if segment.jobs is not None:
            compared.append(("jobs", found.jobs and list(found.jobs), sorted(segment.jobs)))
        wrong = [f"{name} is {read}, the manifest says {named}" for name, read, named in compared if read != named]
        return "; ".join(wrong)[:500]

    def _log(self, manifest: LoadedManifest) -> None:
        numbers = [n for n in map(part_number, _FILES.listdir(self._root / WAL_DIR)) if n]
        known = manifest.found and manifest.sealed_to and not manifest.bad_lines
        expected = manifest.next_sequence if known else None
        void_from: int | None = None
        spans: list[tuple[int, int, int]] = []
        for number in sorted((n for n in numbers if n > manifest.sealed_to), reverse=True):
            span = self._part(number, void_from)
            if span is not None:
                void_from = span[0]
                spans.append((number, *span))
        # Parts that were sealed and removed since the manifest was read are not missing.
        now = self._manifest()
        if now.sealed_to > manifest.sealed_to:
            expected = now.next_sequence
        for number, first, behind in (span for span in reversed(spans) if span[0] > now.sealed_to):
            if expected is not None and first > expected:
                what = f"{first - expected} records before it are missing"
                self._problem(f"{WAL_DIR}/{number:012d}.wal", what, "records the loss")
            expected = max(expected or 0, behind)

    def _part(self, number: int, void_from: int | None) -> tuple[int, int] | None:
        """Returns (first sequence number, next sequence number) of a part's records, or None if the part cannot be
        read.
        """
        path = part_path(self._root, number)
        name = f"{WAL_DIR}/{path.name}"
        try:
            first, behind, rows, problem = self._scan(path, void_from)
        except FileNotFoundError:
            return None
        except PermissionError:
            raise
        except (FormatError, OSError) as e:
            # A daemon that is killed while it begins its newest part leaves a part that is shorter than a header.
            newest_begun = void_from is None and isinstance(e, ShortHeader)
            if newest_begun and self._found.daemon_pid:
                # The daemon runs, and is just beginning the part.
                return None
            then = "removes it" if newest_begun else "moves it to corrupt/ and records the loss"
            if self._manifest().sealed_to < number:
                self._problem(name, f"it cannot be read: {e}", then, wrong=not newest_begun)
            return None
        self._found.log_parts += 1
        self._found.log_rows += rows
        if problem:
            then = "keeps the records before the damage, copies the rest to corrupt/ and records the loss"
            self._problem(name, problem, then)
        return first, behind

    def _scan(self, path: Path, void_from: int | None) -> tuple[int, int, int, str]:
        """Returns (first sequence number, next sequence number, rows, problem) of a part. ``problem``: what is wrong
        with the bytes after the last good record.
        """
        if self._decoder is None:
            part = scan_part(_FILES, path, void_from)
            problem = "" if part.problem == TORN else part.problem
            return part.header.first_sequence, part.part.next_sequence, sum(part.part.rows.values()), problem
        fd = open_file(path)
        try:
            header = self._decoder.log_header(fd)
            log = self._decoder.log(fd, void_from)
        finally:
            os.close(fd)
        if header.number != part_number(path.name):
            raise FormatError(f"it has the header of log part {header.number}")
        return header.first_sequence, log.next_sequence, sum(log.rows.values()), "; ".join(log.problems)[:500]


def _checksum(fd: int) -> tuple[int, int]:
    """Returns size and CRC32 of an open file."""
    size = crc = 0
    while data := os.pread(fd, 1 << 20, size):
        size += len(data)
        crc = zlib.crc32(data, crc)
    return size, crc
