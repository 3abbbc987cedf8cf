"""The network of this machine: interfaces, RDMA ports, how it is tuned, and whom it reaches."""
