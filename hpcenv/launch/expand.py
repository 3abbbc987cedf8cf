"""The names that `submit --expand` replaces in the arguments of a program, for example `{master_addr}`.

Runs on: COMPUTE NODE. The login node uses this module to refuse unknown names. Standard library only. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Name -> its meaning. docs/how-to/start.md has the same rows, and a test compares them.
NAMES = {
    "master_addr": "address of the first node, for the rendezvous",
    "master_port": "free TCP port on the first node, chosen for this attempt",
    "nnodes": "number of nodes that train",
    "node_rank": "number of this node, from 0",
    "nproc_per_node": "ranks on each node",
    "world_size": "ranks in total",
    "node": "name of this node",
    "job_id": "id of the Slurm job",
    "run": "name of the run",
    "run_folder": "folder of the run",
    "checkpoints": "folder for checkpoints, kept over all attempts of the run",
    "log_dir": "folder for the output of the ranks on this node: `logs --rank` and the first failure read torchrun's "
    "files there",
}

_WORD = re.compile(r"\{\{([a-z][a-z0-9_]*)\}\}|\{([a-z][a-z0-9_]*)\}")


def unknown_names(words: Sequence[str]) -> tuple[str, ...]:
    """Return the unknown names between single braces, each once."""
    found = [match[2] for word in words for match in _WORD.finditer(word) if match[2]]
    return tuple(dict.fromkeys(name for name in found if name not in NAMES))


def expand(words: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the words with `{name}` replaced by its value, and `{{name}}` by `{name}`.

    All other braces stay unchanged. So the program gets JSON and other texts as they were written.
    """

    def replaced(match: re.Match[str]) -> str:
        if match[1]:
            return "{" + match[1] + "}"
        return str(values[match[2]]) if match[2] in values else match[0]

    return tuple(_WORD.sub(replaced, word) for word in words)
