"""Attaches programs to code and tracepoints, by pinned links or by perf events in pinned maps."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from probing.api.errors import AttachError
from probing.daemon.bpf import attach, syscalls
from probing.daemon.bpf.loader import Loader
from probing.daemon.bpf.probe_slots import PROBE_SLOTS

__all__ = ("Link", "Links", "checked_points")


@dataclass(slots=True)
class Link:
    """An attached program. ``adopted``: the previous daemon attached it.

    ``file``: (device, inode) of the probed file, None for a tracepoint. ``pid``: the only probed process, or 0 for all.
    While ``pins`` exist the program stays attached; without pins, while this process holds ``fds``.
    """

    name: str
    program: str
    file: tuple[int, int] | None
    adopted: bool
    pid: int = 0
    fds: list[int] = field(default_factory=list)
    pins: list[Path] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Returns the number of kernel links that this link stands for."""
        return len(self.fds) + len(self.pins)

    def release(self) -> None:
        """Closes our descriptors. A pinned link stays attached."""
        while self.fds:
            os.close(self.fds.pop())

    def detach(self) -> list[int]:
        """Ends the link, pinned or not. Returns the ids of programs that end soon (``attach.wait_for_end``)."""
        for path in self.pins:
            # Closing a link's last descriptor ends it at once; removing its last pin ends it only some time later.
            with contextlib.suppress(OSError):
                self.fds.append(syscalls.object_get(path))
            path.unlink(missing_ok=True)
        self.pins.clear()
        programs = [program for fd in self.fds if (program := attach.program_in_map(fd)) is not None]
        self.release()
        return programs


class Links(dict[str, Link]):
    """The links of a session, by name."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader = loader
        self._multi = loader.features.uprobe_multi

    def adopt(self) -> None:
        """Takes over the links that the previous daemon pinned."""
        for path in sorted(self._loader.path.iterdir()):
            if path.name.startswith("link_"):
                self._adopt(path)

    def _adopt(self, path: Path) -> None:
        name, _, _ = path.name.removeprefix("link_").rpartition("-")
        program, *rest = name.split("-")
        file = (int(rest[0], 16), int(rest[1], 16)) if len(rest) == 3 else None
        self.setdefault(name, Link(name, program, file, adopted=True)).pins.append(path)

    def tracepoint(self, program: str, handle: int, tracepoint: str | None, *, pinned: bool = True) -> None:
        """Attaches a program to a raw tracepoint. Raises AttachError, PrivilegeError.

        ``tracepoint``: None for a tp_btf program, which itself names its tracepoint.
        """
        if program in self:
            return
        link = Link(program, program, None, adopted=False)
        keep = partial(self._pin, link) if pinned else link.fds.append
        self._try(link, lambda: keep(syscalls.open_raw_tracepoint(handle, tracepoint)))

    def uprobe(
        self,
        program: str,
        handle: int,
        fd: int,
        file: tuple[int, int],
        points: Sequence[tuple[int, int]],
        key: str,
        on_return: bool,
        pid: int = 0,
    ) -> Link:
        """Attaches ``program`` at ``points`` (file offset, cookie) of ``file``, whose descriptor is ``fd``; an existing
        link is returned as it is.

        With ``pid`` only that process is probed, and the link ends with us. Raises AttachError, PrivilegeError. While a
        probe is on an inode, the kernel holds the inode, so no other file gets its number.
        """
        hashed = repr((list(points), key, on_return, *([pid] if pid else [])))
        digest = hashlib.sha256(hashed.encode()).hexdigest()[:16]
        name = f"{program}-{file[0]:x}-{file[1]:x}-{digest}"
        link = self.get(name)
        if link is not None and link.count == (1 if self._multi else len(points)):
            return link
        if link is not None:
            # The previous daemon ended while it attached this link.
            self.end(link)
        link = Link(name, program, file, adopted=False, pid=pid)
        self._try(link, lambda: self._place(link, handle, fd, points, on_return, pid))
        return link

    def end(self, *links: Link) -> None:
        """Ends links, pinned or not: their programs see no later calls."""
        attach.wait_for_end([program for link in links for program in link.detach()])
        for link in links:
            self.pop(link.name, None)

    def on_files(self) -> dict[str, Link]:
        """Returns the links on files that probe all processes."""
        return {name: link for name, link in list(self.items()) if link.file is not None and not link.pid}

    def _try(self, link: Link, place: Callable[[], None]) -> None:
        try:
            place()
        except OSError as e:
            self.end(link)
            raise attach.refused(e, f"{link.program} cannot be attached") from e
        except BaseException:
            self.end(link)
            raise
        self[link.name] = link

    def _place(
        self, link: Link, handle: int, fd: int, points: Sequence[tuple[int, int]], on_return: bool, pid: int
    ) -> None:
        features = self._loader.features
        keep = link.fds.append if pid else partial(self._pin, link)
        if self._multi:
            offsets, cookies = [offset for offset, _ in points], [cookie for _, cookie in points]
            keep(attach.attach_multi(handle, fd, offsets, cookies, on_return, pid))
            return
        for offset, cookie in points:
            own = features.attach_cookie and features.perf_link
            program = handle if own else self._loader.copy(link.program, cookie)
            try:
                if features.perf_link:
                    keep(attach.attach_perf(program, fd, offset, cookie, on_return, pid))
                elif features.event_map and not pid:
                    keep(attach.attach_perf_in_map(program, fd, offset, on_return))
                else:
                    link.fds.append(attach.attach_perf_by_ioctl(program, fd, offset, on_return, pid))
            finally:
                if not own:
                    os.close(program)

    def _pin(self, link: Link, fd: int) -> None:
        path = self._loader.pin("link", f"{link.name}-{link.count}")
        try:
            syscalls.object_pin(path, fd)
        finally:
            os.close(fd)
        link.pins.append(path)


def checked_points(program: str, offsets: Sequence[int], cookie: int | Sequence[int]) -> list[tuple[int, int]]:
    """Returns pairs (offset, cookie). Raises AttachError if the lengths differ, or if a cookie names a slot that does
    not exist.
    """
    cookies = [cookie] * len(offsets) if isinstance(cookie, int) else list(cookie)
    if len(cookies) != len(offsets) or not offsets:
        raise AttachError(f"{program} cannot be attached with {len(offsets)} offsets and {len(cookies)} cookies")
    if any(value & 0xFFFF >= PROBE_SLOTS for value in cookies):
        raise AttachError(f"{program} cannot be attached: a slot of its cookies is not below {PROBE_SLOTS}")
    return list(zip(offsets, cookies, strict=True))
