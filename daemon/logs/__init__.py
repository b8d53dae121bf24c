"""Records lines that trainers write to stdout and stderr and that match an allow-list."""
