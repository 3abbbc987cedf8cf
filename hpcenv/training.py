"""For training scripts: stop in time, save, and go on where the last attempt ended.

Runs on: every rank, also inside an image. Standard library only, and torch where the script
uses it anyway; Python >= 3.8. A run brings its own copy to the ranks, so an image needs no
hpcenv. It is optional, and outside of a run everything in it answers harmlessly:

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

Slurm warns a job some time before its time limit or a preemption (`hpcenv submit --grace`).
A script that then saves and ends is queued again, and finds its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["checkpoint_path", "resume_path", "save", "saved", "saving", "stop_requested"]

_CHECKPOINT = re.compile(r"step-(\d{1,18})(\.pt)?\Z")
_SECONDS_BETWEEN_LOOKS = 1.0


class _State:
    """What this process knows of its stop."""

    asked = False
    listens = False
    looked = float("-inf")
    calls = 0


def stop_requested(*, every: int = 1) -> bool:
    """Whether the training shall save itself and end now.

    Where torch.distributed is initialised this is a collective: call it on all ranks, at the
    same place, once per step. All ranks then get the same answer, so all stop after the same
    step. Once True it stays True.

    Args:
        every: let only each N-th call ask the other ranks; the calls between answer False.
    """
    _listen()
    _State.calls += 1
    if (_State.calls - 1) % max(1, every):
        return False
    group = _ranks()
    if group is None:
        return _asked_here()
    _State.asked = _any_rank(group, _asked_here(looks=os.environ.get("LOCAL_RANK", "0") == "0"))
    return _State.asked


def resume_path() -> Path | None:
    """Return the newest complete checkpoint of this run, None where there is none or no run.

    With several nodes let one rank ask and tell the others: a shared file system may show a
    new file to some nodes later than to others.
    """
    folder = _folder("HPCENV_CHECKPOINTS")
    if folder is None:
        return None
    try:
        found = [
            (int(match[1]), path) for path in folder.iterdir() for match in [_CHECKPOINT.match(path.name)] if match
        ]
    except OSError:
        return None
    return max(found, default=(0, None), key=lambda item: (item[0], str(item[1])))[1]


def checkpoint_path(step: int) -> Path | None:
    """Return where the complete checkpoint of a step is, or will be; None outside of a run.

    For scripts that write in their own way: write elsewhere in the same folder, rename, and
    say so with `saved`.
    """
    folder = _folder("HPCENV_CHECKPOINTS")
    return None if folder is None else folder / f"step-{int(step):08d}.pt"


@contextlib.contextmanager
def saving(step: int) -> Iterator[Path | None]:
    """Give a path to write a checkpoint to: a file or a folder, which counts when the block has ended.

        with training.saving(step) as path:
            torch.save(state, path)

    What is not complete never has a checkpoint's name. One rank writes; outside of a run the
    path is None.

    Raises:
        OSError: the checkpoint could not be written; those before it are still there.
    """
    final = checkpoint_path(step)
    if final is None:
        yield None
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.{os.getpid()}.part")
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
    except BaseException:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        elif aside.exists():
            aside.unlink()
        raise
    if _State.asked or _asked_here():
        saved()


def save(state: Any, step: int) -> Path | None:
    """Write `state` by torch.save as the checkpoint of a step; call it on one rank.

    Returns its path, None outside of a run.
    """
    with saving(step) as path:
        if path is None:
            return None
        import torch  # type: ignore[import-not-found,unused-ignore]

        torch.save(state, path)
    return checkpoint_path(step)


def saved() -> None:
    """Say that what is needed to go on is saved: the job may end and be queued again.

    `save` and `saving` say it themselves after a request to stop.
    """
    folder = _folder("HPCENV_STOP_FOLDER")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"saved-{_node()}").touch()


# -- how it knows -------------------------------------------------------------------------


def _folder(name: str) -> Path | None:
    value = os.environ.get(name, "")
    return Path(value) if os.path.isabs(value) else None


def _node() -> str:
    return os.environ.get("HPCENV_NODE", "") or os.uname().nodename


def _listen() -> None:
    """Outlive TERM, which some sites' Slurm sends at a preemption: it is a request to stop."""
    if _State.listens or _folder("HPCENV_STOP_FOLDER") is None:
        return
    _State.listens = True
    with contextlib.suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _hear)


def _hear(_number: int, _frame: Any) -> None:
    _State.asked = True


def _asked_here(*, looks: bool = True) -> bool:
    """Look for this node's request, once a second: it is written by this node, so it is seen at once."""
    folder = _folder("HPCENV_STOP_FOLDER")
    if not _State.asked and looks and folder is not None and time.monotonic() - _State.looked >= _SECONDS_BETWEEN_LOOKS:
        _State.looked = time.monotonic()
        _State.asked = (folder / f"{_node()}.json").exists()
    return _State.asked


def _ranks() -> Any:
    """Return torch.distributed where a script has initialised it."""
    found = sys.modules.get("torch.distributed")
    if found is None or not found.is_available() or not found.is_initialized() or found.get_world_size() < 2:
        return None
    return found


def _any_rank(group: Any, here: bool) -> bool:
    """Return whether any rank says yes: one small collective, on the GPU only where NCCL leaves no choice."""
    import torch

    on_gpu = "gloo" not in str(group.get_backend()) and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    answer = torch.tensor([1 if here else 0], dtype=torch.int32, device=device)
    group.all_reduce(answer, op=group.ReduceOp.MAX)
    return bool(answer.item())
