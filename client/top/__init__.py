"""The full screen of ``top``."""
