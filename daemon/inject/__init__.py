"""Runs code in a process on request. Unless ``inject.enabled`` is set, nothing here is imported by any process."""
