"""The whole cluster: `up` makes or repairs it, `status` looks at it.

Every step asks first what is there, so the same code starts a new testbed, continues an
interrupted `up`, and heals what `fault` broke.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from . import cgroup, daemon, flaky, hostenv, image, machine, network, rootfs, slurm, stub_nvml, wheel
from . import instance as instances
from .errors import Status, TestbedError
from .host import used_networks
from .instance import Instance, Layout
from .machine import Machine
from .rootfs import USERS, Workshop

DEFAULT_NODES = 2
DEFAULT_SLURM = "24.11"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the command line asked for; None where it said nothing."""

    nodes: int | None = None
    slurm: str | None = None
    proctrack: str | None = None
    task: str | None = None
    accounting: bool | None = None
    preempt_signal: bool | None = None
    modules: str | None = None


def up(shop: Workshop, wanted: Wanted) -> Layout:
    """A running cluster: made if there is none, repaired if there is."""
    layout = instances.read_layout(shop.instance)
    if layout is None:
        layout = _plan(shop, wanted)
        _make_directories(shop)
        slurm.write_files(shop.instance, layout)
        # Written last: a layout on disk means that machines can start from it.
        instances.write_layout(shop.instance, layout)
    else:
        _refuse_change(layout, wanted)
        shop.progress.say(f"testbed {shop.instance.name} exists: repairing what does not run")
    stub_nvml.prepare(shop.instance, layout, shop.runner, shop.progress)
    ensure(shop, layout, machine.machines(layout))
    wheel.install(shop, layout)
    return layout


def _plan(shop: Workshop, wanted: Wanted) -> Layout:
    """Build or find all that is cached, and choose a subnet."""
    version = wanted.slurm if wanted.slurm is not None else DEFAULT_SLURM
    proctrack = wanted.proctrack if wanted.proctrack is not None else cgroup.LINUXPROC
    cgroup.require(proctrack)
    subnet = instances.choose_subnet(shop.instance.name, used_networks(shop.runner))
    # Side by side: each of them waits in turns for a mirror, for the disk and for one core. All of
    # them end before an error of one is raised: what they made stays in the cache for the next time.
    with ThreadPoolExecutor(max_workers=7) as pool:
        base = pool.submit(rootfs.image_root, shop)
        wheels = pool.submit(image.torch_wheels, shop)
        node_root = pool.submit(rootfs.node_root, shop, version, wanted.modules or "none")
        service_root = pool.submit(rootfs.service_root, shop, version)
        oci = pool.submit(lambda: image.layout(shop, base.result(), wheels.result()))
        store = pool.submit(lambda: image.store(shop, service_root.result(), oci.result()))
        host = pool.submit(lambda: hostenv.hostenv(shop, base.result(), wheels.result()))
        wheel.prepare(shop, node_root.result())
    if proctrack == cgroup.CGROUP:
        cgroup.require_plugin(node_root.result(), version)
    return Layout(
        nodes=wanted.nodes if wanted.nodes is not None else DEFAULT_NODES,
        slurm=version,
        subnet=str(subnet),
        node_root=str(node_root.result()),
        service_root=str(service_root.result()),
        store=str(store.result()),
        hostenv=str(host.result()),
        proctrack=proctrack,
        task=wanted.task or "none",
        accounting=wanted.accounting is not False,
        preempt_signal=wanted.preempt_signal is not False,
        modules=wanted.modules or "none",
    )


def _refuse_change(layout: Layout, wanted: Wanted) -> None:
    asked: dict[str, tuple[object, Callable[[object], str]]] = {
        "nodes": (wanted.nodes, lambda value: f"--nodes {value}"),
        "slurm": (wanted.slurm, lambda value: f"--slurm {value}"),
        "proctrack": (wanted.proctrack, lambda value: f"--proctrack {value}"),
        "task": (wanted.task, lambda value: f"--task {value}"),
        "modules": (wanted.modules, lambda value: f"--modules {value}"),
        "accounting": (wanted.accounting, lambda value: "--accounting" if value else "--no-accounting"),
        "preempt_signal": (wanted.preempt_signal, lambda value: "--preempt-signal" if value else "--no-preempt-signal"),
    }
    for name, (value, flag) in asked.items():
        have = getattr(layout, name)
        if value is not None and value != have:
            raise TestbedError(
                f"this testbed is up with {flag(have)}, not {flag(value)}",
                why="a running testbed is repaired, not rebuilt",
                hint=f"scripts/testbed down && scripts/testbed up {flag(value)}",
                status=Status.BUSY,
            )


