"""The smoke test, judged: what it tries, and what its ranks reported. Pure."""
