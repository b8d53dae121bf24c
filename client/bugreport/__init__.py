"""A bug report: what it asks, what it leaves out, and its archive."""
