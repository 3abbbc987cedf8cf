"""The pulse of a rank: a small file in a folder of the node, which the watching process reads (watch/pulses.py).

The rank writes into the mapped memory of the file after each optimizer step. Writing takes some microseconds, and does
not use a shared file system. The same count is before and after the values. If the two counts differ, the reader reads
again.
"""

import functools
import mmap
import os
import struct
import sys
import time
import weakref
from typing import Any, Callable, Optional

# The fields, which hpcenv.watch.pulses reads: count; rank; pid; start of the process in ticks; optimizer steps; time of
# the last step's end; seconds of all steps; seconds in which the rank waited for its loaders; whether the rank saves a
# checkpoint; bytes that torch uses on the GPU now, and the maximum until now (-1: unknown); count.
LAYOUT = struct.Struct("<QqqqqdddqqqQ")
_SECONDS_BETWEEN_LOOKS_AT_MEMORY = 1.0


_current = None  # type: Optional[Pulse]


def begin_pulse(folder: str, rank: int, when_imported: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Begin the pulse of this process. If the pulse cannot be written, the training continues without a pulse."""
    global _current
    try:
        _current = Pulse(folder, rank)
    except (OSError, ValueError, IndexError) as error:
        sys.stderr.write("hpcenv: rank %d is not watched: %s\n" % (rank, error))
        return
    when_imported("torch", _current.torch_imported)
    when_imported("torch.utils.data.dataloader", _current.wrap_loader)


def saves(begins: bool) -> None:
    """Record that this rank begins to save a checkpoint, or that it has saved the checkpoint."""
    if _current is not None:
        _current.saves(begins)


class Pulse:
    """The pulse of this process.

    Only the steps of the optimizer that stepped first are counted. The steps of other optimizers (of a GAN, or Muon
    beside AdamW) belong to the same step. This code does not wait for the GPU, and does not read losses.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._torch = None  # type: Any
        self._leader = None  # type: Any
        self._rank = rank
        self._pid = os.getpid()
        self._start = start_ticks()
        self._count = 0
        self._steps = 0
        self._last = 0.0
        self._began = time.monotonic()
        self._seconds = 0.0
        self._waited = 0.0
        self._saves = 0
        self._memory = (-1, -1)
        self._looked = 0.0
        path = os.path.join(folder, "pulse-%d.%d" % (rank, self._pid))
        descriptor = os.open(path + ".part", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, LAYOUT.size)
            self._map = mmap.mmap(descriptor, LAYOUT.size)
        finally:
            os.close(descriptor)
        self._write()
        os.rename(path + ".part", path)

    def torch_imported(self, torch: Any) -> None:
        """Watch the optimizer steps (torch 2.0 and newer have a hook for all optimizers)."""
        self._torch = torch
        hooks = sys.modules.get("torch.optim.optimizer")
        register = getattr(hooks, "register_optimizer_step_post_hook", None)
        if register is not None:
            disabled = getattr(torch, "_disable_dynamo", lambda one: one)  # type: Callable[[Any], Any]
            # This must be a function: torch sets an attribute on it, and a method cannot have attributes.
            register(disabled(lambda optimizer, _args, _kwargs: self._after_step(optimizer)))

    def _after_step(self, optimizer: Any) -> None:
        leader = None if self._leader is None else self._leader()
        if leader is None:
            self._leader = weakref.ref(optimizer)
        if leader is None or leader is optimizer:
            self._stepped()

    def _stepped(self) -> None:
        now = time.monotonic()
        if self._steps:
            self._seconds += now - self._began
        else:
            self._waited = 0.0  # the first step includes the time before the training
        self._began = now
        self._steps += 1
        self._last = time.time()
        if now - self._looked > _SECONDS_BETWEEN_LOOKS_AT_MEMORY:
            self._looked = now
            self._memory = self._torch_memory()
        self._write()

    def saves(self, begins: bool) -> None:
        """Record that a checkpoint is being written, or that it is complete."""
        self._saves += 1 if begins else -1
        self._write()

    def wrap_loader(self, dataloader: Any) -> None:
        """Count how long the script waits for batches; `dataloader` is the module torch.utils.data.dataloader.

        Batches without gradients (for a validation) do not count.
        """
        kind = dataloader._BaseDataLoaderIter
        original = kind.__next__  # type: Callable[[Any], Any]

        @functools.wraps(original)
        def take(this: Any) -> Any:
            began = time.monotonic()
            try:
                return original(this)
            finally:
                if self._torch is not None and self._torch.is_grad_enabled():
                    self._waited += time.monotonic() - began

        kind.__next__ = take

    def _torch_memory(self) -> Any:
        try:
            cuda = self._torch.cuda
            if not cuda.is_initialized():
                return (-1, -1)
            return (int(cuda.memory_allocated()), int(cuda.max_memory_allocated()))
        except Exception:  # a problem with a record must not end a training
            return (-1, -1)

    def _write(self) -> None:
        if os.getpid() != self._pid:
            return  # a worker that this rank has forked
        self._count += 1
        values = (self._rank, self._pid, self._start, self._steps, self._last, self._seconds, self._waited, self._saves)
        # The second count is written first. So if a reader sees equal counts, the values between them are complete.
        self._map[LAYOUT.size - 8 :] = struct.pack("<Q", self._count)
        self._map[8 : LAYOUT.size - 8] = struct.pack("<qqqqdddqqq", *(values + self._memory))
        self._map[:8] = struct.pack("<Q", self._count)


def start_ticks() -> int:
    """Return the start time of this process in clock ticks since boot: proc_pid_stat(5), field 22."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[19])
