"""The preflight checks: the table of all, and how their outcomes are judged. Pure."""
