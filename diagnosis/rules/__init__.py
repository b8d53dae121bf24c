"""The rules, one in each file."""
