"""Asks nodes for the facts that ``preflight`` checks, and formats the results."""
