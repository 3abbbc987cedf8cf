"""Errors of hpcenv as a test reads them: where a line of an error ends depends on the length of this machine's paths."""

import re

from hpcenv.text import wrap


def unwrapped(text: str) -> str:
    """Return text with each line of an error whole: what was wrapped goes on two columns further right."""
    return re.sub(r"\n(?: {8}| {9})(?=\S)", " ", text)


def wrapped(text: str) -> str:
    """Return an error, whose lines are whole, in lines of 80 columns."""
    problem, _, hint = text.partition("hint: ")
    lines = [wrap(line, indent=9) for line in problem.splitlines()]
    lines += [wrap(line, indent=8) for line in f"hint: {hint}".splitlines() if hint]
    return "\n".join([*lines, ""])
