"""Convert in a Slurm job, if the login node forbids it or lacks tools or space.

Runs on: LOGIN NODE. The layers are downloaded here, because compute nodes often have no internet
access. The conversion runs on a compute node, in the store that both share.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hpcenv import process
from hpcenv.cluster import slurm_command
from hpcenv.errors import FileUnusable, HpcenvError, ImageMismatch, ImageUnavailable, ToolFailed, ToolMissing
from hpcenv.image.convert import apptainer_build
from hpcenv.image.convert.conversion import Builder, Converted, OpenBlobs, convert, fetch, ready, stored_blobs
from hpcenv.image.convert.layer_index import LayerLimits, raise_limit
from hpcenv.image.convert.squashfs import Compression
from hpcenv.image.registry.manifests import ResolvedImage
from hpcenv.image.store.store import Store
from hpcenv.progress import Event, OnEvent

_SECONDS = 24 * 3600.0
# Message of slurmstepd and srun for a step that Slurm ended (Slurm 24.11).
_ENDED = re.compile(r"^.*\*\*\* (?:STEP|JOB) .*CANCELLED AT (.*) \*\*\*", re.MULTILINE)


# The option in the hint for an exceeded limit.
_LIMIT = re.compile(r"--limit (\w+=\w+)")

# These errors of the node keep their class, and so their exit status.
_SAME_CLASS: tuple[type[HpcenvError], ...] = (ImageMismatch, ImageUnavailable, FileUnusable, ToolMissing)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The allocation to request from Slurm; `time` in the format of sbatch(1)."""

    partition: str | None = None
    account: str | None = None
    cpus: int = 8
    time: str = "01:00:00"


def convert_on_cluster(
    image: ResolvedImage,
    open_blobs: OpenBlobs,
    allocation: Allocation,
    *,
    store: Store,
    environ: Mapping[str, str],
    on_event: OnEvent,
    builder: Builder,
    compression: Compression,
    prove: bool,
    limits: LayerLimits,
) -> Converted:
    """Fetch the layers here, convert them on a compute node, and return the SIF in the store.

    Args:
        image, open_blobs, store, environ, on_event, builder, compression, prove, limits: see `convert`.
        allocation: the allocation to request from Slurm.

    Raises:
        ToolMissing, ToolFailed: srun is missing, or the job failed; the error has the node's reason.
        HpcenvError: see `convert`.
    """
    if ready(image, store, prove, compression) is None:
        purpose, name = "has the image converted in a job", f"{image.manifest_digest}.cluster"
        # Hold a lease while the job waits and runs: `prune` removes nothing while any lease is held.
        with (
            store.lease(name, purpose=purpose, timeout=_SECONDS, on_event=on_event),
            store.scratch(1 << 20) as folder,
        ):
            fetch(image, open_blobs, store, on_event)
            layout = folder / "layout"
            apptainer_build.write_layout(layout, image.manifest_digest, stored_blobs(image, store))
            inner = ["image", "pull", f"oci:{layout}@{image.manifest_digest}", "--store", str(store.root), "--json"]
            inner += ["--trust", str(os.stat(store.root).st_uid)]
            inner += ["--platform", image.platform, "--builder", builder]
            inner += ["--compression", compression, *([] if prove else ["--no-proof"])]
            inner += [f"--limit={word}" for word in limits.words()]
            _srun(inner, allocation, environ, on_event)
    # The SIF exists now; this call records the reference and returns it.
    return convert(
        image,
        open_blobs,
        store=store,
        environ=environ,
        on_event=on_event,
        builder=builder,
        compression=compression,
        prove=prove,
        limits=limits,
    )


def _srun(words: list[str], allocation: Allocation, environ: Mapping[str, str], on_event: OnEvent) -> None:
    argv = [process.find_tool("srun", needed_for="convert on the cluster", path=environ.get("PATH"))]
    name = f"hpcenv-image-{secrets.token_hex(4)}"
    argv += [f"--job-name={name}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={allocation.cpus}"]
    argv += [f"--time={allocation.time}", "--unbuffered", "--kill-on-bad-exit=1"]
    argv += [f"--partition={allocation.partition}"] if allocation.partition else []
    argv += [f"--account={allocation.account}"] if allocation.account else []
    # With -m the command does not depend on PATH on the node.
    argv += [sys.executable, "-m", "hpcenv", *words]
    listener = _Listener(on_event)
    on_event(Event(phase="wait", what="waiting for Slurm to allocate a node for the conversion"))
    try:
        process.stream(argv, on_line=listener, timeout=_SECONDS, env=slurm_command.clean_environment(environ))
    except BaseException as error:
        # The allocation of a killed srun remains until its time limit. The job's name is unique.
        if not isinstance(error, ToolFailed) or error.status is None:
            _end_job(name, environ)
        if isinstance(error, ToolFailed):
            raise listener.problem(error) from error
        raise


def _end_job(name: str, environ: Mapping[str, str]) -> None:
    with contextlib.suppress(HpcenvError):
        scancel = process.find_tool("scancel", needed_for="end the job", path=environ.get("PATH"))
        process.run([scancel, f"--name={name}"], timeout=60, env=slurm_command.clean_environment(environ))


class _Listener:
    """Reads the lines of `hpcenv --json` on the node: passes events on, and collects the rest."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._rest: list[str] = []

    def __call__(self, line: str) -> None:
        try:
            self._on_event(Event(**json.loads(line)["event"]))
        except (ValueError, KeyError, TypeError):
            self._rest.append(line)
            del self._rest[:-200]

    def problem(self, error: ToolFailed) -> HpcenvError:
        """Return the error of hpcenv on the node; if it printed none, the error of srun."""
        text = "\n".join(self._rest)
        ended = _ENDED.search(text)
        if ended is not None:
            late = "TIME LIMIT" in ended[1]
            return ToolFailed(
                f"Slurm ended the conversion: {'it reached its time limit' if late else 'the job was cancelled'}",
                argv=error.argv,
                status=error.status,
                why=ended[0],
                hint=f"run the same command again{' with a longer --time' if late else ''}: "
                "it uses the layers and indexes that are already in the store",
            )
        try:
            body = json.JSONDecoder().raw_decode(text, text.index("{"))[0]["error"]
            what, why, hint = (str(body[key] or "") for key in ("what", "why", "hint"))
        except (ValueError, KeyError, TypeError):
            return ToolFailed(
                "the conversion on the cluster failed",
                argv=error.argv,
                status=error.status,
                why=text[-1000:] or error.why,
                hint="check the partition and account (sinfo, sacctmgr show assoc), or convert here",
            )
        kind = next((kind for kind in _SAME_CLASS if kind.code == body.get("code")), None)
        limit = _LIMIT.search(hint)
        if limit is not None:  # the command on the node is not the user's
            return ImageMismatch(f"on the node: {what}", why=why or None, hint=raise_limit(limit[1]))
        if kind is not None:
            return kind(f"on the node: {what}", why=why or None, hint=hint or None)
        return ToolFailed(
            f"on the node: {what}", argv=error.argv, status=error.status, why=why or None, hint=hint or None
        )
