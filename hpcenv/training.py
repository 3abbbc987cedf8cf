"""For training scripts: stop in time, save a checkpoint, continue from it in the next attempt, and record metrics.

Runs on: every rank, also inside an image. Standard library only, and torch if the script uses it;
Python >= 3.8. A run brings a copy of this module to its ranks, so an image does not need hpcenv.
A script need not use this module. Outside a run, the functions of this example do nothing and return False or None:

    try:
        from hpcenv import training
    except ImportError:
        training = None

    step = load(training.resume_path()) if training else 0
    while step < steps:
        ...
        if training and training.stop_requested():
            training.save({"model": model.state_dict(), "step": step}, step)
            break

Slurm warns a job some time before its time limit or a preemption (`hpcenv submit --grace`). If the script then saves a
checkpoint and ends, the job is requeued, and the next attempt finds the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "checkpoint_path",
    "environment",
    "log_metrics",
    "resume_path",
    "run_folder",
    "save",
    "saved",
    "saving",
    "seed_everything",
    "stop_requested",
]

_SECONDS_BETWEEN_LOOKS = 1.0


class _State:
    """The stop request of this process.

    Attributes:
        requested: whether a stop was requested.
        handles_term: whether the handler for SIGTERM is installed.
        looked: time when this process last searched the request file, in seconds of the monotonic clock.
        calls: number of calls of `stop_requested`.
        seeded: the seed, rank_seed and determinism that `seed_everything` set in this process.
    """

    requested = False
    handles_term = False
    looked = float("-inf")
    calls = 0
    seeded: dict[str, Any] | None = None


def stop_requested(*, every: int = 1) -> bool:
    """Return whether the training should save a checkpoint and end now.

    If torch.distributed is initialised, this function is a collective operation: call it on all ranks, at the same
    point, once per step. All ranks get the same answer, so all ranks stop after the same step. After the first True,
    the answer stays True.

    Args:
        every: ask the other ranks only in every N-th call; all other calls return False.
    """
    _handle_term()
    _State.calls += 1
    if (_State.calls - 1) % max(1, every):
        return False
    group = _ranks()
    if group is None:
        return _requested_here()
    _State.requested = _any_rank(group, _requested_here(looks=os.environ.get("LOCAL_RANK", "0") == "0"))
    return _State.requested


def resume_path(*, global_batch: int | None = None) -> Path | None:
    """Return the newest complete checkpoint of this run; None without a checkpoint, or outside a run.

    If the run has no checkpoint yet, the result is the checkpoint that `hpcenv submit --resume-from` names. The record
    beside a checkpoint (see `save`) is compared with this run: torch, world size, global batch, lockfile and code.
    Rank 0 writes each difference to stderr.

    With several nodes, call this function on one rank and broadcast the result. A shared file system may show a new
    file to some nodes later than to other nodes.

    Args:
        global_batch: number of samples in one optimizer step of all ranks, to compare it with the record.
    """
    folder = _folder("HPCENV_CHECKPOINTS")
    if folder is None:
        return None
    from hpcenv.incontainer import provenance  # imported late, because every rank loads training.py

    newest = provenance.newest_checkpoint(folder)
    if newest is None:
        newest = _given_checkpoint()
    if newest is not None and os.environ.get("RANK", "0") == "0":
        # The script of this run may write its checkpoints without this module. Such checkpoints have no records.
        without_record = newest.parent == folder and not provenance.record_of(newest).exists()
        now = {**provenance.identity(os.environ), "global_batch": global_batch}
        for line in () if without_record else provenance.judge(newest, now):
            _tell(line)
    session = _session()
    if session is not None:
        session.resumes(None if newest is None else provenance.step_of(newest))
    return newest


def _given_checkpoint() -> Path | None:
    """Return the checkpoint that `--resume-from` names; for a folder, the newest checkpoint in this folder."""
    given = _folder("HPCENV_RESUME_FROM")
    if given is None:
        return None
    from hpcenv.incontainer import provenance  # imported late, because every rank loads training.py

    if given.name == provenance.CHECKPOINTS:
        newest = provenance.newest_checkpoint(given)
        if newest is None:
            raise FileNotFoundError(errno.ENOENT, "the run that --resume-from names has no checkpoint", str(given))
        return newest
    if not given.exists():
        raise FileNotFoundError(errno.ENOENT, "the checkpoint that --resume-from names does not exist", str(given))
    return given


def _tell(line: str) -> None:
    sys.stderr.write(f"hpcenv: {line}\n")
    sys.stderr.flush()


def checkpoint_path(step: int) -> Path | None:
    """Return the path of the complete checkpoint of a step; None outside a run.

    This function is for scripts that write checkpoints themselves. Such a script writes a file with another name in the
    same folder, renames this file to the returned path, and then calls `saved`.

    Args:
        step: number of the step.
    """
    folder = _folder("HPCENV_CHECKPOINTS")
    return None if folder is None else folder / f"step-{int(step):08d}.pt"


@contextlib.contextmanager
def saving(step: int, *, global_batch: int | None = None) -> Iterator[Path | None]:
    """Context manager that gives a path for a checkpoint, a file or a folder. After the block, it is complete.

        with training.saving(step) as path:
            torch.save(state, path)

    An incomplete checkpoint never has the name of a checkpoint. Use this context manager on one rank. Outside a run,
    the path is None. A record is written beside the checkpoint, for example `step-00000010.json`. The record has the
    run, lockfile, code, torch, world size and global batch.

    Args:
        step: number of the step.
        global_batch: number of samples in one optimizer step of all ranks, for the record.

    Raises:
        OSError: the checkpoint could not be written; earlier checkpoints still exist.
    """
    final = checkpoint_path(step)
    if final is None:
        yield None
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.{os.getpid()}.part")
    _tell_pulse(begins=True)
    try:
        yield aside
        if aside.is_dir():
            final = final.with_suffix("")
        else:
            with open(aside, "rb") as file:
                os.fsync(file.fileno())
        if final.is_dir():
            shutil.rmtree(final)
        os.replace(aside, final)
        _write_record(final, global_batch)
    except BaseException:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        elif aside.exists():
            aside.unlink()
        raise
    finally:
        _tell_pulse(begins=False)
    session = _session()
    if session is not None:
        session.hash_parameters("checkpoint")
    if _State.requested or _requested_here():
        saved()


def _write_record(checkpoint: Path, global_batch: int | None) -> None:
    from hpcenv.incontainer import provenance  # imported late, because every rank loads training.py

    try:
        provenance.write_record(checkpoint, os.environ, global_batch=global_batch)
    except OSError as error:  # without a record, the checkpoint is still complete and useful
        _tell(f"the record of {checkpoint.name} could not be written: {error}")


def save(state: Any, step: int, *, global_batch: int | None = None) -> Path | None:
    """Write `state` with torch.save as the checkpoint of a step, and a record beside this file. Call on one rank only.

    Args:
        state: the object to save.
        step: number of the step.
        global_batch: number of samples in one optimizer step of all ranks, for the record.

    Returns:
        The path of the checkpoint; None outside a run.

    Raises:
        OSError: the checkpoint could not be written; earlier checkpoints still exist.
    """
    with saving(step, global_batch=global_batch) as path:
        if path is None:
            return None
        import torch  # type: ignore[import-not-found,unused-ignore]

        torch.save(state, path)
    return checkpoint_path(step)


def saved() -> None:
    """Report that a checkpoint is saved, so that the job may end and be requeued.

    `save` and `saving` call this function after a stop request.
    """
    folder = _folder("HPCENV_STOP_FOLDER")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"saved-{_node()}").touch()


# -- where results come from ----------------------------------------------------------------


def run_folder() -> Path | None:
    """Return the folder of this run, which all attempts and ranks of the run share; None outside a run."""
    return _folder("HPCENV_RUN_FOLDER")


def environment() -> dict[str, Any]:
    """Return facts that a result depends on, for the script's own log. The values are text, numbers or None.

        wandb.config.update(training.environment())

    `run`, `attempt`, `fingerprint` (of the lockfile) and `commit` are None outside a run. `seed`, `rank_seed` and
    `determinism` are the present values of this rank. `torch`, `cuda`, `hip`, `cudnn`, `nccl`, `numpy` and `python` are
    versions; `gpu` has the name, compute capability, memory in bytes and driver version of this rank's GPU. If the
    script has not imported torch, the values that come from torch are None. `world_size`, `rank` and `node` describe
    this process.
    """
    from hpcenv.incontainer import provenance  # imported late, because every rank loads training.py

    return {**provenance.environment(os.environ), **_seeds()}


def _seeds() -> dict[str, Any]:
    hook = _start_hook()
    if hook is not None:
        applied: dict[str, Any] = hook.applied()
        return applied
    return _State.seeded or {"seed": None, "rank_seed": None, "determinism": "off"}


# -- determinism and metrics ----------------------------------------------------------------


def log_metrics(step: int, **values: Any) -> None:
    """Record the exact metrics of this rank. Outside a run that records metrics, this function does nothing.

        training.log_metrics(step, loss=loss, accuracy=correct / total)

    hpcenv also records the loss on which the script calls `backward`. The script need not log this loss.

    Args:
        step: number of the step, as the script counts.
        values: each value is a number, or a tensor or array with one element. For a tensor on a GPU, the call waits
            until the GPU has computed the value.

    Raises:
        TypeError: a value has a different type.
    """
    session = _session()
    if session is not None:
        session.add_metrics([_metric(int(step), name, value) for name, value in values.items()])


def seed_everything(seed: int | None = None, *, determinism: str | None = None) -> int:
    """Seed Python, NumPy and torch in this rank, and set the switches of a determinism profile.

    In a run with a profile (`hpcenv submit --determinism bitwise`), hpcenv sets the seed and the switches before the
    script begins. Call this function if the script chooses the seed. The function cannot set `PYTHONHASHSEED` and other
    environment variables of the profile, because Python has already started.

    Args:
        seed: base seed, 0 to 2^32-1; the default is the seed of the run, or else 0. Each rank gets
            seed + 1,000,003 x rank.
        determinism: `off` (only the seeds), `seeded` or `bitwise`; the default is the profile of the run, or else
            `seeded`.

    Returns:
        The seed of this rank.

    Raises:
        ValueError: an unknown profile, or a seed out of range.
        RuntimeError: torch could not be set to the profile.
    """
    import torch

    from hpcenv.incontainer.start_hook import seeds, switches  # imported late, because every rank loads training.py

    hook = _start_hook()
    profile = determinism or (hook.options.profile if hook is not None else "seeded")
    if profile not in ("off", "seeded", "bitwise"):
        raise ValueError(f"the determinism profile is {profile!r}, expected off, seeded or bitwise")
    base = seed if seed is not None else hook.options.seed if hook is not None else 0
    if not 0 <= base < 1 << 32:
        raise ValueError(f"the seed is {base}, expected 0 to 2^32-1")
    if hook is not None:
        problems = hook.apply(profile, "seed_everything")
        rank_seed = hook.seed(base, "seed_everything")
    else:
        problems = [] if profile == "off" else switches.apply_to_torch(torch, profile)
        rank_seed = seeds.seed_of_rank(base, int(os.environ.get("RANK", "0")))
        seeds.seed_python(rank_seed)
        seeds.seed_torch(torch, rank_seed)
        with contextlib.suppress(ImportError):
            import numpy as np

            seeds.seed_numpy(np, rank_seed)
    if problems:
        raise RuntimeError(f"the determinism profile {profile} could not be applied: {'; '.join(problems)}")
    _State.seeded = {"seed": base, "rank_seed": int(rank_seed), "determinism": profile}
    return int(rank_seed)


def _start_hook() -> Any:
    """Return the session of the start hook in this rank, or None. Here the modules of the hook have other names."""
    module = sys.modules.get("_hpcenv_start_hook.session")
    return None if module is None else module.current()


def _tell_pulse(*, begins: bool) -> None:
    """Tell the watch that this rank saves a checkpoint. During the save, the rank makes no step, but does not hang."""
    module = sys.modules.get("_hpcenv_start_hook.pulse")
    if module is not None:
        module.saves(begins)


def _session() -> Any:
    hook = _start_hook()
    return hook if hook is not None and hook.options.record else None


def _metric(step: int, name: str, value: Any) -> dict[str, Any]:
    from hpcenv.incontainer.start_hook.exact import exact  # imported late, because every rank loads training.py

    line = {"kind": "metric", "step": step, "name": name[:200]}
    dtype = str(getattr(value, "dtype", "")).replace("torch.", "")
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (bool, int)):
        return {**line, "value": str(int(value)), "dtype": "int"}
    if not isinstance(value, float):
        raise TypeError(f"the metric {name} is {type(value).__name__}, expected a number")
    return {**line, "value": exact(value), "dtype": dtype or "float64"}


# -- the stop request ---------------------------------------------------------------------


def _folder(name: str) -> Path | None:
    value = os.environ.get(name, "")
    return Path(value) if os.path.isabs(value) else None


def _node() -> str:
    return os.environ.get("HPCENV_NODE", "") or os.uname().nodename


def _handle_term() -> None:
    """Treat SIGTERM as a stop request, because at some sites Slurm sends SIGTERM at a preemption."""
    if _State.handles_term or _folder("HPCENV_STOP_FOLDER") is None:
        return
    _State.handles_term = True
    with contextlib.suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_term)


def _on_term(_number: int, _frame: Any) -> None:
    _State.requested = True


def _requested_here(*, looks: bool = True) -> bool:
    """Search the request file at most once a second. A process on this node writes it, so it is visible at once."""
    folder = _folder("HPCENV_STOP_FOLDER")
    due = time.monotonic() - _State.looked >= _SECONDS_BETWEEN_LOOKS
    if not _State.requested and looks and folder is not None and due:
        _State.looked = time.monotonic()
        _State.requested = (folder / f"{_node()}.json").exists()
    return _State.requested


def _ranks() -> Any:
    """Return torch.distributed if the script has initialised it with several ranks; else None."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized() or module.get_world_size() < 2:
        return None
    return module


def _any_rank(group: Any, here: bool) -> bool:
    """Return whether any rank has a stop request. Uses one all-reduce, on the GPU only if gloo is not available."""
    import torch

    on_gpu = "gloo" not in str(group.get_backend()) and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    answer = torch.tensor([1 if here else 0], dtype=torch.int32, device=device)
    group.all_reduce(answer, op=group.ReduceOp.MAX)
    return bool(answer.item())
