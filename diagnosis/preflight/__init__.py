"""The checks of nodes before a job starts, one in each file, and the facts that they need. No input or output."""
