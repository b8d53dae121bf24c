"""The collector process: puts the sources together, drains the rings into the log, answers the service."""
