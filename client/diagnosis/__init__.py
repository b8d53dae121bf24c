"""Asks nodes for what ``diagnose`` needs, and shows what the rules find."""
