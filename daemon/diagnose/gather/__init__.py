"""Gathers the facts of a job from one snapshot of tables and from its processes."""
