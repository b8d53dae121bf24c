"""Activities: what a rank is doing, as text for users."""
