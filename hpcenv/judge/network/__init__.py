"""Which NCCL and fabric settings fit the nodes, and what is wrong with those that are set. Pure."""
