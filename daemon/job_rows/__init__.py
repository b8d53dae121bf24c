"""Reads the rows that jobs report with ``probing.ExternalTable``, spans, events, metrics and steps."""
