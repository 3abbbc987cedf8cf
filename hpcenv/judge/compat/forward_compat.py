"""Forward compatibility of CUDA: a newer libcuda in the image, for nodes with an older driver. Pure.

Runs on: COMPUTE NODE (the batch node). Standard library only. The compatibility table says which cuda-compat packages
work with which driver branches and GPUs.
"""

from __future__ import annotations

from hpcenv.judge.compat.compat_table import Compat
from hpcenv.judge.compat.drivers import check_driver
from hpcenv.judge.compat.floors import driver_floor
from hpcenv.judge.compat.judgement import Judgement
from hpcenv.judge.compat.torch_builds import X86_64
from hpcenv.judge.compat.versions import numbers, older
from hpcenv.records.facts import CudaCompat, Facts
from hpcenv.records.manifest import GpuNeeds, Manifest

PATH_VARIABLE = "LD_LIBRARY_PATH"
# With --nv, Apptainer mounts the driver's libraries in this folder, and adds it to the end of the loader's path.
_OF_THE_NODE = "/.singularity.d/libs"


def package_for(manifest: Manifest, facts: Facts, needs: GpuNeeds, table: Compat) -> CudaCompat | None:
    """Return the cuda-compat package from which the ranks load libcuda; None if they load the node's libcuda.

    The ranks load the package's libcuda if it is first on the loader's path. The image may put it first. If the node's
    driver is too old, hpcenv puts it first.
    """
    package = facts.cuda_compat
    if package is None:
        return None
    if package.first:
        return package
    floor, driver = driver_floor(table, needs.cuda), numbers(str(facts.values.get("host.driver-version", "")))
    too_old = floor is not None and driver is not None and older(driver, floor.version)
    return package if too_old and _may_set_path(manifest, facts) else None


def _may_set_path(manifest: Manifest, facts: Facts) -> bool:
    """Return whether hpcenv may set the loader's path: the ranks run in a container, and nothing else sets the path."""
    given = {one.name for one in (*manifest.settings, *facts.network.variables)}
    return manifest.environment.kind == "sif" and given.isdisjoint((PATH_VARIABLE, f"PREPEND_{PATH_VARIABLE}"))


def judge_driver(
    table: Compat,
    cuda: str,
    facts: Facts,
    *,
    driver: str,
    package: CudaCompat | None,
    capability: str,
    holder: str = " in the image",
) -> Judgement:
    """Judge the driver of a node together with the cuda-compat package that the ranks load."""
    models = facts.values.get("host.gpu-models")
    return check_driver(
        table,
        cuda,
        driver,
        node=facts.node,
        holder=holder,
        forward_compat=None if package is None else package.version,
        gpus=models if isinstance(models, tuple) else (),
        compute_capability=capability,
        machine=str(facts.values.get("host.machine", X86_64)),
    )


def library_path(manifest: Manifest, facts: Facts, needs: GpuNeeds, table: Compat) -> str:
    """Return the loader's path with the package first; empty if no package is needed, or if no package works here."""
    package = package_for(manifest, facts, needs, table)
    if package is None or package.first:
        return ""
    driver = str(facts.values.get("host.driver-version", ""))
    if judge_driver(table, needs.cuda, facts, driver=driver, package=package, capability="").result != "match":
        return ""
    others = [part for part in package.library_path.split(":") if part not in ("", _OF_THE_NODE)]
    return ":".join((package.folder, *others))