def _make_directories(shop: Workshop) -> None:
    for path in (shop.instance.state, shop.instance.home, shop.instance.shared, shop.instance.etc):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755)
    for name, uid in USERS.items():
        home = shop.instance.home / name
        home.mkdir(exist_ok=True)
        os.chown(home, uid, uid)
        home.chmod(0o750)
    # A place on the shared directory where every user can write, as scratch on real clusters.
    scratch = shop.instance.shared / "scratch"
    scratch.mkdir(exist_ok=True)
    scratch.chmod(0o1777)


def ensure(shop: Workshop, layout: Layout, wanted: list[Machine]) -> None:
    """These machines run, are continued and connected, and their daemons answer."""
    instance, runner, progress = shop.instance, shop.runner, shop.progress
    network.ensure_switch(instance, runner)
    off = []
    for one in wanted:
        network.ensure_plugged(instance, runner, one.name, one.address)
        found = machine.processes(instance, one.name)
        machine.send_signal([process.pid for process in found if process.state == "T"], signal.SIGCONT)
        if not any(process.inner_pid == 1 for process in found):
            off.append(one)
    if off:
        with progress.phase(f"starting {', '.join(one.name for one in off)}"):
            for one in off:
                machine.start(instance, layout, one, runner)
            for one in off:
                machine.wait_started(instance, one)
    names = {one.name for one in wanted}
    ensure_daemons(shop, layout, [one for one in daemon.daemons(layout) if one.machine.name in names])


def ensure_daemons(shop: Workshop, layout: Layout, wanted: list[daemon.Daemon]) -> None:
    """These daemons answer; nodes among them can take jobs."""
    instance, runner, progress = shop.instance, shop.runner, shop.progress
    for kind in daemon.KINDS:
        ours = [one for one in wanted if one.kind.name == kind.name]
        if not ours:
            continue
        if kind.name == "slurmctld" and layout.accounting:
            # It asks slurmdbd for its associations at the start, so they must be there before.
            slurm.ensure_accounts(instance, runner)
        births = slurm.slurmd_births(instance, runner) if kind.name == "slurmd" else {}
        started = daemon.ensure(instance, runner, ours)
        if kind.name == "slurmd" and started:
            slurm.wait_registered(
                instance, runner, {d.machine.name: births.get(d.machine.name, "None") for d in started}
            )
        if started:
            progress.say(f"started {', '.join(one.label for one in started)}")
        if kind.name == "mariadbd":
            slurm.create_database(instance, runner)
    nodes = [one.machine for one in wanted if one.kind.name == "slurmd"]
    if any(one.kind.name == "slurmctld" for one in wanted) and not nodes:
        # A new slurmctld knows no node until it has registered; those broken on purpose never will.
        nodes = [one.machine for one in daemon.daemons(layout) if one.kind.name == "slurmd" and _registers(shop, one)]
    if nodes:
        slurm.wait_nodes(instance, runner, nodes)
        progress.say(f"{', '.join(node.name for node in nodes)}: ready for jobs")


