"""Finds the processes that train: discovery, identity, lifecycle, and the readers that read them."""
