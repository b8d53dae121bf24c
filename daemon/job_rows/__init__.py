"""Reads the data that jobs report: rows of ``probing.ExternalTable``, spans, events, metrics and steps."""
