"""Identifies the caller of a request: a local user, or an address."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("NOBODY", "Caller")


@dataclass(frozen=True)
class Caller:
    """``listener``: ``unix`` or ``tcp``. ``who``: uid or address of the other end. ``pid`` 0: unknown. ``reserved``: it
    has threads and slots reserved for it, as root and the daemon itself have."""

    listener: str
    who: str
    pid: int = 0
    reserved: bool = False

    @property
    def share(self) -> str:
        """The callers with which it shares threads and connections: ``root`` (reserved), ``unix`` or ``tcp``."""
        return "root" if self.reserved else self.listener

    @property
    def key(self) -> tuple[str, str]:
        """The key by which its calls are counted: all processes of a user are one caller."""
        return self.listener, self.who

    def __str__(self) -> str:
        return f"unix: uid {self.who}, pid {self.pid}" if self.listener == "unix" else f"tcp: {self.who}"


NOBODY = Caller("", "")
