"""Versions of JAX, its library and its plug-in for CUDA, from their packages. JAX is not imported.

Runs on: inside the image.
"""

from __future__ import annotations

from hpcenv.incontainer.probe.table import Probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts

# `jax-cuda13-plugin` is for CUDA 13. It finds the exact release of its libraries only when JAX starts.
_PREFIX, _SUFFIX = "jax-cuda", "-plugin"


def probe_jax(env: ProbedEnvironment) -> Facts:
    """Return the versions of JAX's packages; without jax, no fields, so that lockfiles without jax do not change."""
    versions = {dist.name: dist.version for dist in env.dists or ()}
    if "jax" not in versions:
        return {}
    plugins = sorted(name for name in versions if name.startswith(_PREFIX) and name.endswith(_SUFFIX))
    return {
        "jax.version": versions["jax"],
        "jax.jaxlib": versions.get("jaxlib", "absent"),
        "jax.cuda": ", ".join(name[len(_PREFIX) : -len(_SUFFIX)] for name in plugins) or "none",
        "jax.cuda-plugin": ", ".join(versions[name] for name in plugins) or "absent",
    }


PROBES: tuple[Probe, ...] = (Probe("jax", (), probe_jax),)
