"""Look at a state directory without touching it: ``probingd verify``."""

from __future__ import annotations

import fcntl
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from probing.api.errors import FormatError, StoreError
from probing.daemon.store.decoder import Decoder
from probing.daemon.store.files import SystemFiles, open_file
from probing.daemon.store.log.parts import TORN, WAL_DIR, part_number, part_path, scan_part
from probing.daemon.store.log.records import FORMAT_VERSION
from probing.daemon.store.manifest import MANIFEST, LoadedManifest, Segment, load_manifest
from probing.daemon.store.recovery.recover import CORRUPT_DIR, OWN_NAMES
from probing.daemon.store.segments.reader import check_segment, is_date_dir, segment_parts

__all__ = ("Findings", "Problem", "examine", "lock_holder", "verify_directory")

_FILES = SystemFiles()
_LOSS = "names the loss of its {} rows and goes on without it"
_SALVAGE = "sets it aside when it comes to check it, keeps its good row groups and names the loss of the others"


@dataclass(frozen=True, slots=True)
class Problem:
    """``path`` in the state directory, ``what`` is the matter, ``then``: what a start does about it. ``wrong`` is
    False for what a crash leaves behind and a start tidies up, and for files that are not ours."""

    path: str
    what: str
    then: str
    wrong: bool = True

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; a start {self.then}"


