"""Rows that jobs write about themselves, with ``probing.ExternalTable``, spans, events, metrics and steps."""
