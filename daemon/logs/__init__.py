"""Lines that trainers write to stdout and stderr, where they match an allow-list."""
