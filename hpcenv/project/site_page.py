"""A page about the effect of a site profile on a run. It lists every value with condition, reason and source. Pure.

Runs on: LOGIN NODE.
"""

from hpcenv.project.site_profile import Profile, UsedValue
from hpcenv.text import wrap


def page(profile: Profile) -> str:
    """Return the page of a profile that is made for a run (`Profile.for_run`)."""
    lines = [wrap(f"site profile {profile.name}  ({profile.path})", indent=2)]
    if profile.no_runtime:
        lines.append(wrap(f"NO RUNTIME  hpcenv cannot start a SIF here: {profile.no_runtime}", indent=12))
    lines += [wrap(f"note: {note}", indent=2) for note in profile.notes]
    for value in profile.used:
        lines += ["", _head(value), *_details(value)]
    if not profile.used:
        lines += ["", "no value for this run"]
    if profile.left_out:
        lines += ["", *(wrap(f"note: {text}", indent=2) for text in profile.left_out)]
    return "\n".join(lines) + "\n"


def _head(value: UsedValue) -> str:
    what = f"{value.kind} {value.name}".rstrip()
    sign = {"variable": " = ", "module": " from ", "bind": " at "}.get(value.kind, " ")
    return wrap(f"{what}{sign}{value.value}" if value.value else what, indent=4)


def _details(value: UsedValue) -> list[str]:
    parts = (
        ("for", value.when),
        ("reason", value.reason),
        ("source", value.source),
        ("evidence", value.evidence),
        ("must be checked again after", value.expires),
    )
    return [wrap(f"    {label}: {text}", indent=6) for label, text in parts if text]
