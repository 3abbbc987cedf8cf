"""The smoke test: its plan, and the judgement of what its ranks reported. Pure."""
