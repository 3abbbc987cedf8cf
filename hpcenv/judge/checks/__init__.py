"""The preflight checks: a table of all checks, and the judgement of their outcomes. Pure."""
