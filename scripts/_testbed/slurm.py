"""Slurm's configuration, rendered as text, and the accounts in its database."""

from __future__ import annotations

import os
import re
import secrets
import time

from . import cgroup, machine
from .errors import TestbedError
from .instance import Instance, Layout
from .machine import GPUS, Machine
from .process import Runner
from .rootfs import USERS

CLUSTER = "testbed"
ACCOUNT = "research"
_SLURM_UID = 64030  # fixed in Debian's packages, so the same on every root
_CPUS = 16

_SLURM_CONF = """\
ClusterName={cluster}
SlurmctldHost=ctl
SlurmUser=slurm
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it can start again (Slurm's default: 120 s).
AuthInfo=cred_expire=20
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
# linuxproc: Slurm follows processes by their parents. cgroup: by their group (freezer).
ProctrackType=proctrack/{proctrack}
# Apart from ports of the kernel (from 32768) and of hpcenv (from 20000): tests cut the ranks off and not srun.
SrunPortRange=15000-17999
TaskPlugin={task}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5
{accounting}
MpiDefault=none
JobRequeue=1
ReturnToService=2
# Two real cores play all nodes: answers can be late without anything being broken.
MessageTimeout=30
BatchStartTimeout=60
SlurmctldTimeout=120
SlurmdTimeout=40
KillWait=30
# A job starts about one second after sbatch.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=5
SelectType=select/cons_tres
{select}
GresTypes=gpu,nvme
SlurmdParameters=config_overrides
# A job of `low` gets its --signal, then GraceTime, then is requeued when `high` needs its nodes.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{preempt_parameters}
# What a partition can never run is refused at sbatch.
EnforcePartLimits=ALL
SlurmctldDebug=info
SlurmdDebug=info
NodeName={nodes} CPUs={cpus} RealMemory=8000 Gres=gpu:{gpus},nvme:100 State=UNKNOWN
PartitionName=DEFAULT DefaultTime=01:00:00 MaxTime=1-00:00:00 PriorityTier=1 PreemptMode=OFF
PartitionName=batch Nodes={nodes} Default=YES
PartitionName=low Nodes={nodes} PreemptMode=REQUEUE GraceTime=10
PartitionName=low-grace Nodes={nodes} PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes={nodes} PriorityTier=10
"""
_WITH_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctl
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
AccountingStorageEnforce=associations,limits"""
# The same as saying nothing; what a site without slurmdbd writes.
_WITHOUT_ACCOUNTING = "AccountingStorageType=accounting_storage/none"
# Slurm 24.11 gives a step no control group of the memory controller where memory is not what it hands out.
_WITH_MEMORY = """\
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=2000"""
_WITHOUT_MEMORY = "SelectTypeParameters=CR_Core"
_DBD_CONF = """\
AuthType=auth/munge
DbdHost=ctl
SlurmUser=slurm
PidFile=/run/slurm/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageUser=slurm
StorageLoc=slurm_acct_db
# No StorageHost and no StoragePass: MariaDB's unix_socket login knows user slurm by its uid.
"""
# nvme: the disks of nodes, which some sites share out by gigabytes.
_GRES_CONF = """\
NodeName={nodes} Name=gpu File=/dev/fakegpu[0-{last}]
NodeName={nodes} Name=nvme Count=100
"""
_REGISTRY_CONF = """\
version: 0.1
log: {level: info}
storage: {filesystem: {rootdirectory: /var/lib/registry}, delete: {enabled: true}}
http: {addr: ":5000"}
"""


def files(layout: Layout) -> dict[str, str]:
    """Every configuration file that all machines share, by its name below the instance's etc."""
    nodes = "n1" if layout.nodes == 1 else f"n[1-{layout.nodes}]"
    hosts = [f"{one.address} {one.name}" for one in machine.machines(layout)]
    slurm_conf = _SLURM_CONF.format(
        cluster=CLUSTER,
        nodes=nodes,
        cpus=_CPUS,
        gpus=GPUS,
        proctrack=layout.proctrack,
        task=_task_plugins(layout),
        select=_WITH_MEMORY if cgroup.limits_memory(layout) else _WITHOUT_MEMORY,
        accounting=_WITH_ACCOUNTING if layout.accounting else _WITHOUT_ACCOUNTING,
        preempt_parameters=_preempt_parameters(layout),
    )
    return {
        "slurm/slurm.conf": slurm_conf,
        "slurm/gres.conf": _GRES_CONF.format(nodes=nodes, last=GPUS - 1),
        "slurm/cgroup.conf": cgroup.conf(layout),
        "slurm/slurmdbd.conf": _DBD_CONF,
        "registry.yml": _REGISTRY_CONF,
        "hosts": "\n".join(["127.0.0.1 localhost", *hosts]) + "\n",
    }


def _task_plugins(layout: Layout) -> str:
    """Return TaskPlugin: several are listed, task/affinity first (slurm.conf(5))."""
    plugins = ["task/affinity"] if layout.task == "affinity" else []
    plugins += ["task/cgroup"] if cgroup.limits_memory(layout) else []
    return ",".join(plugins) or "task/none"


