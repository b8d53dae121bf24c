"""Who takes part in a simulation: names and addresses of nodes, and what is wrong with some of them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

__all__ = ("FIRST", "Cast")

# Addresses count up from here. All of 127.0.0.0/8 is this machine.
FIRST = int(ipaddress.IPv4Address("127.77.0.1"))


@dataclass(frozen=True, slots=True)
class Cast:
    """``count`` nodes in ``processes``, each with a port from ``port`` on; some behave badly, chosen by their number.

    A node whose number is 7 modulo ``dead_of`` takes connections and never answers, one that is 3 modulo
    ``refusing_of`` has no listener. Those that are 5 modulo ``slow_of`` hold each second call back for ``slow_s``,
    those that are 1 modulo ``losing_of`` break each second call off, and those that are 0 modulo ``breaking_of`` break
    off when they have passed on half of the answers of others. 0: none do. ``delay_s`` is the time that each answer
    takes at least, ``clock_s`` how far clocks may be ahead or behind. ``jobs_ns``: the nodes have the jobs of
    ``hung_job`` as they are at this time, and not ``rows`` operations.
    """

    count: int
    port: int
    rows: int = 20
    processes: int = 1
    dead_of: int = 0
    refusing_of: int = 0
    slow_of: int = 0
    slow_s: float = 5.0
    losing_of: int = 0
    breaking_of: int = 0
    delay_s: float = 0.0
    clock_s: float = 0.0
    jobs_ns: int = 0

    def address(self, number: int) -> str:
        return f"{ipaddress.IPv4Address(FIRST + number)}:{self.port + number % self.processes}"

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.address(number) for number in range(self.count))

    def number(self, host: str) -> int:
        """Returns the number of the node at ``host``; negative or ``count`` and more for nobody."""
        return int(ipaddress.IPv4Address(host)) - FIRST

    @staticmethod
    def name(number: int) -> str:
        """Returns the name; all have one length, so that prepared answers need no other offsets."""
        return f"sim-{number:06d}"

    def dead(self, number: int) -> bool:
        return _one_of(number, self.dead_of, 7)

    def refuses(self, number: int) -> bool:
        return _one_of(number, self.refusing_of, 3)

    def slow(self, number: int) -> bool:
        return _one_of(number, self.slow_of, 5)

    def loses(self, number: int) -> bool:
        return _one_of(number, self.losing_of, 1)

    def breaks_in_the_middle(self, number: int) -> bool:
        return _one_of(number, self.breaking_of, 0)

    def clock_ns(self, number: int) -> int:
        """Returns how far the node's clock is ahead of ours."""
        return int(self.clock_s * 1e9 * (number % 21 - 10) / 10)


def _one_of(number: int, share: int, rest: int) -> bool:
    return share > 0 and number % share == rest % share
