"""Runs probes that users write: a process with bcc compiles them, the collector attaches and reads them."""
