"""The kernel's view of a process: what its threads wait for, what it used, and what bounds it."""
