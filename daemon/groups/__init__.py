"""Groups of workers on this node: the launchers that are connected, and what a group's policy does next."""
