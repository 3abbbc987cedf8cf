"""The hook in one process: it applies the profile, watches the training, and writes the records.

`begin` runs before the script, in every Python process of a rank. Only the rank itself records. Processes that the rank
starts only get the switches of torch. The variable HPCENV_START_HOOK has the options as JSON (launch/start_hook.py).
"""

import atexit
import contextlib
import json
import os
import re
import sys
import time
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from . import seeds, switches

# The hook of the rank itself sets this variable, so that the rank's child processes know that they are not the rank.
_RANK_PID = "HPCENV_RANK_PID"
_SECONDS_FOR_OTHER_RANKS = 60.0
# The names that hpcenv.training.save gives to checkpoints (incontainer/provenance.py).
_CHECKPOINT = re.compile(r"/step-([0-9]{1,18})(?:\.pt)?\Z")
# torch: aten/src/ATen/Context.cpp, alertNotDeterministic (2.0 to 2.13).
_NO_KERNEL = " does not have a deterministic implementation"

_current = None  # type: Optional[Session]


class Options:
    """The options from the launch step.

    Attributes:
        profile: `off`, `seeded` or `bitwise`.
        seed: base seed.
        seeds: whether the rank is seeded; always true with the profiles `seeded` and `bitwise`.
        variables: environment variables that the profile and the seed require, with their values.
        record: whether losses, metrics and hashes are recorded.
        hash_every: number of optimizer steps between two hashes of the parameters; 0 for no hashes.
        stop_after: number of the optimizer step after which the process ends; 0 if no step ends it.
        trace: the first and the last optimizer step whose operations are recorded; None for no trace.
        errors: folder in which the hook writes the error file of this rank (`--launcher none`); otherwise empty.
        cpus: for each local rank, the CPUs to which the rank is bound, in Linux's form of a list of CPUs.
        gpus: whether the run has GPUs. In a run with GPUs, the device of the first backward pass is recorded.
        watch: folder for the pulse and the stacks of this rank (pulse.py, stacks.py); empty if nothing is watched.
    """

    def __init__(self, data: Dict[str, Any]) -> None:
        self.profile = data["profile"]
        self.seed = int(data["seed"])
        self.seeds = self.profile != "off" or bool(data.get("seeds"))
        self.variables = dict(data["variables"])
        self.record = bool(data["record"])
        self.hash_every = int(data["hash_parameters_every"])
        self.stop_after = int(data["stop_after_steps"])
        first, last = data.get("trace_steps") or (0, 0)
        self.trace = (int(first), int(last)) if last else None
        self.errors = data.get("errors") or ""
        self.cpus = list(data.get("cpus") or ())
        self.gpus = bool(data.get("gpus"))
        self.watch = data.get("watch") or ""
        if self.profile not in switches.PROFILES:
            raise ValueError("unknown determinism profile %r" % self.profile)


class Place:
    """The rank and attempt of this process, and the folder of its files."""

    def __init__(self, environ: Any) -> None:
        self.rank = int(environ["RANK"])
        self.local_rank = int(environ.get("LOCAL_RANK", "0"))
        self.world_size = int(environ.get("WORLD_SIZE", "1"))
        self.restart = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.attempt = int(environ["HPCENV_ATTEMPT"])
        self.folder = environ["HPCENV_RUN_FOLDER"]
        # For `--resume-from`: a script may call for the checkpoint in one rank only, and send the result to the other
        # ranks.
        first = self.attempt == 0 and self.restart == 0
        self.given_checkpoint = environ.get("HPCENV_RESUME_FROM", "") if first else ""
        given = _CHECKPOINT.search(self.given_checkpoint)
        self.given_step = int(given.group(1)) if given is not None else None  # type: Optional[int]

    def file(self, kind: str, suffix: str) -> str:
        return os.path.join(self.folder, kind, "attempt-%d" % self.attempt, "rank-%d%s" % (self.rank, suffix))


def current() -> "Optional[Session]":
    """Return the session of this process; None if the process is not a rank with a session."""
    return _current if _current is not None and _current.is_rank() else None


