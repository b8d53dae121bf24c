"""The nodes of the cluster and their state, as this node knows them: a state machine like SWIM, without input or
output.

Other packages use ``Membership``. This package opens no connection and reads no clock: the service does both.
"""

from probing.daemon.cluster.membership import Member, Membership

__all__ = ("Member", "Membership")
