"""Checks that need a GPU: parts, each with a limit, and the dated section that says what was seen."""
