"""The full-screen view of ``top``."""
