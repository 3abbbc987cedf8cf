"""Count the cores of a set of CPUs.

Runs on: COMPUTE NODE, and inside the image (node_checks.py loads this file). Standard library, Python 3.8 and newer.
"""

from typing import Iterable


def count_cores(cpus: Iterable[int], sysfs: str = "/sys/devices/system/cpu") -> int:
    """Return the number of cores of some CPUs.

    The hardware threads of one core count as one core, if the system lists them.
    """
    cores = set()
    for cpu in cpus:
        try:
            with open("%s/cpu%d/topology/thread_siblings_list" % (sysfs, cpu), encoding="ascii") as file:
                cores.add(file.read().strip())
        except (OSError, ValueError):
            cores.add(str(cpu))
    return len(cores)
