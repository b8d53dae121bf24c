"""What ``preflight`` asks nodes, and how it shows what the checks found."""
