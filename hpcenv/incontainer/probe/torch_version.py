"""torch's build facts, read from torch/version.py.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.files import read_small
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts


def probe_torch(env: ProbedEnvironment) -> Facts:
    """Return torch's build facts from torch/version.py, which the build of torch writes. torch is not imported."""
    fields = {
        "torch.version": "__version__",
        "torch.git-version": "git_version",
        "torch.cuda": "cuda",
        "torch.debug": "debug",
    }
    folder = env.torch = _module_folder(env, "torch")
    if folder is None:
        if any(d.name == "torch" for d in env.dists or ()):
            reason = Unknown("the dist is installed, but no folder 'torch' is on sys.path (an editable build?)")
            return dict.fromkeys(fields, reason)
        return dict.fromkeys((*fields, "torch.hip"), "absent")
    constants = _constants(read_small(env, os.path.join(folder, "version.py"))[0])
    facts: Facts = {}
    for field, name in fields.items():
        if name not in constants:
            facts[field] = Unknown("torch/version.py has no " + name)
        else:
            facts[field] = build_fact(constants[name])
    facts["torch.hip"] = build_fact(constants.get("hip"))
    return facts


def build_fact(value: object) -> str:
    """Return a value of torch/version.py as the report writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else printable(str(value))


def _module_folder(env: ProbedEnvironment, name: str) -> str | None:
    for path in env.path:
        if os.path.isfile(os.path.join(path, name, "__init__.py")):
            return os.path.join(path, name)
    return None


def _constants(source: bytes) -> dict[str, object]:
    import ast

    constants: dict[str, object] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            constants[target.id] = value.value
    return constants


PROBES: tuple[Probe, ...] = (
    Probe("torch", ("torch.version", "torch.git-version", "torch.cuda", "torch.debug"), probe_torch),
)
