"""Makes a bug report: asks the nodes, replaces names, and writes the archive."""
