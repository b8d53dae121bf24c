"""Many nodes in a few processes: real sockets and the real protocol, generated data, and faults on demand."""
