"""The trace of chosen optimizer steps: each operation of torch with hashes of its inputs and outputs.

A dispatch mode of torch (torch.utils._python_dispatch) sees each operation that goes through torch's dispatcher, below
autograd. These are the operations of the forward pass, the backward pass and the optimizer. The mode calls each
operation unchanged, so the results equal the results of a step without the trace. The hash is sha256 over the bytes of
a tensor in order, cut to 128 bits.

Tried with torch 2.13 on CPU, 2026-11-23. torch's own DebugMode (2.10 to 2.13) is not enough. It hashes only returned
tensors, so it misses values that fused optimizers write in place. Its hash also ignores the order of the elements.

The trace does not contain operations inside a kernel, so attention or a fused optimizer is one record. It also does not
contain operations inside functions that torch.compile compiled, operations in CUDA graphs, and operations of C++ code
that does not call torch's dispatcher. Views are left out, because they have the bytes of their source.
"""

import hashlib
import os
import sys
import threading
import time
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from .call_place import CallPlaces
from .tensor_bytes import add_bytes
from .writer import Writer

MOST_BYTES = 32 << 20
_MOST_EACH = 256
_LONGEST_ARGUMENTS = 400
_HEX_DIGITS = 32
# This text replaces the hash of memory that has no value yet, or that a kernel still writes.
UNKNOWN = "-"
_SECONDS_FOR_COLLECTIVE = 5.0

_EMPTY = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_",
    "_resize_output_", "set_",
}  # fmt: skip
_POINT_TO_POINT = {"send", "recv_", "recv_any_source_"}


