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

    A pause that a client asked for outlives the daemon. A pause by the file ends when the file is removed, even if it
    is removed while no daemon runs.
    """

    def __init__(self, session: Session, file: Path, clock: Clock) -> None:
        self._session = session
        self._file = file
        self._clock = clock
        self.asked = session.pause_asked

    def follow(self) -> bool:
        """Pauses or resumes the session, as ``asked`` and the file require. Returns whether this changed anything."""
        wanted = self.asked or self._file.exists()
        if (wanted, self.asked) == (self._session.paused, self._session.pause_asked):
            return False
        changed = wanted != self._session.paused
        self._session.pause(wanted, asked=self.asked)
        return changed

    @property
    def reason(self) -> str:
        """Returns why the probes are paused, such as ``paused since 2026-11-22 03:12:07Z by `probingctl pause```; empty
        if they are not paused.
        """
        if not self._session.paused:
            return ""
        began = self._session.paused_ns
        since = f" since {utc_second(began + self._clock.pair().mono_to_utc_ns)}" if began else ""
        return f"paused{since} by {'`probingctl pause`' if self.asked else f'the file {self._file}'}"
