"""Activities: what a rank does, for people."""
