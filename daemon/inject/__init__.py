"""Runs code in a process on request. Without ``inject.enabled`` no process imports this package."""
