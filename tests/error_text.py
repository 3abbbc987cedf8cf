"""Errors of hpcenv as a test reads them: where a line of an error ends depends on the length of this machine's paths."""

import re

from hpcenv.text import WIDTH, wrap


def unwrapped(text: str) -> str:
    """Return text with each line of an error whole, as it was before it was wrapped at 80 columns."""
    whole: list[str] = []
    room = WIDTH
    for line in text.split("\n"):
        # What was wrapped goes on two columns further right, and its first word did not fit into the line before.
        begin = re.match(r" {8,9}(`[^`]+`\S*|\S+)", line)
        if begin and len(begin[1]) >= room and whole:
            whole[-1] += f" {line.strip()}"
        else:
            whole.append(line)
        room = WIDTH - len(line)
    return "\n".join(whole)


def wrapped(text: str) -> str:
    """Return an error, whose lines are whole, in lines of 80 columns."""
    problem, _, hint = text.partition("hint: ")
    lines = [wrap(line, indent=9) for line in problem.splitlines()]
    lines += [wrap(line, indent=8) for line in f"hint: {hint}".splitlines() if hint]
    return "\n".join([*lines, ""])
