"""Decide which settings of NCCL and the fabric fit the nodes, and which given settings are wrong. Pure."""
