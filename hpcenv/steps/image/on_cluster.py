"""Convert in an allocation of Slurm, where the login node may not, or lacks tools or space.

Runs on: LOGIN NODE. Layers are fetched here, since compute nodes often have no way out; what
is computed runs on the node, on the store that both see.
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

from hpcenv.adapters import apptainer_build, process, slurm
from hpcenv.adapters.layer_index import Limits
from hpcenv.adapters.manifests import ResolvedImage
from hpcenv.adapters.store import Store
from hpcenv.errors import FileUnusable, HpcenvError, ImageMismatch, ImageUnavailable, ToolFailed, ToolMissing
from hpcenv.model.progress import Event, OnEvent
from hpcenv.steps.image.convert import Builder, Converted, OpenBlobs, convert, fetch, ready, stored_blobs

_SECONDS = 24 * 3600.0
# What slurmstepd and srun say of a step that did not end by itself (Slurm 24.11).
_ENDED = re.compile(r"^.*\*\*\* (?:STEP|JOB) .*CANCELLED AT (.*) \*\*\*", re.MULTILINE)


# What the node says of the image stays what it is, with its exit status.
_SAID: tuple[type[HpcenvError], ...] = (ImageMismatch, ImageUnavailable, FileUnusable, ToolMissing)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What to ask Slurm for; `time` as sbatch(1) writes it."""

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
    prove: bool,
    limits: Limits,
) -> Converted:
    """Fetch the layers here, convert on a compute node, and return the SIF in the store.

    Raises:
        ToolMissing, ToolFailed: no srun, or the job failed; the reason is what the node said.
        HpcenvError: as `convert`.
    """
    if ready(image, store, prove) is None:
        purpose, name = "has the image converted in a job", f"{image.manifest_digest}.cluster"
        # Held while the job waits and works: `prune` leaves a store alone that somebody works in.
        with (
            store.lease(name, purpose=purpose, timeout=_SECONDS, on_event=on_event),
            store.scratch(1 << 20) as place,
        ):
            fetch(image, open_blobs, store, on_event)
            layout = place / "layout"
            apptainer_build.write_layout(layout, image.manifest_digest, stored_blobs(image, store))
            inner = ["image", "pull", f"oci:{layout}@{image.manifest_digest}", "--store", str(store.root), "--json"]
            inner += ["--trust", str(os.stat(store.root).st_uid)]
            inner += ["--platform", image.platform, "--builder", builder, *([] if prove else ["--no-proof"])]
            inner += [f"--limit={word}" for word in limits.words()]
            _srun(inner, allocation, environ, on_event)
    # It is there now: this notes by which reference it was asked for.
    return convert(
        image, open_blobs, store=store, environ=environ, on_event=on_event, builder=builder, prove=prove, limits=limits
    )


def _srun(words: list[str], allocation: Allocation, environ: Mapping[str, str], on_event: OnEvent) -> None:
    argv = [process.find_tool("srun", needed_for="convert on the cluster", path=environ.get("PATH"))]
    name = f"hpcenv-image-{secrets.token_hex(4)}"
    argv += [f"--job-name={name}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={allocation.cpus}"]
    argv += [f"--time={allocation.time}", "--unbuffered", "--kill-on-bad-exit=1"]
    argv += [f"--partition={allocation.partition}"] if allocation.partition else []
    argv += [f"--account={allocation.account}"] if allocation.account else []
    # -P: the current folder is no place to import from; -m needs no PATH on the node.
    argv += [sys.executable, "-m", "hpcenv", *words]
    told = _Listener(on_event)
    on_event(Event(phase="wait", what="waiting for Slurm to allocate a node for the conversion"))
    try:
        process.stream(argv, on_line=told, timeout=_SECONDS, env=slurm.clean_environment(environ))
    except BaseException as error:
        # A killed srun leaves its allocation behind, until the time limit. Nobody else has this name.
        if not isinstance(error, ToolFailed) or error.status is None:
            _end_job(name, environ)
        if isinstance(error, ToolFailed):
            raise told.problem(error) from error
        raise


def _end_job(name: str, environ: Mapping[str, str]) -> None:
    with contextlib.suppress(HpcenvError):
        scancel = process.find_tool("scancel", needed_for="end the job", path=environ.get("PATH"))
        process.run([scancel, f"--name={name}"], timeout=60, env=slurm.clean_environment(environ))


class _Listener:
    """Takes the lines of the inner `hpcenv --json`: events are passed on, the envelope is kept."""

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
        """Return the node's own error, or srun's where the node did not come to say one."""
        text = "\n".join(self._rest)
        ended = _ENDED.search(text)
        if ended is not None:
            late = "TIME LIMIT" in ended[1]
            return ToolFailed(
                f"Slurm ended the conversion: {'its time was up' if late else 'the job was cancelled'}",
                argv=error.argv,
                status=error.status,
                why=ended[0],
                hint=f"run the same command again{' with a longer --time' if late else ''}: "
                "the layers and what is known of them are kept",
            )
        try:
            said = json.JSONDecoder().raw_decode(text, text.index("{"))[0]["error"]
            what, why, hint = (str(said[key] or "") for key in ("what", "why", "hint"))
        except (ValueError, KeyError, TypeError):
            return ToolFailed(
                "the conversion on the cluster failed",
                argv=error.argv,
                status=error.status,
                why=text[-1000:] or error.why,
                hint="look at the partition and account (sinfo, sacctmgr show assoc), or convert here",
            )
        kind = next((kind for kind in _SAID if kind.code == said.get("code")), None)
        if kind is not None:
            return kind(f"on the node: {what}", why=why or None, hint=hint or None)
        return ToolFailed(
            f"on the node: {what}", argv=error.argv, status=error.status, why=why or None, hint=hint or None
        )