def _registers(shop: Workshop, slurmd: daemon.Daemon) -> bool:
    if not network.is_connected(shop.instance, shop.runner, slurmd.machine.name):
        return False
    return daemon.answers(shop.instance, shop.runner, slurmd)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineReport:
    """One machine as `status` shows it."""

    name: str
    role: str
    address: str
    alive: bool
    connected: bool
    slowed: bool
    stopped: bool
    slurm: str | None
    daemons: dict[str, bool]

    @property
    def healthy(self) -> bool:
        """Whether it does all that it is for."""
        usable = self.slurm is None or slurm.is_usable(self.slurm)
        fine = self.alive and self.connected and not self.slowed and not self.stopped
        return fine and usable and all(self.daemons.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything that `status` knows; `as_json` is its stable form."""

    instance: Instance
    layout: Layout
    machines: tuple[MachineReport, ...]
    hpcenv: str | None
    flaky: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether everything is alive and nothing is broken on purpose."""
        return all(one.healthy for one in self.machines) and not self.flaky

    def as_json(self) -> str:
        """One object; `schema` grows when a key changes its meaning."""
        return json.dumps(
            {
                "schema": 1,
                "instance": self.instance.name,
                "checkout": str(self.instance.checkout),
                "state": str(self.instance.state),
                "cache": str(self.instance.cache),
                "healthy": self.healthy,
                "slurm": self.layout.slurm,
                "proctrack": self.layout.proctrack,
                "task": self.layout.task,
                "modules": self.layout.modules,
                "accounting": self.layout.accounting,
                "preempt_signal": self.layout.preempt_signal,
                "apptainer": rootfs.has_apptainer(self.layout.slurm),
                "subnet": self.layout.subnet,
                "nodes": [one.name for one in self.machines if one.role == "compute"],
                "machines": [{**asdict(one), "healthy": one.healthy} for one in self.machines],
                "registry": "http://registry:5000",
                "images": [image.REFERENCE, image.OTHER_REFERENCE],
                "hostenv": f"{hostenv.HOSTENV}/bin/python",
                "hpcenv": self.hpcenv,
                "flaky": list(self.flaky),
            },
            indent=2,
        )

    def render(self) -> str:
        """The same for people."""
        lines = [
            f"testbed {self.instance.name}: {'everything is alive' if self.healthy else 'NOT healthy'}",
            f"  slurm     {self.layout.slurm}, {_slurm_line(self.layout)}",
            "            partitions batch (default), low, low-grace and high (high preempts the low ones)",
            f"  state     {self.instance.state}",
            f"  cache     {self.instance.cache}",
            f"  registry  registry:5000 (plain http) with {image.REFERENCE} and :{image.OTHER_TAG}",
            f"  hostenv   {hostenv.HOSTENV}/bin/python",
            f"  hpcenv    {self.hpcenv or 'not installed'}",
        ]
        lines += [f"  FLAKY     {one}" for one in self.flaky]
        return "\n".join([*lines, *(_machine_line(one) for one in self.machines)])


def _slurm_line(layout: Layout) -> str:
    accounting = "slurmdbd" if layout.accounting else "NO accounting (sacct fails)"
    warning = "--signal before preemption" if layout.preempt_signal else "no --signal before preemption"
    apptainer = "Apptainer" if rootfs.has_apptainer(layout.slurm) else "NO Apptainer (host mode only)"
    return f"proctrack/{layout.proctrack}, {accounting}, {warning}, {apptainer}"


def _machine_line(one: MachineReport) -> str:
    flags = [
        text
        for text, applies in (
            ("OFF", not one.alive),
            ("CUT OFF", one.alive and not one.connected),
            ("SLOWED", one.slowed),
            ("STOPPED", one.stopped),
            (f"slurm says {one.slurm}", one.slurm is not None),
        )
        if applies
    ]
    daemons = [name if alive else f"{name} DEAD" for name, alive in one.daemons.items()]
    return f"  {one.name:9} {one.address:14} {', '.join([*flags, *daemons])}"


def look(shop: Workshop, layout: Layout) -> Report:
    """The state of everything, asked anew."""
    states = _node_states(shop, layout)
    return Report(
        instance=shop.instance,
        layout=layout,
        machines=tuple(_look_at(shop, layout, one, states) for one in machine.machines(layout)),
        hpcenv=wheel.installed_version(shop.instance),
        flaky=tuple(flaky.in_force(shop.instance)),
    )


def _node_states(shop: Workshop, layout: Layout) -> dict[str, str]:
    if machine.init_of(shop.instance, "ctl") is None:
        return {}
    controller = daemon.daemons_named(layout, "slurmctld")[0]
    if not daemon.answers(shop.instance, shop.runner, controller):
        return {}
    return slurm.node_states(shop.instance, shop.runner)


def _look_at(shop: Workshop, layout: Layout, one: Machine, states: dict[str, str]) -> MachineReport:
    found = machine.processes(shop.instance, one.name)
    alive = any(process.inner_pid == 1 for process in found)
    stopped = any(process.inner_pid == 1 and process.state == "T" for process in found)
    ours = [each for each in daemon.daemons(layout) if each.machine.name == one.name]
    probe = alive and not stopped
    return MachineReport(
        name=one.name,
        role=one.role,
        address=one.address,
        alive=alive,
        connected=network.is_connected(shop.instance, shop.runner, one.name),
        slowed=network.is_slowed(shop.instance, shop.runner, one.name),
        stopped=stopped,
        slurm=states.get(one.name, "unknown") if one.role == "compute" else None,
        daemons={each.kind.name: probe and daemon.answers(shop.instance, shop.runner, each) for each in ours},
    )
