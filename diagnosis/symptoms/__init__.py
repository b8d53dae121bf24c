"""Symptoms: faults of the hardware and the system of a node, whether they affect a job or not."""
