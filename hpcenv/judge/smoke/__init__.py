"""The smoke test: its plan, and the judgement of the reports of its ranks. Pure."""
