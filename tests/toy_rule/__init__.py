"""A whole rule, as docs/adding.md shows it."""
