"""Finds the processes that train: their discovery, identity and lifecycle, and the readers that read them."""
