"""The kernel's view of a process: the waits of its threads, its use of resources, and its limits."""
