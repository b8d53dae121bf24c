"""Asks nodes for what ``preflight`` needs, and shows what the checks found."""
