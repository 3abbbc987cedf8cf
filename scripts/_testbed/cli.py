"""The words of `scripts/testbed`: arguments in, one function called, its answer printed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import instance as instances
from .errors import MEANING, Status, TestbedError
from .instance import Instance
from .process import Runner, cleaned_environment
from .rootfs import MODULES, USERS

CHECKOUT = Path(__file__).resolve().parents[2]
_SLURM_VERSIONS = ("22.05", "24.11", "26.05")


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command; answers the exit status."""
    words, command = split_command(argv)
    options = _parser().parse_args(words)
    failed = Status.EXEC_FAILED if options.verb == "exec" else Status.FAILED
    try:
        if command is not None and options.verb != "exec":
            raise TestbedError(f"{options.verb} takes nothing after --", status=Status.USAGE)
        return _dispatch(options, command, environ)
    except TestbedError as error:
        print(error.render(), file=sys.stderr)
        return error.status if error.status != Status.FAILED else failed
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; nothing more can be said to it at our end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(
            "testbed: interrupted\n  next: scripts/testbed up continues, scripts/testbed down cleans up",
            file=sys.stderr,
        )
        return 130


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Our words, and the command behind the first `--`, untouched (argparse would eat a second `--`)."""
    words = list(argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _dispatch(options: argparse.Namespace, command: list[str] | None, environ: Mapping[str, str]) -> int:
    from .host import require_root_and_capabilities

    require_root_and_capabilities(os.geteuid())
    instance = instances.choose_instance(CHECKOUT, environ, options.instance)
    if options.verb == "exec":
        return _exec(instance, options, command, environ)
    os.umask(0o022)
    runner = Runner(instance.name, cleaned_environment(environ, instance.name))
    verbs = {
        "up": _up,
        "down": _down,
        "status": _status,
        "install": _install,
        "frameworks": _frameworks,
        "fault": _fault,
    }
    return verbs[options.verb](instance, runner, options)


def _exec(
    instance: Instance, options: argparse.Namespace, command: list[str] | None, environ: Mapping[str, str]
) -> int:
    from . import shell

    if command == []:
        raise TestbedError("no command behind --", hint="scripts/testbed exec -- hostname", status=Status.EXEC_FAILED)
    session = shell.Session(node=options.node, user=options.user, cwd=options.cwd, command=tuple(command or ()))
    shell.become(instance, session, environ)


def _up(instance: Instance, runner: Runner, options: argparse.Namespace) -> int:
    from . import cluster, host
    from .progress import Progress
    from .rootfs import Workshop

    progress = Progress()
    with instances.locked(instance):
        host.require_machine(runner, progress)
        shop = Workshop(instance, runner, progress)
        wanted = cluster.Wanted(
            nodes=options.nodes,
            slurm=options.slurm,
            proctrack=options.proctrack,
            task=options.task,
            accounting=options.accounting,
            preempt_signal=options.preempt_signal,
            modules=options.modules,
        )
        layout = cluster.up(shop, wanted)
        progress.say(f"testbed {instance.name} is up: {layout.nodes} nodes, Slurm {layout.slurm}")
    named = f"--instance {options.instance} " if options.instance else ""
    print(f"next: scripts/testbed {named}exec (a shell as alice), or scripts/testbed {named}exec -- srun -N1 hostname")
    return Status.OK


def _down(instance: Instance, runner: Runner, _options: argparse.Namespace) -> int:
    from . import cleanup
    from .progress import Progress

    with instances.locked(instance):
        left = cleanup.down(instance, runner, Progress())
    print(f"testbed {instance.name} is down; left behind:\n{left.render()}")
    return Status.FAILED if left else Status.OK


def _status(instance: Instance, runner: Runner, options: argparse.Namespace) -> int:
    from . import cluster
    from .progress import Progress
    from .rootfs import Workshop

    layout = instances.wanted_layout(instance)
    report = cluster.look(Workshop(instance, runner, Progress()), layout)
    print(report.as_json() if options.json else report.render())
    return Status.OK if report.healthy else Status.FAILED


def _install(instance: Instance, runner: Runner, _options: argparse.Namespace) -> int:
    from . import wheel
    from .progress import Progress
    from .rootfs import Workshop

    with instances.locked(instance):
        layout = instances.wanted_layout(instance)
        wheel.install(Workshop(instance, runner, Progress()), layout)
    return Status.OK


def _frameworks(instance: Instance, runner: Runner, _options: argparse.Namespace) -> int:
    from . import frameworks
    from .progress import Progress
    from .rootfs import Workshop

    with instances.locked(instance):
        layout = instances.wanted_layout(instance)
        frameworks.install(Workshop(instance, runner, Progress()), layout)
    return Status.OK


def _fault(instance: Instance, runner: Runner, options: argparse.Namespace) -> int:
    from . import fault, job
    from .progress import Progress
    from .rootfs import Workshop

    with instances.locked(instance):
        layout = instances.wanted_layout(instance)
        shop = Workshop(instance, runner, Progress())
        if options.kind in ("kill", "stop") and job.is_target(options.target):
            target = fault.parse_process(instance, layout, options.target, options.job)
        else:
            target = fault.parse_target(layout, options.target)
        fault.check(options.kind, target)
        strength = fault.Strength(
            delay_ms=options.delay_ms, loss_percent=options.loss_percent, every=options.every, user=options.user
        )
        fault.KINDS[options.kind](fault.Fault(shop=shop, layout=layout, target=target, strength=strength))
    print(f"{options.kind}: {target.label}")
    return Status.OK


def _parser() -> argparse.ArgumentParser:
    table = "\n".join(f"  {status.value:<4} {MEANING[status]}" for status in Status)
    parser = argparse.ArgumentParser(
        prog="testbed",
        description="A real Slurm cluster with Apptainer on this machine (Debian 12, root).",
        epilog=f"exit status:\n{table}\n\nenvironment:\n"
        f"  {instances.ENV_INSTANCE}  the instance, as --instance\n"
        f"  {instances.ENV_STATE}     its state directory (default /var/tmp/hpcenv-testbed/INSTANCE)\n"
        f"  {instances.ENV_CACHE}     root file systems, image, wheels (default ~/.cache/hpcenv-testbed)\n"
        f"  {instances.ENV_PACKAGES}      the locked versions of Python packages (default tests/packages)\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--instance", metavar="NAME", help="which testbed (default: this checkout's own)")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    one = verbs.add_parser("up", help="start it, or repair what does not run")
    one.add_argument("--nodes", type=_node_count, metavar="N", help="compute nodes n1..nN (default 2)")
    one.add_argument("--slurm", choices=_SLURM_VERSIONS, help="Slurm's version (default 24.11); 22.05 has no Apptainer")
    one.add_argument(
        "--proctrack",
        choices=("linuxproc", "cgroup"),
        help="how Slurm follows a job's processes (default linuxproc); cgroup needs cgroup v1 on this machine, "
        "and holds jobs to their memory too",
    )
    one.add_argument(
        "--task",
        choices=("none", "affinity"),
        help="affinity: Slurm binds each task to the cores that it was given (task/affinity, default none)",
    )
    one.add_argument(
        "--modules",
        choices=tuple(MODULES),
        help="environment modules: Debian's Lmod, or its modules in Tcl (default none)",
    )
    one.add_argument(
        "--accounting",
        action=argparse.BooleanOptionalAction,
        help="slurmdbd, so that sacct answers (default); --no-accounting: a site without it",
    )
    one.add_argument(
        "--preempt-signal",
        action=argparse.BooleanOptionalAction,
        help="PreemptParameters=send_user_signal: a preempted job gets its --signal first (default); "
        "--no-preempt-signal: TERM only",
    )

    one = verbs.add_parser("exec", help="run a command in it: exec [options] -- COMMAND...; without one: a shell")
    one.add_argument("--node", default="login", help="login (default), n1..nN, ctl, registry")
    one.add_argument("--user", default="alice", help="alice (default), bob, root")
    one.add_argument("--cwd", metavar="DIR", help="start there (default: the user's home)")

    one = verbs.add_parser("status", help="what is alive; status 0 only if everything is")
    one.add_argument("--json", action="store_true", help="one JSON object")

    verbs.add_parser("down", help="stop it and leave nothing behind (also its users' files)")
    verbs.add_parser("install", help="build this checkout's wheel and install it in the testbed")

    verbs.add_parser(
        "frameworks",
        help="make /shared/frameworks/bin/python: hostenv's torch, and the libraries of tests/packages/frameworks.in",
    )

    _add_fault(verbs.add_parser("fault", **_FAULT))
    return parser


_FAULT: dict[str, Any] = {
    "help": "break a machine, a daemon, a job's process or a command, or heal it",
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "description": "Break something on purpose, or heal it. What is broken shows in `scripts/testbed status`.",
    "epilog": """\
