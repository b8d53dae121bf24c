"""What must be right before a job starts: facts of nodes, and the checks, one in each file. No input or output."""
