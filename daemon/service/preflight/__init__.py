"""The facts of this node before a job: from tables, about the network, and the versions of an interpreter."""
