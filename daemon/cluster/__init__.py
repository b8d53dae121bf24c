"""The nodes of the cluster and their state, as this node knows them: a state machine like SWIM, without input or
output.

Other packages use ``Membership``. Nothing here opens a connection or reads a clock: the service does.
"""

from probing.daemon.cluster.membership import Member, Membership

__all__ = ("Member", "Membership")
