"""Runs probes that users write: bcc compiles them in a process of its own, the collector attaches and reads them."""
