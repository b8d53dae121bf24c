"""Who asks: a user of this machine, or an address."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("NOBODY", "Caller")


@dataclass(frozen=True)
class Caller:
    """``listener``: ``unix`` or ``tcp``. ``who``: the uid at the other end, or its address. ``pid`` 0: not known.
    ``reserved``: it has places of its own, as root and the daemon itself have."""

    listener: str
    who: str
    pid: int = 0
    reserved: bool = False

    @property
    def share(self) -> str:
        """Whom it shares threads and connections with: ``root`` (reserved), the other users (``unix``), or ``tcp``."""
        return "root" if self.reserved else self.listener

    @property
    def key(self) -> tuple[str, str]:
        """What its calls are counted by: a user with all its processes is one."""
        return self.listener, self.who

    def __str__(self) -> str:
        return f"unix: uid {self.who}, pid {self.pid}" if self.listener == "unix" else f"tcp: {self.who}"


NOBODY = Caller("", "")
