"""What ``diagnose`` asks, and how it shows what the rules find."""
