"""RDMA devices, InfiniBand and RoCE: ports by sysfs, queue pairs by netlink."""
