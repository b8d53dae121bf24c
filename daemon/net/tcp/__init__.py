"""TCP connections of watched processes, by the kernel's sock_diag."""
