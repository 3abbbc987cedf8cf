"""The network of this machine: its interfaces, RDMA ports and tuning, and which nodes this machine reaches."""
