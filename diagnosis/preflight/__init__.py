"""What must be right before a job starts: facts of nodes, and one check a file. Pure."""
