"""The judgement of the smoke test: what it tries, and what its ranks reported. Pure."""
