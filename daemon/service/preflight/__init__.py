"""The facts of this node before a job: tables, the network, versions of an interpreter."""
