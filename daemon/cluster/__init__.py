"""The nodes that a daemon knows, and their state: a state machine in the manner of SWIM, without input or output.

``Membership`` is what other packages use. Nothing here opens a connection or reads a clock: the service does.
"""

from probing.daemon.cluster.membership import Member, Membership

__all__ = ("Member", "Membership")
