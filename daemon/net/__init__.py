"""The network of the node: interfaces, TCP connections of processes, RDMA ports and queue pairs."""
