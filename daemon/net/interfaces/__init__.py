"""Network interfaces of the node and of the network namespaces of jobs."""
