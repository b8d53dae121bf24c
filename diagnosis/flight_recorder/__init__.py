"""Dumps of PyTorch's flight recorder, read as plain data, and what they show of a hang."""
