"""Which NCCL and fabric settings fit the nodes, and which given settings are wrong. Pure."""
