"""The coordinator of a job: one node judges the facts of all its nodes."""
