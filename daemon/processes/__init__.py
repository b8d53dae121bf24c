"""Which processes train: discovery, identity, lifecycle, and the readers that look at them."""