def begin(environ: Any) -> None:
    """Apply the options of the launch step to this process."""
    global _current
    if _current is not None or "RANK" not in environ:
        return
    options = Options(json.loads(environ["HPCENV_START_HOOK"]))
    if environ.get(_RANK_PID, str(os.getpid())) != str(os.getpid()):
        if options.profile != "off":
            when_imported("torch", lambda torch: _apply_in_child(torch, options.profile))
        return
    os.environ[_RANK_PID] = str(os.getpid())
    bound = _bind(options.cpus, Place(environ))
    if options.errors:
        _keep_error(options.errors, Place(environ))
    if options.watch:
        from .pulse import begin_pulse  # every process of a rank loads this module
        from .stacks import begin_stacks

        begin_pulse(options.watch, Place(environ).rank, when_imported)
        begin_stacks(options.watch, Place(environ).rank)
    watches = options.record or options.stop_after or options.trace or options.gpus
    if not options.seeds and not watches:
        return
    _current = Session(options, Place(environ), bound)
    _current.start()


class Bound:
    """The CPU binding of a rank.

    Attributes:
        cpus: the CPUs that Linux reports after the binding; empty if the rank was not bound.
        problem: why the rank could not be bound; empty without a problem.
    """

    def __init__(self, cpus: str = "", problem: str = "") -> None:
        self.cpus = cpus
        self.problem = problem


def _bind(cpus: List[str], place: "Place") -> Bound:
    """Bind this process, before it starts threads, to the CPUs near its GPU. Child processes inherit the binding."""
    wanted = cpus[place.local_rank] if 0 <= place.local_rank < len(cpus) else ""
    if not wanted:
        return Bound()
    try:
        numbers = set()  # type: Set[int]
        for part in wanted.split(","):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
        # Slurm may have given only some of these CPUs to this task.
        usable = numbers & os.sched_getaffinity(0)
        if not usable:
            raise OSError("this process may use none of them")
        os.sched_setaffinity(0, usable)
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            found = [line.split()[1] for line in status if line.startswith("Cpus_allowed_list:")]
        return Bound(cpus=found[0])
    except (OSError, ValueError, IndexError) as error:
        problem = "rank %d is not bound to CPUs %s near its GPU: %s" % (place.rank, wanted, error)
        sys.stderr.write("hpcenv: %s\n" % problem)
        return Bound(problem=problem)


def _keep_error(folder: str, place: "Place") -> None:
    """Write the exception that ends this rank, in the form of torch's error files (torch 1.10 to 2.13)."""
    before = sys.excepthook

    def keep(kind: Any, error: Any, traceback: Any) -> None:
        try:
            import traceback as texts

            stack = "".join(texts.format_exception(kind, error, traceback))
            message = "%s: %s" % (kind.__name__, error)
            record = {"message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": time.time()}}}
            file = os.path.join(folder, "attempt_%d" % place.restart, str(place.local_rank), "error.json")
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with open(file, "w", encoding="utf-8", errors="backslashreplace") as opened:
                json.dump(record, opened)
        except Exception:  # the original error is more important than this one
            pass
        before(kind, error, traceback)

    sys.excepthook = keep


def _apply_in_child(torch: Any, profile: str) -> None:
    for problem in switches.apply_to_torch(torch, profile):
        sys.stderr.write("hpcenv: a process of a rank: %s\n" % problem)


