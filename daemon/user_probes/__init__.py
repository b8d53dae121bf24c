"""Probes that users write: compiled by bcc in a process of its own, attached and read by the collector."""