@dataclass(slots=True)
class Findings:
    """``daemon_pid`` has the directory locked, "" for nobody; rows are those that the manifest and the log name."""

    state_dir: str
    format_version: int = FORMAT_VERSION
    daemon_pid: str = ""
    segments: int = 0
    rows: int = 0
    bytes: int = 0
    log_parts: int = 0
    log_rows: int = 0
    set_aside: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return any(problem.wrong for problem in self.problems)

    @property
    def summary(self) -> str:
        """One line for people."""
        count = sum(problem.wrong for problem in self.problems)
        verdict = f"{count} things are wrong" if count > 1 else "one thing is wrong" if count else "nothing is wrong"
        used = f", while probingd (pid {self.daemon_pid}) uses it" if self.daemon_pid else ""
        aside = f", {self.set_aside} files set aside earlier" if self.set_aside else ""
        return (
            f"{self.state_dir}: {verdict}; format {self.format_version}, {self.segments} segments with {self.rows} rows"
            f" in {self.bytes} bytes, {self.log_parts} log parts with {self.log_rows} rows{aside}{used}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "wrong": self.wrong}


def verify_directory(path: str | Path) -> list[str]:
    """What is wrong with the state directory ``path``, one line each, by checksums alone: nothing is decoded.

    Raises what ``examine`` raises.
    """
    return [str(problem) for problem in examine(path, None).problems if problem.wrong]


def examine(path: str | Path, decoder: Decoder | None) -> Findings:
    """All that can be seen without a start. With a ``decoder`` every page of every file is read as well.

    A daemon that runs meanwhile may seal, merge and drop: what is gone then, and the manifest does not name any more,
    is no problem. Raises StoreError when there is no state directory, FormatError for a newer format.
    """
    root = Path(path)
    if not root.is_dir():
        raise StoreError(f"there is no state directory {root}", hint="name the one that the daemon uses: --state-dir")
    return _Examination(root, decoder).run()


def lock_holder(root: Path) -> str:
    """The pid of the daemon that has ``root`` locked, "?" when it is not known; "" when nobody has."""
    try:
        fd = os.open(root / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "?"
    except OSError:
        return ""
    finally:
        os.close(fd)
    return ""


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
                MANIFEST, f"{manifest.bad_lines} damaged lines", "takes segments from their files, and names the loss"
            )
        for segment in manifest.segments.values():
            self._segment(segment)
        self._log(manifest)
        for problem in self._stray(self._manifest()):
            found.problems.append(problem)
        found.set_aside = len(_FILES.listdir(self._root / CORRUPT_DIR))
        return found

    def _manifest(self) -> LoadedManifest:
        try:
            return load_manifest(_FILES, self._root)
        except OSError as e:
            raise StoreError(f"the manifest of {self._root} cannot be read: {e.strerror or e}") from e

    def _problem(self, path: str, what: str, then: str, *, wrong: bool = True) -> None:
        self._found.problems.append(Problem(path, what, then, wrong))

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
        """Why the file is not what the manifest says."""
        assert self._decoder is not None
        try:
            fd = open_file(self._root / segment.path)
        except FileNotFoundError:
            return "it is missing"
        except (OSError, FormatError) as e:
            return f"it cannot be read: {e}"
        try:
            size, crc = _checksum(fd)
            if size != segment.size:
                return f"it has {size} bytes instead of {segment.size}"
            if crc != segment.crc:
                return "its checksum is wrong"
            told = self._decoder.ask("segment", fd)
        except (OSError, FormatError) as e:
            return f"it cannot be read: {e}"
        finally:
            os.close(fd)
        wanted = {
            "table": segment.table, "rows": segment.rows, "ts_min": segment.ts_min, "ts_max": segment.ts_max,
            **({} if segment.jobs is None else {"jobs": sorted(segment.jobs)}),
        }  # fmt: skip
        wrong = [f"{name} is {told.get(name)}, the manifest says {value}" for name, value in wanted.items()
                 if told.get(name) != value]  # fmt: skip
        return "; ".join(wrong)[:500]

    def _log(self, manifest: LoadedManifest) -> None:
        numbers = [n for n in map(part_number, _FILES.listdir(self._root / WAL_DIR)) if n]
        known = manifest.found and manifest.sealed_to and not manifest.bad_lines
        expected = manifest.next_sequence if known else None
        void_from: int | None = None
        told: list[tuple[int, int, int]] = []
        for number in sorted((n for n in numbers if n > manifest.sealed_to), reverse=True):
            span = self._part(number, void_from)
            if span is not None:
                void_from = span[0]
                told.append((number, *span))
        # What was sealed and removed since the first look is not missing.
        now = self._manifest()
        if now.sealed_to > manifest.sealed_to:
            expected = now.next_sequence
        for number, first, behind in (span for span in reversed(told) if span[0] > now.sealed_to):
            if expected is not None and first > expected:
                what = f"{first - expected} records before it are missing"
                self._problem(f"{WAL_DIR}/{number:012d}.wal", what, "names the loss")
            expected = max(expected or 0, behind)

    def _part(self, number: int, void_from: int | None) -> tuple[int, int] | None:
        """The sequence numbers of its first record and behind its last; None when it cannot be read."""
        path = part_path(self._root, number)
        name = f"{WAL_DIR}/{path.name}"
        try:
            first, behind, rows, problem = self._scan(path, void_from)
        except FileNotFoundError:
            return None
        except (FormatError, OSError) as e:
            # A daemon that was killed while it made its newest part left less than a header.
            newest_begun = void_from is None and "ends within its header" in str(e)
            then = "removes it" if newest_begun else "moves it to corrupt/ and names the loss"
            if self._manifest().sealed_to < number:
                self._problem(name, f"it cannot be read: {e}", then, wrong=not newest_begun)
            return None
        self._found.log_parts += 1
        self._found.log_rows += rows
        if problem:
            self._problem(name, problem, "takes what is before, copies the rest to corrupt/, and names the loss")
        return first, behind

    def _scan(self, path: Path, void_from: int | None) -> tuple[int, int, int, str]:
        if self._decoder is None:
            part = scan_part(_FILES, path, void_from)
            problem = "" if part.problem == TORN else part.problem
            return part.header.first_sequence, part.part.next_sequence, sum(part.part.rows.values()), problem
        fd = open_file(path)
        try:
            header = self._decoder.ask("header", fd)
            told = self._decoder.ask("log", fd, void_from=void_from, send=False)
        finally:
            os.close(fd)
        problems = list(told["problems"])
        if header["number"] != part_number(path.name):
            raise FormatError(f"it says it is log part {header['number']}")
        return header["first_sequence"], told["next_sequence"], sum(told["rows"].values()), "; ".join(problems)[:500]

    def _stray(self, manifest: LoadedManifest) -> Iterator[Problem]:
        """Files that nothing names, and those that somebody else may write or the daemon cannot."""
        root, running = self._root, bool(self._found.daemon_pid)
        owner = root.lstat().st_uid
        for path in _walk(root):
            try:
                state = path.lstat()
            except FileNotFoundError:
                continue
            name = path.relative_to(root).as_posix()
            if why := _wrong_rights(state, owner):
                yield Problem(name, why, "goes on, but the daemon may not be able to use or remove it")
                continue
            kind = None if stat.S_ISDIR(state.st_mode) else _leftover(name, manifest)
            if kind is not None and not (running and kind.transient):
                yield Problem(name, kind.what, kind.then, wrong=False)


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
        return f"others may write to it (mode {mode:04o})"
    wanted = 0o700 if stat.S_ISDIR(state.st_mode) else 0o600
    return "" if mode & wanted == wanted else f"its owner may not use it (mode {mode:04o})"


@dataclass(frozen=True, slots=True)
class _Kind:
    """Of a file that nothing names. ``transient``: a daemon that runs has such files for a moment."""

    what: str
    then: str
    transient: bool = True


_UNFINISHED = _Kind("it was not finished", "removes it")
_SEALED = _Kind("its rows are in segments", "removes it")
_UNNAMED = _Kind("the manifest does not name it", "removes it, as its rows are elsewhere")
_FOREIGN = _Kind("it is no file of probingd", "leaves it alone", transient=False)


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


def _checksum(fd: int) -> tuple[int, int]:
    """Size and CRC32 of all that is in an open file."""
    size = crc = 0
    while data := os.pread(fd, 1 << 20, size):
        size += len(data)
        crc = zlib.crc32(data, crc)
    return size, crc
