"""What a site profile gives to a run, as a page: every value with condition, reason and source. Pure.

Runs on: LOGIN NODE.
"""

import textwrap

from hpcenv.project.site_profile import Profile, UsedValue

WIDTH = 80


def page(profile: Profile) -> str:
    """Return the page of a profile that is made for a run (`Profile.for_run`)."""
    lines = [_wrapped(f"site profile {profile.name}  ({profile.path})", 2)]
    if profile.no_runtime:
        lines.append(_wrapped(f"NO RUNTIME  hpcenv cannot start a SIF here: {profile.no_runtime}", 12))
    lines += [_wrapped(f"note: {note}", 2) for note in profile.notes]
    for value in profile.used:
        lines += ["", _head(value), *_details(value)]
    if not profile.used:
        lines += ["", "no value for this run"]
    if profile.left_out:
        lines += ["", *(_wrapped(f"note: {text}", 2) for text in profile.left_out)]
    return "\n".join(lines) + "\n"


def _head(value: UsedValue) -> str:
    what = f"{value.kind} {value.name}".rstrip()
    sign = {"variable": " = ", "module": " from ", "bind": " at "}.get(value.kind, " ")
    return _wrapped(f"{what}{sign}{value.value}" if value.value else what, 4)


def _details(value: UsedValue) -> list[str]:
    parts = (
        ("for", value.when),
        ("reason", value.reason),
        ("source", value.source),
        ("evidence", value.evidence),
        ("must be checked again after", value.expires),
    )
    return [_wrapped(f"    {label}: {text}", 6) for label, text in parts if text]


def _wrapped(line: str, indent: int) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
