"""Read files of the host that tune NCCL. A container does not see these files, so hpcenv imports their variables.

Runs on: COMPUTE NODE. Standard library only. Nothing is executed. In a vendor's script, only literal assignments
are read. The number of other lines that set a variable is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcenv.machine.tree import HostTree
from hpcenv.records.manifest import Setting
from hpcenv.records.network import HostTuning
from hpcenv.records.variables import recorded_value

# The administrator's file of NCCL (env.rst, NCCL 2.30).
NCCL_CONF = "/etc/nccl.conf"

# Scripts in the machine image of a cloud provider. A job must source them (GoogleCloudPlatform/cluster-toolkit).
_SCRIPTS = ("/usr/local/gib/scripts/set_nccl_env.sh", "/var/lib/tcpxo/lib64/nccl-env-profile.sh")

# Files with the topology of the real machine, because a virtual machine hides it. NCCL reads the first file without any
# setting (topo.cc, 2.30).
DEFAULT_TOPOLOGY = "/var/run/nvidia-topologyd/virtualTopology.xml"
_MICROSOFT = "/opt/microsoft"

_NAME = re.compile(r"[A-Z][A-Z0-9_]*\Z")
_OURS = re.compile(r"(NCCL|RCCL|FI|UCX|GLOO|TORCH|HSA|OFI)_")
_EXPORT = re.compile(r"\s*(?:export\s+)?([A-Z][A-Z0-9_]*)=(\S*)\s*(?:#.*)?\Z")


def read_tuning(tree: HostTree, environ: Mapping[str, str]) -> tuple[HostTuning, ...]:
    """Return the existing files. If several files set a variable, the first file has priority.

    NCCL reads the file that NCCL_CONF_FILE names, or else `~/.nccl.conf`, and then /etc/nccl.conf. A variable that is
    already set is not changed (param.cc, 2.30).
    """
    own = environ.get("NCCL_CONF_FILE") or (f"{environ['HOME']}/.nccl.conf" if environ.get("HOME") else "")
    found = [_settings(tree, path) for path in dict.fromkeys((own, NCCL_CONF)) if path and tree.exists(path)]
    found += [_script(tree, path) for path in _SCRIPTS if tree.exists(path)]
    topologies = [DEFAULT_TOPOLOGY, *(f"{_MICROSOFT}/{n}" for n in tree.names(_MICROSOFT) if n.endswith("topo.xml"))]
    found += [HostTuning(path=path, kind="topology") for path in topologies if tree.exists(path)]
    return tuple(found)


def _settings(tree: HostTree, path: str) -> HostTuning:
    """Read NAME=VALUE lines as NCCL does. The first `=` is the separator, so a value may begin with a second `=`."""
    variables, unread = [], 0
    for line in tree.text(path).splitlines():
        name, separator, value = line.partition("=")
        if line.startswith("#") or not separator:
            continue
        if _NAME.match(name):
            variables.append(Setting(name=name, value=recorded_value(name, value), origin=path))
        else:
            unread += 1
    return HostTuning(path=path, kind="settings", variables=tuple(variables), unread=unread)


def _script(tree: HostTree, path: str) -> HostTuning:
    """Read the literal assignments of a shell script. Assignments that are computed or conditional are only counted."""
    variables, unread, depth = [], 0, 0
    for line in tree.text(path).splitlines():
        word = line.split(maxsplit=1)[0] if line.strip() else ""
        depth += (word in ("if", "case", "for", "while")) - (word in ("fi", "esac", "done", "fi;", "done;"))
        match = _EXPORT.match(line)
        if match is None or not _OURS.match(match.group(1)):
            unread += bool(re.match(r"\s*(export\s+)?(NCCL|FI)_\w+=", line))
            continue
        value = match.group(2).strip("\"'")
        if depth > 0 or re.search(r"[$`]", value):
            unread += 1
        else:
            variables.append(Setting(name=match.group(1), value=value, origin=path))
    return HostTuning(path=path, kind="settings", variables=tuple(variables), unread=unread)
