"""Ask other programs while a submission is planned, and collect their answers. Runs on: LOGIN NODE."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from hpcenv import process
from hpcenv.cluster import munge, node_resources, node_types
from hpcenv.cluster.node_resources import ClusterResources
from hpcenv.cluster.node_types import Offer
from hpcenv.errors import HpcenvError, SubmitRejected
from hpcenv.project import git
from hpcenv.project.context import Context
from hpcenv.project.workspace import Workspace
from hpcenv.submission.request import Cluster, SubmitOptions
from hpcenv.submission.snapshot import code_folder

_Told = TypeVar("_Told")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of programs that run while a submission is planned; None for a program that is not asked.

    Attributes:
        offers: the answer of sinfo about the nodes of the cluster.
        resources: the answer of scontrol about the resources of the nodes.
        tree: the answer of git about the folder of the code.
    """

    offers: Future[tuple[Offer, ...]] | None
    resources: Future[ClusterResources] | None
    tree: Future[git.ReadTree | None] | None


@contextlib.contextmanager
def asked(workspace: Workspace, options: SubmitOptions, context: Context, cluster: Cluster) -> Iterator[Answers]:
    """Start sinfo, scontrol and git. They run in parallel with the block of the `with` statement.

    At the end of the block, kill the programs that still run.
    """
    on_slurm, stop, environ = cluster == "slurm", threading.Event(), context.environ
    folder = None if options.copied is not None else code_folder(options, context.cwd)
    with ThreadPoolExecutor(3, initializer=process.stop_with, initargs=(stop,)) as pool:
        try:
            yield Answers(
                offers=pool.submit(node_types.offers, environ) if on_slurm and not options.allocated else None,
                resources=pool.submit(node_resources.ask, environ)
                if on_slurm and _may_want_share(workspace, options)
                else None,
                tree=None if folder is None else pool.submit(git.read_tree, folder, environ),
            )
        finally:
            stop.set()


def _may_want_share(workspace: Workspace, options: SubmitOptions) -> bool:
    """Return whether the number of CPUs and the memory may have to be computed. A site profile may give them later."""
    project = workspace.project.submit
    gpus = project.gpus if options.gpus is None else options.gpus
    given = [(getattr(options, name), getattr(project, name)) for name in ("cpus", "mem")]
    return bool(gpus) and not all(any(pair) for pair in given) and not options.handover and not options.allocated


def read_answer(answer: Future[_Told] | None) -> _Told | str | None:
    """Return the answer of a program, or a text that says why there is no answer; None if no program was asked.

    Raises:
        SubmitRejected: munge does not run here, so nothing can be submitted.
    """
    try:
        return None if answer is None else answer.result()
    except HpcenvError as error:
        if error.what == munge.DOWN:
            raise SubmitRejected(error.what, why=error.why, hint=error.hint) from error
        return error.what