kinds:
  stop   SIGSTOP: it holds all it has and answers nobody
  kill   SIGKILL: a process, or the power of a machine
  cut    no network for a machine (its link goes down at the switch)
  slow   delay and loss on a machine's network
  flaky  a command of Slurm fails at every n-th call of one user
  heal   undo: continue, reconnect, start again; the real command back

targets:
  n1..nN, login, ctl                    a machine (all kinds but flaky)
  slurmctld, slurmdbd, mariadbd, registry, slurmd@n2, munged@n2
                                        a daemon (stop, kill, heal; cut and slow mean its machine)
  rank3, rank3@n2, agent@n2, slurmstepd@n2
                                        of the job that runs there now (stop, kill): a rank of torchrun, the
                                        task that srun started, or Slurm's own step daemon; to continue a
                                        stopped one, heal its machine; a killed one stays dead
  squeue, sinfo, scontrol, sbatch, scancel, srun, sacct
                                        a command (flaky, heal)

examples:
  scripts/testbed fault kill rank3
  scripts/testbed fault cut n2          ... and: scripts/testbed fault heal n2
  scripts/testbed fault kill slurmd@n2  ... and: scripts/testbed fault heal slurmd@n2
  scripts/testbed fault flaky squeue --every 3 --user bob
""",
}


def _add_fault(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("stop", "cut", "slow", "kill", "flaky", "heal"))
    parser.add_argument("target", help="what, see below")
    parser.add_argument("--job", help="for a job's process: which job, where several run")
    parser.add_argument("--user", choices=tuple(USERS), default="alice", help="for a command: whose (default alice)")
    parser.add_argument(
        "--every", type=_positive, default=2, metavar="N", help="for flaky: every n-th call fails (default 2; 1: all)"
    )
    parser.add_argument(
        "--delay-ms",
        type=int,
        help="for slow: each way (default 200); for flaky: how long a failing call takes (default 0)",
    )
    parser.add_argument("--loss-percent", type=float, default=1.0, help="for slow (default 1)")


def _positive(word: str) -> int:
    count = int(word)
    if count < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return count


def _node_count(word: str) -> int:
    count = int(word)
    if not 1 <= count <= 100:
        raise argparse.ArgumentTypeError("1 to 100 nodes")
    return count