class Trace:
    """The trace of this rank.

    Attributes:
        muted: above 0 while the start hook itself calls torch.
    """

    def __init__(self, torch: Any, session: Any, first: int, last: int) -> None:
        self.muted = 0
        self._torch = torch
        self._session = session
        self._first, self._last = first, last
        self._writer = Writer(session.place.file("trace", ".jsonl"), "the trace ends here")
        self._pid = os.getpid()
        self._mode = None  # type: Any
        self._active = False
        self._size = 0
        self._count = 0
        self._resumed = session.place.given_step or 0  # type: int
        self._noted = set()  # type: Set[str]
        self._unwritten = set()  # type: Set[int]
        self._arguments = {}  # type: Dict[Any, _Schema]
        self._places = CallPlaces(torch, session.watch)

    # -- which steps ------------------------------------------------------------------------------

    def install(self) -> None:
        """Begin at once if the first step is traced.

        Then the first traced step also contains the operations before it, such as the creation of the model.
        """
        place = self._session.place
        self._add(
            {
                "kind": "start",
                "schema": 1,
                "restart": place.restart,
                "pid": self._pid,
                "time": time.time(),
                "world_size": place.world_size,
                "first": self._first,
                "last": self._last,
            }
        )
        self._writer.write(now=True)
        if self._first == self._resumed + 1:
            self._enter()

    def resumes(self, step: int) -> None:
        """Begin the trace again, because the training continues after this step."""
        self._resumed = step
        self._go_on(step)

    def step_ended(self, step: int) -> None:
        """End the step that was traced, and begin the next step if the trace includes it."""
        if self._active:
            self._note_compiled()
            self._add({"kind": "end", "step": step, "operations": self._count})
        elif step == self._first:
            self._note("step %d could not be traced: its number was known only at its end" % step)
        self._go_on(step)
        self._writer.write(now=True)

    def _go_on(self, step: int) -> None:
        if not self._first <= step + 1 <= self._last or self._writer.problem or self._size >= MOST_BYTES:
            self.close()
        elif self._mode is None:
            self._enter()
        else:
            self._begin()

    def _enter(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._note("the optimizer steps in another thread than the main one: its operations are not traced")
            return
        self._mode = _mode_of(self._torch, self)
        self._mode.__enter__()
        self._active = True
        self._begin()

    def _begin(self) -> None:
        self._count = 0
        self._places.begin()
        self._add({"kind": "begin", "resumed": self._resumed})

    def close(self) -> None:
        """End the trace. If the script has entered another mode, the mode of the trace stays, but records nothing."""
        self._active = False
        if self._mode is not None and os.getpid() == self._pid:
            from torch.utils import _python_dispatch  # type: ignore[import-not-found,unused-ignore]

            current = _python_dispatch._get_current_dispatch_mode()  # type: Any
            if current is self._mode:
                current.__exit__(None, None, None)
            self._mode = None
        self._writer.write(now=True)

    # -- one operation ----------------------------------------------------------------------------

    def call(self, operation: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Call an operation, and record it."""
        if not self._active or self.muted or os.getpid() != self._pid:
            return operation(*args, **kwargs)
        known = self._arguments.get(operation)
        if known is None:
            known = self._arguments[operation] = _Schema(operation)
        if known.is_view:
            return operation(*args, **kwargs)
        before = None  # type: Any
        try:
            before = self._before(known, args, kwargs)
        except Exception as error:
            self._failed(known.name, error)
        result = operation(*args, **kwargs)
        if before is not None:
            try:
                self._after(known, args, kwargs, before, result)
            except Exception as error:
                self._failed(known.name, error)
        return result

    def _before(self, known: "_Schema", args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Dict[str, Any]:
        line = {"kind": "op", "name": known.name}  # type: Dict[str, Any]
        line.update(self._places.now())
        inputs, others = [], []
        for name, value in known.named(args, kwargs):
            tensors = _tensors(self._torch, value)
            if tensors is not None:
                inputs.append(self._row(name, tensors, value))
            elif _is_plain(self._torch, value):
                others.append("%s=%s" % (name, value))
        if known.is_random:
            inputs.append(["generator", "state", self._hash_generator(kwargs.get("generator"), args, kwargs)])
        line["in"] = inputs
        if others:
            line["args"] = ", ".join(others)[:_LONGEST_ARGUMENTS]
        return line

    def _after(
        self, known: "_Schema", args: Tuple[Any, ...], kwargs: Dict[str, Any], line: Dict[str, Any], result: Any
    ) -> None:
        written = [(name, value) for name, value in known.named(args, kwargs) if name in known.written]
        values = list(result) if isinstance(result, (tuple, list)) else [result]
        returned = [
            (str(number), value)
            for number, value in enumerate(values)
            if not any(value is one for _, one in written) and _tensors(self._torch, value) is not None
        ]
        numbers = [one for one in values if isinstance(one, (bool, int, float, complex))]
        if known.is_empty:
            self._unwritten.update(_storage(value) for _, value in (*written, *returned))
            return
        if not written and not returned and not numbers:
            return
        ready = not known.is_communication or self._wait(known, values)
        rows = []
        for name, value in (*written, *returned):
            tensors = _tensors(self._torch, value) or []
            self._unwritten.difference_update(_storage(tensor) for tensor in tensors)
            rows.append(self._row(name, tensors, value, known=ready))
        if numbers:
            rows.append(["result", "number", repr(numbers)[:80]])
        line["out"] = rows
        line["i"] = self._count
        self._count += 1
        self._add(line)
        self._writer.write()

    def _row(self, name: str, tensors: List[Any], value: Any, *, known: bool = True) -> List[Any]:
        """Return name, type and hash of an argument or result; for a list, also the hash of each tensor."""
        hashes = [self._hash(tensor) if known else UNKNOWN for tensor in tensors]
        if not isinstance(value, (list, tuple)):
            return [name, _type_of(tensors[0]), hashes[0]]
        kinds = list(dict.fromkeys(_type_of(tensor) for tensor in tensors[:_MOST_EACH]))
        text = "%d tensors: %s%s" % (len(tensors), " ".join(kinds[:4]), " ..." if len(kinds) > 4 else "")
        if UNKNOWN in hashes:
            return [name, text, UNKNOWN]
        whole = hashlib.sha256("".join(hashes).encode()).hexdigest()[:_HEX_DIGITS]
        if len(hashes) > _MOST_EACH:
            return [name, text, whole]
        return [name, text, whole, [one[:8] for one in hashes], [_type_of(tensor) for tensor in tensors]]

    def _hash(self, tensor: Any) -> str:
        if _storage(tensor) in self._unwritten:
            return UNKNOWN
        try:
            digest = hashlib.sha256()
            if str(tensor.layout) == "torch.sparse_coo":
                for part in (tensor.detach()._indices(), tensor.detach()._values()):
                    add_bytes(digest, part)
            else:
                add_bytes(digest, tensor)
        except Exception as error:
            self._note("a tensor cannot be hashed: %s: %s" % (type(error).__name__, error))
            return UNKNOWN
        return digest.hexdigest()[:_HEX_DIGITS]

    def _hash_generator(self, generator: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> str:
        """Return the hash of the state of a random number generator."""
        torch = self._torch
        if generator is None:
            devices = [one.device for one in args if isinstance(one, torch.Tensor)]
            device = torch.device(kwargs.get("device") or (devices[0] if devices else "cpu"))
            if device.type == "cuda":
                generator = torch.cuda.default_generators[device.index or torch.cuda.current_device()]
            elif device.type == "cpu":
                generator = torch.default_generator
            else:
                return UNKNOWN
        return self._hash(generator.get_state())

    def _wait(self, known: "_Schema", values: List[Any]) -> bool:
        """Wait until a collective has written its result; return whether the result was written.

        This function checks repeatedly and does not block, because a send that waits for its receiver must not stop the
        receiving rank.
        """
        if known.never_completes:
            return False
        until = time.monotonic() + _SECONDS_FOR_COLLECTIVE
        for value in values:
            if type(value).__name__ != "ScriptObject":
                continue
            work = self._torch._C._distributed_c10d.Work.unbox(value)
            while not work.is_completed():
                if time.monotonic() > until:
                    # Some operations of gloo complete only when the script waits for them (torch 2.13).
                    known.never_completes = True
                    self._note("%s had no result after %d s: it is not hashed" % (known.name, _SECONDS_FOR_COLLECTIVE))
                    return False
                time.sleep(0.0002)
        return True

    # -- the file ---------------------------------------------------------------------------------

    def _add(self, line: Dict[str, Any]) -> None:
        if self._size >= MOST_BYTES:
            return
        self._size += self._writer.add(line)
        if self._size >= MOST_BYTES:
            self._active = False
            self._writer.add({"kind": "limit", "bytes": MOST_BYTES})
            self._writer.write(now=True)
            text = "hpcenv: the trace of rank %d has %d MiB, which is its limit: it ends here\n"
            sys.stderr.write(text % (self._session.place.rank, MOST_BYTES >> 20))

    def _note(self, text: str) -> None:
        if text not in self._noted and len(self._noted) < 20:
            self._noted.add(text)
            self._add({"kind": "note", "text": text[:400]})

    def _failed(self, name: str, error: Exception) -> None:
        self._note("%s could not be recorded: %s: %s" % (name, type(error).__name__, error))

    def _note_compiled(self) -> None:
        """Report that compiled functions ran. Their operations are not visible, or ran uncompiled."""
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
        frames = counters["frames"]["ok"] if counters is not None and "frames" in counters else 0
        if frames:
            self._note("%d compiled functions: operations in the kernels that torch.compile made are not seen" % frames)
            if not hasattr(self._torch.utils._python_dispatch.TorchDispatchMode, "ignore_compile_internals"):
                self._note("this torch does not compile under a trace: these steps had other kernels")


class _Schema:
    """The schema of an operation, read once."""

    def __init__(self, operation: Any) -> None:
        self.name = str(operation)[:200]
        schema = getattr(operation, "_schema", None)
        arguments = list(schema.arguments) if schema is not None else []
        returns = list(schema.returns) if schema is not None else []
        self.names = [one.name for one in arguments]
        self.written = {one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write}
        parts = self.name.split(".")
        self.short = parts[1] if len(parts) > 1 else self.name
        aliases = [one.alias_info for one in returns]
        # Operations of a profiler and queries compute nothing. A view has the bytes of its source.
        self.is_view = parts[0] in ("profiler", "prim", "inductor") or bool(
            aliases and not self.written and all(one is not None for one in aliases)
        )
        self.is_empty = parts[0] == "aten" and self.short in _EMPTY
        self.is_communication = parts[0] in ("c10d", "_c10d_functional")
        self.never_completes = self.short in _POINT_TO_POINT
        tags = [str(tag).rpartition(".")[2] for tag in getattr(operation, "tags", ())]
        self.is_random = "nondeterministic_seeded" in tags

    def named(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Iterator[Tuple[str, Any]]:
        for number, value in enumerate(args):
            yield (self.names[number] if number < len(self.names) else str(number)), value
        for name in kwargs:
            yield name, kwargs[name]


def _mode_of(torch: Any, trace: Trace) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class TraceMode(TorchDispatchMode):  # type: ignore[misc,no-untyped-call,unused-ignore]
        # Without this, torch would refuse a higher-order operation such as flex_attention (torch._ops, 2.5 to 2.13).
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Keep compiled functions compiled. Otherwise, the tested numbers would change (torch 2.10 to 2.13)."""
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return trace.call(func, args, kwargs or {})

    return TraceMode()  # type: ignore[no-untyped-call,unused-ignore]


def _tensors(torch: Any, value: Any) -> Optional[List[Any]]:
    """Return the tensors of a value; None if the value has no tensor, or other objects, too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)) and value:
        found = []  # type: List[Any]
        for one in value:
            if isinstance(one, torch.Tensor):
                found.append(one)
            elif isinstance(one, (list, tuple)):
                found += [tensor for tensor in one if isinstance(tensor, torch.Tensor)]
            elif one is not None:
                return None
        return found or None
    return None


def _is_plain(torch: Any, value: Any) -> bool:
    """Return whether the text of a value is the same in every process. Text of an object may contain its address."""
    if isinstance(value, (list, tuple)):
        return len(value) < 32 and all(_is_plain(torch, one) for one in value)
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.memory_format))


def _type_of(tensor: Any) -> str:
    device = "" if tensor.device.type == "cpu" else " " + tensor.device.type
    return "%s%s%s" % (str(tensor.dtype).replace("torch.", ""), list(tensor.shape), device)


def _storage(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except Exception:  # a sparse or fake tensor, or a wrapper, has no storage
        return id(tensor)
