"""The collector process: builds the sources, drains the rings into the log, answers the service."""