def _preempt_parameters(layout: Layout) -> str:
    """The switch for the warning before preemption; 22.05 refuses to read a file with PreemptParameters."""
    if not layout.preempt_signal:
        return "# TERM only: no send_user_signal"
    if layout.slurm == "22.05":
        return "SlurmctldParameters=preempt_send_user_signal"
    return "PreemptParameters=send_user_signal"


def write_files(instance: Instance, layout: Layout) -> None:
    """Put the configuration where machines bind it from."""
    for name, text in files(layout).items():
        path = instance.etc / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    database = instance.etc / "slurm/slurmdbd.conf"
    # slurmdbd refuses to start if others can read it.
    database.chmod(0o600)
    os.chown(database, _SLURM_UID, _SLURM_UID)
    key = instance.etc / "munge.key"
    if not key.exists():
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)


def create_database(instance: Instance, runner: Runner) -> None:
    """Slurm's database and its user, known by uid."""
    statements = (
        "CREATE DATABASE IF NOT EXISTS slurm_acct_db; "
        "CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED VIA unix_socket; "
        "GRANT ALL ON slurm_acct_db.* TO slurm@localhost;"
    )
    machine.run_inside(instance, runner, "ctl", ["mariadb", "--execute", statements])


def ensure_accounts(instance: Instance, runner: Runner) -> None:
    """The cluster, one account, and the users in it."""
    known = machine.run_inside(
        instance, runner, "ctl", ["sacctmgr", "--noheader", "--parsable2", "show", "associations", "format=user"]
    ).stdout.split()
    if set(USERS) <= set(known):
        return
    # Adding what is there already ends with status 1 and "Nothing new added".
    for words in (
        ["add", "cluster", CLUSTER],
        ["add", "account", ACCOUNT, "description=research", "organization=hpcenv"],
        ["add", "user", *USERS, f"account={ACCOUNT}"],
    ):
        done = machine.run_inside(instance, runner, "ctl", ["sacctmgr", "--immediate", *words], check=False)
        if done.status != 0 and "Nothing new added" not in done.stdout + done.stderr:
            raise TestbedError(f"sacctmgr {' '.join(words)} failed", why=f"{done.stdout}{done.stderr}".strip())


def node_states(instance: Instance, runner: Runner) -> dict[str, str]:
    """What slurmctld says of each node; empty if it does not answer."""
    argv = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
    done = machine.run_inside(instance, runner, "ctl", argv, timeout=40, check=False)
    if done.status != 0:
        return {}
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line.strip())


def slurmd_births(instance: Instance, runner: Runner) -> dict[str, str]:
    """When each node's slurmd started, as slurmctld heard it at the last registration."""
    argv = ["scontrol", "--oneliner", "show", "nodes"]
    done = machine.run_inside(instance, runner, "ctl", argv, timeout=40, check=False)
    return dict(re.findall(r"^NodeName=(\S+) .*\bSlurmdStartTime=(\S+)", done.stdout, re.M))


def wait_registered(instance: Instance, runner: Runner, before: dict[str, str], timeout: float = 60) -> None:
    """Until slurmctld has heard of new slurmds: it calls a dead node idle for a while, and jobs sent there fail."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        now = slurmd_births(instance, runner)
        if all(now.get(name, birth) not in (birth, "None") for name, birth in before.items()):
            return
        time.sleep(0.1)
    raise TestbedError(
        f"slurmctld has not heard from {', '.join(before)} within {timeout:.0f} s",
        hint="scripts/testbed exec --node ctl --user root -- tail /var/log/slurmctld.log",
    )


def wait_nodes(instance: Instance, runner: Runner, nodes: list[Machine], timeout: float = 90) -> None:
    """Until each of these can take jobs (and forget the DOWN of an earlier crash)."""
    deadline = time.monotonic() + timeout
    names = {node.name for node in nodes}
    resumed = False
    while True:
        states = {name: state for name, state in node_states(instance, runner).items() if name in names}
        if set(states) == names and all(is_usable(state) for state in states.values()):
            return
        if time.monotonic() > deadline:
            raise TestbedError(
                f"nodes are not usable after {timeout:.0f} s",
                why=", ".join(f"{name}: {state}" for name, state in sorted(states.items())) or "slurmctld is silent",
                hint="scripts/testbed exec --node n1 --user root -- tail /var/log/slurmd.log",
            )
        down = [name for name, state in states.items() if state.startswith(("down", "drain"))]
        if down and not resumed and time.monotonic() > deadline - timeout + 3:
            # ReturnToService brings a node back at its next ping; this does it now.
            argv = ["scontrol", "update", f"nodename={','.join(down)}", "state=resume"]
            machine.run_inside(instance, runner, "ctl", argv, check=False)
            resumed = True
        time.sleep(0.2)


def is_usable(state: str) -> bool:
    """Whether a state of sinfo's %T means that the node answers and takes jobs."""
    # A `*` behind the state: the node does not answer.
    return state in ("idle", "mixed", "allocated", "completing")
