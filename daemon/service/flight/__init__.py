"""Answers Arrow Flight SQL, read-only, through the gate and the engine that answer Query."""
