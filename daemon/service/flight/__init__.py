"""Answers Arrow Flight SQL, read-only, by the gate and the engine that answer Query."""
