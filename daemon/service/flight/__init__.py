"""Answers Arrow Flight SQL, read-only. Statements pass the same SQL check and the same engine as those of Query."""
