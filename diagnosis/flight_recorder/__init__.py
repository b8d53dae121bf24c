"""Reads dumps of PyTorch's flight recorder as plain data, and finds out what they show about a hang."""
