"""The network of this machine: interfaces, RDMA ports, tuning, and the nodes that it reaches."""