class Session:
    """The hook in the process of a rank."""

    def __init__(self, options: Options, place: Place, bound: Bound) -> None:
        self.options = options
        self._cpus = bound.cpus
        self.place = place
        self.torch = None  # type: Any
        self.watch = None  # type: Any
        self.trace = None  # type: Any
        self._pid = os.getpid()
        self._resumed = None  # type: Optional[int]
        self._asked_for_checkpoint = False
        self._readings = {}  # type: Dict[str, Dict[str, Optional[str]]]
        self._changed_at = {}  # type: Dict[str, str]
        self._without_kernel = {}  # type: Dict[str, int]
        self._problems = [bound.problem] if bound.problem else []
        self._rank_seed = None  # type: Optional[int]
        self._applied_by = ""
        self._profile = options.profile
        self._seed = options.seed
        self._stopped_after = 0
        self._samples = None  # type: Optional[int]
        self._counter = None  # type: Any
        self._ended = False
        self._talked = False  # type: Optional[bool]
        self._writer = None  # type: Any
        self._device = {"node": os.environ.get("HPCENV_NODE", "")} if options.gpus else {}  # type: Dict[str, str]

    def is_rank(self) -> bool:
        """Return whether this process is the rank. A forked worker has a copy of this object, but is not the rank."""
        return self._pid == os.getpid()

    # -- start --------------------------------------------------------------------------------

    def start(self) -> None:
        """Apply the options that do not need torch. The other options are applied when torch is imported."""
        from .writer import Writer  # every process of a rank loads this module

        if self.options.record:
            self._writer = Writer(self.place.file("metrics", ".jsonl"))
            self.add(
                {
                    "kind": "start",
                    "schema": 1,
                    "restart": self.place.restart,
                    "pid": self._pid,
                    "time": time.time(),
                    "world_size": self.place.world_size,
                }
            )
        if self.options.seeds:
            self.seed(self.options.seed, "start-hook")
        when_imported("torch", self._torch_imported)
        atexit.register(self.end)
        self._read("at_start")
        self._save("started")

    def seed(self, seed: int, applied_by: str) -> int:
        """Seed the loaded libraries now, and other libraries at their import; return this rank's seed."""
        value = seeds.seed_of_rank(seed, self.place.rank)
        self._seed, self._rank_seed, self._applied_by = seed, value, applied_by
        seeds.seed_python(value)
        when_imported("numpy", lambda numpy: seeds.seed_numpy(numpy, value))
        if self.torch is not None:
            seeds.seed_torch(self.torch, value)
        return value

    def applied(self) -> Dict[str, Any]:
        """Return the seeds and the profile of this rank now. Both seeds are None if the rank is not seeded."""
        seed = None if self._rank_seed is None else self._seed
        return {"seed": seed, "rank_seed": self._rank_seed, "determinism": self._profile}

    def apply(self, profile: str, applied_by: str) -> List[str]:
        """Apply the switches of a profile to torch, which is imported; return the switches that could not be set."""
        self._profile, self._applied_by = profile, applied_by
        if profile == "off":
            return []
        problems = switches.apply_to_torch(self.torch, profile)
        self._problems += problems
        if profile == "seeded":
            self._count_warnings()
        return problems

    def _torch_imported(self, torch: Any) -> None:
        self.torch = torch
        if self._rank_seed is not None:
            seeds.seed_torch(torch, self._rank_seed)
        self.apply(self._profile, self._applied_by)
        if self.options.record or self.options.stop_after or self.options.trace:
            from .samples import SampleCounter  # every process of a rank loads this module
            from .steps import StepWatch

            self._counter = SampleCounter(torch, self.is_rank)
            when_imported("torch.utils.data.dataloader", self._counter.install)
            self.watch = StepWatch(torch, self)
            try:
                self.watch.install()
            except RuntimeError as error:
                self._problems.append(str(error))
                if self.options.stop_after:
                    raise
        if self.options.gpus:
            from .device import watch  # every process of a rank loads this module

            watch(torch, self._found_device)
        if self._profile != "off":
            self._watch_setters(torch)
        # `end` must be registered after torch's exit handlers, because Python then calls `end` before torch's handlers.
        atexit.unregister(self.end)
        atexit.register(self.end)
        self._read("at_start")
        self._save("started")
        self._begin_trace(torch)

    def _found_device(self, found: Dict[str, str]) -> None:
        """Record the device of the first backward pass. A process that this rank forked records nothing."""
        if self.is_rank():
            problem = found.pop("problem", "")
            self._problems += [problem] if problem else []
            self._device.update(found)
            self._save("started")

    def _begin_trace(self, torch: Any) -> None:
        """Begin the trace, if requested. The trace begins last, so that it does not contain the hook's own work."""
        if self.options.trace is None:
            return
        from .trace import Trace  # every process of a rank loads this module

        try:
            self.trace = Trace(torch, self, *self.options.trace)
            self.trace.install()
        except Exception as error:
            self.trace = None
            self._problems.append("no trace: %s: %s" % (type(error).__name__, error))
            sys.stderr.write("hpcenv: %s\n" % self._problems[-1])

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """Keep the hook's own calls of torch out of the trace."""
        trace = self.trace
        if trace is not None:
            trace.muted += 1
        try:
            yield
        finally:
            if trace is not None:
                trace.muted -= 1

    # -- what the script changes ----------------------------------------------------------------

    def _watch_setters(self, torch: Any) -> None:
        """Record the place in the script that changes a switch."""
        for name, setter in (
            ("torch.deterministic-mode", "use_deterministic_algorithms"),
            ("torch.deterministic-mode", "set_deterministic_debug_mode"),
            ("torch.float32-matmul-precision", "set_float32_matmul_precision"),
            ("torch.num-threads", "set_num_threads"),
        ):
            self._wrap_setter(torch, setter, name)
        for owner, prefix in (
            (torch.backends.cudnn, "backends.cudnn."),
            (torch.backends.cuda.matmul, "backends.cuda.matmul."),
        ):
            self._wrap_attributes(type(owner), prefix)

    def _wrap_setter(self, torch: Any, setter: str, name: str) -> None:
        import functools

        original = getattr(torch, setter)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._note_place(name)
            return original(*args, **kwargs)

        setattr(torch, setter, wrapper)

    def _wrap_attributes(self, kind: Any, prefix: str) -> None:
        names = {switch.read: switch.name for switch in switches.SWITCHES}
        original = kind.__setattr__

        def set_attribute(this: Any, name: str, value: Any) -> None:
            if prefix + name in names:
                self._note_place(names[prefix + name])
            original(this, name, value)

        kind.__setattr__ = set_attribute

    def _note_place(self, name: str) -> None:
        frame = sys._getframe(2)
        self._changed_at[name] = "%s:%d" % (frame.f_code.co_filename, frame.f_lineno)

    def _count_warnings(self) -> None:
        """Count torch's warnings of operations without a deterministic kernel; show each operation once."""
        if getattr(warnings.showwarning, "_hpcenv", False):
            return
        show = warnings.showwarning

        def count(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
            operation, found, _ = str(message).partition(_NO_KERNEL)
            if found:
                self._without_kernel[operation] = self._without_kernel.get(operation, 0) + 1
                if self._without_kernel[operation] > 1:
                    return
            show(message, category, *args, **kwargs)

        count._hpcenv = True  # type: ignore[attr-defined]
        warnings.showwarning = count
        warnings.filterwarnings("always", message=".*" + _NO_KERNEL, category=UserWarning)

    def _counts_warnings(self) -> bool:
        """Return whether Python still shows each of these warnings. A script may have replaced the filters."""
        probe = "x" + _NO_KERNEL
        for action, message, category, _module, _line in warnings.filters:
            if issubclass(UserWarning, category) and (message is None or message.match(probe)):
                return action == "always" and getattr(warnings.showwarning, "_hpcenv", False)
        return False

    # -- steps ----------------------------------------------------------------------------------

    def add(self, line: Dict[str, Any]) -> None:
        """Add a line to this rank's file. A process that the rank forked adds nothing."""
        if self._writer is not None and self.is_rank():
            self._writer.add(line)

    def add_metrics(self, lines: List[Dict[str, Any]]) -> None:
        """Add metrics of the script and write them now, because no step writes them without an optimizer of torch."""
        for line in lines:
            self.add(line)
        if self._writer is not None and self.is_rank():
            self._writer.write()

    def steps_before(self, in_state: Optional[int], has_state: bool) -> Tuple[Optional[int], str]:
        """Return the number of optimizer steps before this process, and the source of this number."""
        if in_state:
            return in_state, "optimizer"
        if self._resumed is not None:
            return self._resumed, "checkpoint"
        if self.place.given_step is not None:
            return self.place.given_step, "checkpoint"
        first = self.place.attempt == 0 and self.place.restart == 0
        if in_state == 0 or (not has_state and (first or self._asked_for_checkpoint)):
            return 0, "start"
        return None, "unknown"

    def resumes(self, step: Optional[int]) -> None:
        """Record that the script requested the newest checkpoint. `step` is None if there was no checkpoint."""
        self._asked_for_checkpoint, self._resumed = True, step
        if self.trace is not None and step and self.is_rank():
            self.trace.resumes(step)

    def _tell_of_checkpoint(self) -> None:
        """Report that the training made a step before the script asked for the checkpoint of `--resume-from`."""
        if not self.place.given_checkpoint or self.place.rank != 0 or self._asked_for_checkpoint:
            return
        sys.stderr.write(
            "hpcenv: --resume-from: rank 0 made its first optimizer step, and did not call "
            "hpcenv.training.resume_path(): the training begins anew, unless the script found %s in another way\n"
            % os.path.basename(self.place.given_checkpoint)
        )

    def counted(self, watch: Any) -> None:
        """Make the hashes, checks and records that are due after a counted step."""
        if not self.is_rank():
            return
        every = self.options.hash_every
        if every and watch.counted % every == 0:
            self.hash_parameters("interval")
        if watch.steps & (watch.steps - 1) == 0:
            self._look_for_collectives()
        if watch.steps == 1:
            self._tell_of_checkpoint()
            self._read("after_first_step")
            self._save("first-step")
        if watch.steps in (1, 2):
            # Only the samples between the first two steps are counted, because a script may fetch batches before the
            # first step.
            self._samples = self._counter.taken()
        if watch.steps == 2:
            self._counter.remove()
            self._save("first-step")
        if self._writer is not None:
            self._writer.write()
        if self.trace is not None:
            self.trace.step_ended(watch.counted)

    def _look_for_collectives(self) -> None:
        """Check whether this rank has run a collective: at the steps 1, 2, 4 and so on, and at the end."""
        if self._talked is False and self.place.world_size > 1 and self.torch is not None:
            from .steps import has_run_collective  # every process of a rank loads this module

            self._talked = has_run_collective(self.torch)

    def after_step(self, watch: Any) -> None:
        """End this process if the last step was the step after which the run must stop."""
        stop = self.options.stop_after
        if not stop or watch.counted < stop or not self.is_rank():
            return
        import threading

        from .steps import wait_for_other_ranks  # every process of a rank loads this module

        if not self._stopped_after:
            self._stopped_after = watch.counted
            self.trained()
            wait_for_other_ranks(self.torch, _SECONDS_FOR_OTHER_RANKS)
            sys.stderr.write("hpcenv: rank %d ends after optimizer step %d\n" % (self.place.rank, watch.counted))
        if threading.current_thread() is not threading.main_thread():
            self.end()
            os._exit(0)
        raise SystemExit(0)

    def trained(self) -> None:
        """Hash the trained parameters when the training ends, at the latest when the process ends."""
        if self.watch is not None and self.is_rank():
            if self._profile != "off" or self._stopped_after:
                self.hash_parameters("end")
            self.watch.forget()

    def hash_parameters(self, at: str) -> None:
        """Record the hash of all parameters; `at` names the occasion."""
        if self.watch is None or self._writer is None or not self.watch.parameters():
            return
        from .parameters import hash_parameters  # every process of a rank loads this module

        try:
            with self.without_trace():
                found = hash_parameters(self.watch.parameters())
        except Exception as error:
            self.watch.note("the parameters cannot be hashed: %s: %s" % (type(error).__name__, error))
            return
        line = {"kind": "parameters", "step": self.watch.counted, "name": "parameters", "dtype": "sha256", "at": at}
        line.update(found)
        self.add(line)

    # -- read-back --------------------------------------------------------------------------------

    def _read(self, when: str) -> None:
        for switch in switches.SWITCHES:
            value = switches.read_value(switch, self.torch)
            if value is not None:
                self._readings.setdefault(switch.name, {})[when] = value

    def _save(self, state: str) -> None:
        from .writer import replace_file  # every process of a rank loads this module

        asked = switches.asked_values(self._profile, self.options.variables)
        rows = []
        for switch in switches.SWITCHES:
            found = self._readings.get(switch.name, {})
            wanted = asked.get(switch.name)
            seen = {value for value in found.values()}
            rows.append(
                {
                    "name": switch.name,
                    "asked": wanted,
                    "at_start": found.get("at_start"),
                    "after_first_step": found.get("after_first_step"),
                    "at_end": found.get("at_end"),
                    "changed_at": self._changed_at.get(switch.name, "") if seen - {wanted} and wanted else "",
                }
            )
        place = self.place
        data = {
            "schema": 1,
            "attempt": place.attempt,
            "rank": place.rank,
            "local_rank": place.local_rank,
            "world_size": place.world_size,
            "restart": place.restart,
            "pid": self._pid,
            "profile": self._profile,
            "applied_by": self._applied_by,
            "seed": self._seed,
            "rank_seed": self._rank_seed,
            "state": state,
            "versions": _versions(),
            "switches": rows,
            "without_deterministic_kernel": [
                {"operation": name[:200], "count": self._without_kernel[name]}
                for name in sorted(self._without_kernel)[:100]
            ],
            "cpus": self._cpus,
            **self._device,
            "problems": [text[:500] for text in self._problems[:20]],
            "steps": 0 if self.watch is None else self.watch.steps,
            "samples": self._samples if self.watch is not None and self.watch.steps > 1 else None,
            "stopped_after": self._stopped_after,
            "apart": self._trained_apart(),
        }
        replace_file(place.file("determinism", ".json"), data)

    def _trained_apart(self) -> bool:
        several = self.place.world_size > 1 and self.watch is not None and self.watch.steps > 0
        return bool(several and self.watch.saw_loss and self._talked is False)

    # -- end --------------------------------------------------------------------------------------

    def end(self) -> None:
        """Write the rest of the records. Called when the process ends, and before this hook ends the process."""
        if self._ended or not self.is_rank():
            return
        if self._profile == "seeded" and self.torch is not None and not self._counts_warnings():
            self._problems.append("the script changed Python's warning filters: more operations may lack a kernel")
        if self.trace is not None:
            self.trace.close()
        self._look_for_collectives()
        reason = "stop-after-steps" if self._stopped_after else "finished"
        if getattr(sys, "last_type", None) is not None:
            reason = "exception"
        if self._writer is not None:
            if self.watch is not None:
                self.watch.finish()
                if not self._stopped_after:
                    self.trained()
            steps = 0 if self.watch is None else self.watch.counted
            self.add({"kind": "end", "steps": steps, "reason": reason, "time": time.time()})
            self._writer.write(now=True)
            if self._writer.problem:
                self._problems.append(self._writer.problem)
        self._ended = True
        self._read("at_end")
        self._save("ended")


def _versions() -> Dict[str, str]:
    found = {"python": "%d.%d.%d" % sys.version_info[:3]}
    for name in ("torch", "numpy"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


# -- imports ------------------------------------------------------------------------------------


def when_imported(name: str, act: Callable[[Any], None]) -> None:
    """Call `act` with a module: now if the module is imported, otherwise after its import by another caller."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
        return
    for finder in sys.meta_path:
        if isinstance(finder, _Finder) and finder.name == name:
            finder.acts.append(act)
            return
    sys.meta_path.insert(0, _Finder(name, act))


class _Finder:
    """Lets the other finders find one module, and calls the functions once after the code of this module has run."""

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self.name = name
        self.acts = [act]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        # The finder is removed only after the module was imported, because a failed import may be tried again.
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        loader = getattr(spec, "loader", None)
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                for act in self.acts:
                    _act(act, module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            raise ImportError("the loader of %s cannot be watched" % name)
        return spec


def _act(act: Callable[[Any], None], module: Any) -> None:
    """Call `act` with a module. If `act` fails and the run depends on it, end the process at once.

    The process ends without an exception, because the script could catch an exception.
    """
    try:
        act(module)
    except Exception as error:
        session = _current
        name = getattr(module, "__name__", "?")
        sys.stderr.write("hpcenv: the start hook failed with %s: %s: %s\n" % (name, type(error).__name__, error))
        if session is None or session.options.seeds or session.options.stop_after:
            sys.stderr.write("hpcenv: this process ends: it could not apply what the run asks for\n")
            sys.stderr.flush()
            os._exit(1)
