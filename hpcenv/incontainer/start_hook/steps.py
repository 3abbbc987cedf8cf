"""Watch the training of one rank: each loss on which `backward` is called, and each optimizer step.

The autograd graph is not changed. `torch.autograd.backward` and `GradScaler.scale` are wrapped, and torch's global
hooks around optimizer steps are used (pytorch#89176, torch 2.0). `Tensor.backward` calls `torch.autograd.backward`, so
one wrapper sees the calls of both functions.

A step is counted each time the first optimizer steps. The steps of other optimizers (of a GAN, or Muon beside AdamW)
belong to this counted step. If an optimizer calls the step of an inner optimizer, one step is counted. Before
torch.distributed.checkpoint loads a checkpoint, it makes a step to create the state of the optimizer. This step is not
counted. This module does not see `torch.autograd.grad`, optimizers without torch's base class, and operations that
DeepSpeed or Megatron's pipeline run below torch's Python functions.
"""

import functools
import sys
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

from .exact import exact


class _Scalar:
    """The value of a tensor with one element. A value on a GPU is copied without waiting, and read later."""

    def __init__(self, torch: Any, tensor: Any) -> None:
        tensor = tensor.detach()
        self.dtype = str(tensor.dtype).replace("torch.", "")
        self._event = None  # type: Any
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        if tensor.is_cuda:
            self._value = torch.empty((), dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(tensor.reshape(()), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._value = tensor.item()

    def text(self) -> str:
        if self._event is not None:
            self._event.synchronize()
            self._value, self._event = self._value.item(), None
        return exact(float(self._value))


class _Loss:
    def __init__(self, scalar: _Scalar, scale: Optional[_Scalar]) -> None:
        self.scalar = scalar
        self.scale = scale
        self.line = {}  # type: Dict[str, Any]


class StepWatch:
    """Losses and steps of this process.

    Attributes:
        saw_loss: whether a step used a loss. In a pipeline, only the last stage has a loss.
        steps: number of optimizer steps in this process.
        before: number of optimizer steps before this process; None while the value is unknown.
        counted: the number of the last step, including `before` if `before` is known.
    """

    def __init__(self, torch: Any, session: Any) -> None:
        self._torch = torch
        self._session = session
        self.saw_loss = False
        self.steps = 0
        self.before = None  # type: Optional[int]
        self._before_from = ""
        self._pending = []  # type: List[_Loss]
        self._waiting = []  # type: List[_Loss]
        self._index = 0
        self._in_backward = 0
        self._stack = []  # type: List[int]
        self._makes_state = False
        self._leader = None  # type: Any
        self._since_leader = set()  # type: Any
        self._optimizers = []  # type: List[Tuple[Any, Any]]
        self._scaled = None  # type: Optional[Tuple[Any, _Scalar, _Scalar]]
        self._noted = set()  # type: Any

    @property
    def counted(self) -> int:
        return self.steps + (self.before or 0)

    def is_stepping(self) -> bool:
        """Whether an optimizer steps now."""
        return bool(self._stack)

    def is_in_backward(self) -> bool:
        """Whether a backward pass runs now."""
        return self._in_backward > 0

    def parameters(self) -> List[Any]:
        """Return the groups of parameters of the optimizers that have stepped, in the order of their first steps."""
        return [groups for _, groups in self._optimizers]

    def install(self) -> None:
        """Put the wrappers and hooks into torch."""
        torch = self._torch
        hooks = sys.modules.get("torch.optim.optimizer")  # type: Any  # torch deletes this name from torch.optim
        if not hasattr(hooks, "register_optimizer_step_post_hook"):
            version = getattr(torch, "__version__", "of an unknown version")
            raise RuntimeError("torch %s has no hooks for optimizer steps, torch 2.0 and newer have" % version)
        hooks.register_optimizer_step_pre_hook(self._quietly(self._before_step))
        hooks.register_optimizer_step_post_hook(self._after_step)
        self._wrap_backward()
        self._wrap(torch.optim.Optimizer, "zero_grad", self._zeroes_optimizer)
        self._wrap(torch.nn.Module, "zero_grad", self._zeroes_module)
        amp = getattr(torch, "amp", None)
        scaler = getattr(amp, "GradScaler", None) or torch.cuda.amp.GradScaler
        self._wrap_scale(scaler)

    # -- wrappers -----------------------------------------------------------------------------

    def _quietly(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function that never raises, because a record must not end a training. torch.compile skips it."""

        def run(*args: Any, **kwargs: Any) -> None:
            try:
                with self._session.without_trace():
                    function(*args, **kwargs)
            except Exception as error:
                self.note("%s: %s: %s" % (function.__name__.strip("_"), type(error).__name__, error))

        disabled = getattr(self._torch, "_disable_dynamo", lambda one: one)  # type: Callable[..., Callable[..., None]]
        return disabled(run)

    def _wrap_backward(self) -> None:
        autograd = self._torch.autograd
        original = autograd.backward
        saw = self._quietly(self._saw_backward)

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            # Activation checkpointing calls `backward` again inside the backward pass. With a GPU, this call is in
            # another thread.
            if not self._in_backward:
                saw(tensors)
            self._in_backward += 1
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self._in_backward -= 1

        autograd.backward = backward

    def _wrap(self, owner: Any, name: str, saw: Callable[..., None]) -> None:
        original = getattr(owner, name)
        look = self._quietly(saw)

        @functools.wraps(original)
        def wrapper(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self._pending:
                look(this)
            return original(this, *args, **kwargs)

        setattr(owner, name, wrapper)

    def _wrap_scale(self, scaler: Any) -> None:
        original = scaler.scale
        remember = self._quietly(self._saw_scaled)

        @functools.wraps(original)
        def scale(this: Any, outputs: Any) -> Any:
            scaled = original(this, outputs)
            if isinstance(outputs, self._torch.Tensor) and this.is_enabled():
                remember(this, outputs, scaled)
            return scaled

        scaler.scale = scale

    # -- what the wrappers see ------------------------------------------------------------------

    def _saw_scaled(self, scaler: Any, value: Any, scaled: Any) -> None:
        factor = getattr(scaler, "_scale", None)
        if value.numel() == 1 and factor is not None and not self._is_capturing(value):
            made = (_Scalar(self._torch, value), _Scalar(self._torch, factor))
            self._scaled = (weakref.ref(scaled), *made)

    def _is_capturing(self, tensor: Any) -> bool:
        return bool(tensor.is_cuda and self._torch.cuda.is_current_stream_capturing())

    def _saw_backward(self, tensors: Any) -> None:
        if isinstance(tensors, self._torch.Tensor):
            tensors = (tensors,)
        for tensor in tensors:
            if tensor.numel() != 1 or tensor.is_complex():
                self.note(
                    "backward was called on a tensor with %d elements: this is no loss (a stage of a pipeline, "
                    "for example)" % tensor.numel()
                )
            elif self._is_capturing(tensor):
                self.note("backward is part of a CUDA graph: its losses cannot be read")
            else:
                self._pending.append(self._loss_of(tensor))

    def _loss_of(self, tensor: Any) -> _Loss:
        known, self._scaled = self._scaled, None
        if known is not None and known[0]() is tensor:
            return _Loss(known[1], known[2])
        if known is not None:
            self.note("a loss was changed after GradScaler.scale: its recorded value contains the factor")
        return _Loss(_Scalar(self._torch, tensor), None)

    def _zeroes_optimizer(self, optimizer: Any) -> None:
        self._zeroes(one for group in optimizer.param_groups for one in group["params"])

    def _zeroes_module(self, module: Any) -> None:
        self._zeroes(module.parameters())

    def _zeroes(self, parameters: Any) -> None:
        """Mark losses whose gradients are set to zero before a step uses them.

        LBFGS sets gradients to zero within its step.
        """
        if self._stack or all(parameter.grad is None for parameter in parameters):
            return
        for loss in self._pending:
            loss.line = {"step": self.counted + 1, "index": -1, "used": False}
        self._waiting += self._pending
        self._pending = []

    # -- steps ----------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in self._stack:  # an earlier step of this optimizer raised an exception
            del self._stack[self._stack.index(id(optimizer)) :]
        self._stack.append(id(optimizer))
        if len(self._stack) == 1:
            self._makes_state = self.steps == 0 and not self._pending and _only_makes_state(optimizer)
        if self.steps == 0 and not self._before_from and not self._makes_state:
            self.before, self._before_from = self._session.steps_before(
                _step_in_state(optimizer), bool(optimizer.state)
            )
            self._session.add({"kind": "count", "before": self.before, "from": self._before_from})

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._quietly(self._count)(optimizer)
        # This is outside of `_quietly`, because it may end the process.
        if not self._stack:
            self._session.after_step(self)

    def _count(self, optimizer: Any) -> None:
        if id(optimizer) in self._stack:
            del self._stack[self._stack.index(id(optimizer)) :]
        if self._stack or self._makes_state:
            return  # this step is inside the step of a wrapper, or is not a step of the training
        if all(reference() is not optimizer for reference, _ in self._optimizers):
            # The optimizer also keeps these groups in memory, so this list needs no further memory.
            self._optimizers.append((weakref.ref(optimizer, self._gone), optimizer.param_groups))
        counts = self._leads(optimizer)
        if counts:
            self.steps += 1
            self._index = 0
        for loss in self._pending:
            self.saw_loss = True
            loss.line = {"step": self.counted, "index": self._index, "used": True}
            self._index += 1
        # Losses of a GPU are read one step later, when the copy has arrived.
        ready, self._waiting, self._pending = self._waiting, self._pending, []
        self._add(ready)
        if counts:
            self._session.counted(self)

    def forget(self) -> None:
        """Forget the optimizers, because their parameters have been hashed for the last time."""
        self._optimizers = []

    def _gone(self, _reference: Any) -> None:
        """If the last optimizer was deleted, tell the session that the training has ended.

        The session hashes the parameters.
        """
        if all(reference() is None for reference, _ in self._optimizers):
            self._session.trained()

    def _leads(self, optimizer: Any) -> bool:
        leader = None if self._leader is None else self._leader()
        if leader is optimizer or leader is None or id(optimizer) in self._since_leader:
            self._leader = weakref.ref(optimizer)
            self._since_leader = set()
            return True
        self._since_leader.add(id(optimizer))
        return False

    def _add(self, losses: List[_Loss]) -> None:
        for loss in losses:
            line = {"kind": "loss", "name": "loss", "value": loss.scalar.text(), "dtype": loss.scalar.dtype}
            line.update(loss.line)
            if loss.scale is not None:
                line["scale"] = loss.scale.text()
            self._session.add(line)

    def finish(self) -> None:
        """Record the remaining losses; no step used the losses after the last step."""
        for loss in self._pending:
            loss.line = {"step": self.counted + 1, "index": -1, "used": False}
        self._add(self._waiting + self._pending)
        self._waiting, self._pending = [], []

    def note(self, text: str) -> None:
        """Record a note about a fact that the losses and steps cannot show. Each text is recorded once."""
        if text not in self._noted and len(self._noted) < 20:
            self._noted.add(text)
            self._session.add({"kind": "note", "step": self.counted + 1, "text": text[:400]})


def _only_makes_state(optimizer: Any) -> bool:
    """Return whether a step changes no parameter and only makes the state of the optimizer.

    `get_state_dict` makes such a step, with all learning rates set to 0 (_init_optim_state, torch 2.2 to 2.13). The
    first step of a training whose learning rate begins at 0 is different, because a loss comes before that step.
    """
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    return bool(rates) and not optimizer.state and all(float(rate) == 0.0 for rate in rates)


def _step_in_state(optimizer: Any) -> Optional[int]:
    """Return the highest step counter of the parameters (Adam and most optimizers have counters); None without one."""
    found = [
        state["step"] for state in list(optimizer.state.values())[:64] if isinstance(state, dict) and "step" in state
    ]
    return max((int(step) for step in found), default=None)


def has_run_collective(torch: Any) -> Optional[bool]:
    """Return whether a collective operation ran in a process group of several ranks; None if torch cannot say this.

    The process groups count their collectives (Gloo and NCCL, torch 2.0 to 2.13). Messages from one rank to another are
    not counted.
    """
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    try:
        groups = list(distributed.distributed_c10d._world.pg_map)
        return any(group.size() > 1 and group._get_sequence_number_for_group() > 0 for group in groups)
    except Exception:
        return None


def wait_for_other_ranks(torch: Any, seconds: float) -> None:
    """Wait until all ranks have called this function. It uses the store of the process group, and no collective."""
    from datetime import timedelta

    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    try:
        store = distributed.distributed_c10d._get_default_store()
        size, rank = distributed.get_world_size(), distributed.get_rank()
        store.set("hpcenv-stop/%d" % rank, "1")
        store.wait(["hpcenv-stop/%d" % other for other in range(size)], timedelta(seconds=seconds))
    except Exception as error:
        sys.stderr.write("hpcenv: not all ranks reached the last step: %s\n" % error)
