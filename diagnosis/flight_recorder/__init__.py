"""Reads dumps of PyTorch's flight recorder as plain data, and diagnoses hangs from them."""
