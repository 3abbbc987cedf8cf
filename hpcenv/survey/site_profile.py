"""The site profile that `hpcenv doctor --write` writes.

Runs on: LOGIN NODE. For a value that is unknown, the profile has a comment with the reason and no guessed value.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpcenv.errors import EnvironmentUnreadable, HpcenvError, WouldOverwrite
from hpcenv.project import document, site_files, toml_files
from hpcenv.project.context import Context
from hpcenv.project.site import NAME, SiteFile
from hpcenv.records.files import write_text
from hpcenv.survey.report import UNKNOWN, Diagnosis, PartitionFacts
from hpcenv.version import VERSION


def write(found: Diagnosis, context: Context, *, path: str | None, force: bool) -> Path:
    """Write the profile to a temporary file, rename the file, and return its path.

    Args:
        path: a file, or a folder for the file; None for the folder of the user's profiles.
        force: whether to replace an existing profile. Changes that the user made in the replaced profile are lost.

    Raises:
        EnvironmentUnreadable: the name of the cluster is unknown, or the values do not fit into a site profile.
        WouldOverwrite: the file exists.
    """
    if not found.cluster or not NAME.match(found.cluster):
        raise EnvironmentUnreadable(
            "there is nothing to make a site profile of",
            why=f"the cluster's name is not known: {found.how('cluster')}",
            hint="make sure that `scontrol show config` answers, or set SLURM_CONF to the cluster's slurm.conf",
        )
    target = _target(found, context, path)
    if target.exists() and not force:
        raise WouldOverwrite(f"`{target}` exists", hint="--force replaces it; changes made in it are lost")
    text = render(found, context)
    site, problems = document.parse(SiteFile, toml_files.loads(text.encode(), target, error=HpcenvError))
    if site is None:
        raise EnvironmentUnreadable("the found values do not fit into a site profile", why="\n".join(problems))
    # If other users could write to the profile, they could set variables for this user's runs.
    write_text(text, target, mode=0o644)
    return target


def _target(found: Diagnosis, context: Context, path: str | None) -> Path:
    name = f"{found.cluster}{site_files.SUFFIX}"
    if not path:
        return site_files.user_folder(context.environ) / name
    given = context.cwd / Path(path).expanduser()
    return given / name if given.is_dir() else given


def render(found: Diagnosis, context: Context) -> str:
    """Return the text of the profile. For each value that was found, a comment says how."""
    day = f"{context.now.tm_year:04}-{context.now.tm_mon:02}-{context.now.tm_mday:02}"
    lines = [
        f"# Site profile, written by hpcenv doctor {VERSION} on {day}. Edit it as you like.",
        "# The command line and hpcenv.toml have priority over the values in this file.",
        f"name = {_text(found.cluster)}",
        "",
        "# Environment modules that every job loads, in this order.",
        "# modules = []",
        *_runtime(found),
        "",
        "[match]",
        *_value("cluster", _text(found.cluster), found.how("cluster")),
        "",
        "# Defaults for `hpcenv submit`.",
        "[submit]",
        *_submit(found),
        "",
        "# Folders of the nodes that containers see.",
        "# [[bind]]",
        '# source = "/scratch"',
        "",
        "# Variables for the ranks, each with its reason:",
        "# [env.NCCL_SOCKET_IFNAME]",
        '# value = "ib0"',
        '# reason = "the other interfaces do not reach all nodes"',
        "",
        "# The partitions. `hpcenv doctor` shows more facts about the partitions and about Slurm.",
    ]
    for part in found.partitions:
        lines += ["", *_partition(part)]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """Return a TOML basic string. Control characters need no escapes, because all values of doctor are printable."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _value(key: str, value: str, how: str) -> list[str]:
    return [f"# {how}", f"{key} = {value}"]


def _word(value: str) -> str | None:
    usable = value not in (UNKNOWN, "") and re.fullmatch(r"[^\s\"'\\]+", value)
    return _text(value) if usable else None


def _runtime(found: Diagnosis) -> list[str]:
    known = found.value("runtime")
    if known == UNKNOWN:
        return [f"# what starts containers: unknown ({found.how('runtime')})"]
    # The profile names no program, because a node may have the runtime in a different folder. PATH decides on the node.
    said = f"# containers on this machine start with: {known}, {found.value('runtime starts')}"
    return [said, "# [runtime]", '# kind = "apptainer"', '# program = "/PATH/OF/IT"', '# reason = "..."']


def _submit(found: Diagnosis) -> list[str]:
    request, how = found.value("GPU request"), found.how("GPU request")
    known = request in ("gpus-per-node", "gres")
    lines = _value("gpu-request", _text(request), how) if known else [f"# gpu-request: {request} ({how})"]
    types = found.value("GPU types")
    lines += [f"# gpu-type: {types} ({found.how('GPU types')})"]
    names = ", ".join(part.name + (" (default)" if part.default else "") for part in found.partitions)
    lines += [f"# partition: {names or UNKNOWN} ({found.how('partitions')})"]
    lines += [f"# account: {', '.join(found.accounts[:20]) or UNKNOWN} ({found.how('your accounts')})"]
    return lines


def _partition(part: PartitionFacts) -> list[str]:
    if _word(part.name) is None:
        return [f"# partition {part.name}: left out, because hpcenv cannot request a partition with this name"]
    lines = ["[[slurm.partition]] # sinfo, scontrol show partition", f"name = {_text(part.name)}"]
    if part.default:
        lines.append("default = true")
    return lines
