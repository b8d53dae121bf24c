"""Pauses all probes while a client asks for it (`probingctl pause`), or while a file exists."""

from __future__ import annotations

from pathlib import Path

from probing.api.text import utc_second
from probing.daemon.bpf.session import Session
from probing.daemon.clock import Clock

__all__ = ("Pausing",)


class Pausing:
    """The state of the pause. ``asked``: a client has paused the probes. ``file`` pauses the probes as long as it
    exists.
    """

    def __init__(self, session: Session, file: Path, clock: Clock) -> None:
        self._session = session
        self._file = file
        self._clock = clock
        # A restart keeps a pause that a client asked for; a pause by the file ends with the file.
        self.asked = session.paused and not file.exists()
        # When the pause began, UTC ns; None if an earlier daemon began it.
        self._since: int | None = None

    def follow(self) -> bool:
        """Pauses or resumes the session, as ``asked`` and the file require. Returns whether this changed anything."""
        wanted = self.asked or self._file.exists()
        if wanted == self._session.paused:
            return False
        self._since = self._clock.pair().real_ns if wanted else None
        self._session.pause(wanted)
        return True

    @property
    def reason(self) -> str:
        """Returns why the probes are paused, such as ``paused since 2026-11-22 03:12:07Z by `probingctl pause```; empty
        if they are not paused.
        """
        if not self._session.paused:
            return ""
        since = "" if self._since is None else f" since {utc_second(self._since)}"
        return f"paused{since} by {'`probingctl pause`' if self.asked else f'the file {self._file}'}"
