"""Asks nodes for the facts that ``diagnose`` needs, and shows the findings of the rules."""
