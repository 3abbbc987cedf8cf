"""What the agent of one node, or of one Slurm task, starts: torchrun, ranks without torchrun, or the user's program.

Runs on: COMPUTE NODE. Standard library only. Pure.

`torchrun`: one agent on each node starts torchrun, which starts the ranks. `srun`: one agent in each Slurm task starts
one rank. `none`: one agent on each node starts the program once, and the program starts the ranks. `ray`: one agent on
each node starts Ray, and the agent of the first node also starts the script. `tasks`: one agent on each node starts
plain processes, for functions (api/executor.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcenv.launch.expand import expand
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import NodeSettings

# The file in the run's copy of the code that starts a console script.
_ENTRY = Path("hpcenv", "incontainer", "entry.py")
# The program that keeps the job of a session running until the session ends.
_HOLD = Path("hpcenv", "incontainer", "hold.py")

# The additional variables of a Slurm task. From these variables, Lightning, accelerate and MPI find out that each
# process is a task of srun (srun(1), OUTPUT ENVIRONMENT VARIABLES; Slurm 22.05 to 26.05).
_OF_SLURM_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NNODES", "SLURM_CPUS_PER_TASK", "SLURM_MPI_TYPE",
)  # fmt: skip
_OF_PMI = ("PMI_", "PMI2_", "PMIX_")


def starts_one_rank(manifest: Manifest) -> bool:
    """Return whether each task of the launch step starts one rank instead of all ranks of a node."""
    return manifest.launch.launcher == "srun"


def launcher_words(
    manifest: Manifest,
    settings: NodeSettings,
    *,
    nodes: int,
    ranks: Path | None = None,
    local_rank: int | None = None,
    memory: int = 0,
    ray_folder: str = "",
) -> list[str]:
    """Return what the agent starts, as words of its command line.

    Args:
        manifest: manifest of the run.
        settings: settings of this node.
        nodes: number of nodes that train.
        ranks: folder for the output of the ranks; None for the folder of the training.
        local_rank: the only rank that the agent starts; None for all ranks of the node.
        memory: memory of the job on this node, in MiB; 0 if the value is unknown.
        ray_folder: folder for the files of Ray on this node.
    """
    log_dir = str((ranks or RunFolder(Path(manifest.run_folder)).ranks) / settings.node)
    launcher = manifest.launch.launcher
    if launcher == "torchrun":
        return ["--", *torchrun_argv(manifest, settings, nodes=nodes, log_dir=log_dir)]
    if launcher == "ray":
        words = ["--tasks", *ray_options(manifest, settings, nodes=nodes), f"--memory={memory}"]
        words += [f"--folder={ray_folder}", f"--log-dir={log_dir}"]
        return [*words, "--", *python_words(manifest), *arguments(manifest, settings, nodes=nodes, log_dir=log_dir)]
    words = ["--tasks", f"--nodes={nodes}", f"--node-rank={settings.node_rank}"]
    words += [f"--tasks-per-node={manifest.nproc_per_node}", f"--log-dir={log_dir}"]
    if launcher == "srun":
        words += [f"--only={local_rank or 0}", "--prefix=[{rank}] "]
        words += _set(rendezvous_variables(settings))
    elif launcher == "none":
        words += ["--program", *_set(program_variables(manifest, settings, nodes=nodes, log_dir=log_dir))]
    return [*words, "--", *python_words(manifest), *arguments(manifest, settings, nodes=nodes, log_dir=log_dir)]


def ray_options(manifest: Manifest, settings: NodeSettings, *, nodes: int) -> list[str]:
    """Return the options of incontainer/ray_node.py for one node."""
    return [
        "--ray",
        "--tasks-per-node=1",
        f"--nodes={nodes}",
        f"--node-rank={settings.node_rank}",
        f"--node={settings.node}",
        f"--address={_endpoint(settings)}",
        f"--local-address={settings.local_address}",
        f"--gpus={manifest.gpus_per_node}",
        f"--meet={RunFolder(Path(manifest.run_folder)).ray_of(settings.rendezvous.id)}",
    ]


def _set(variables: Mapping[str, str]) -> list[str]:
    return [f"--set={name}={value}" for name, value in variables.items()]


def rendezvous_variables(settings: NodeSettings) -> dict[str, str]:
    """Return the variables that ranks need to find each other: torch.distributed's `env://` (torch 1.10 to 2.13)."""
    return {"MASTER_ADDR": settings.rendezvous.host, "MASTER_PORT": str(settings.rendezvous.port)}


def program_variables(manifest: Manifest, settings: NodeSettings, *, nodes: int, log_dir: str) -> dict[str, str]:
    """Return the variables of a program that starts the ranks of its node itself.

    If an option is not given, torchrun takes its value from the variable PET_OPTION
    (torch/distributed/argparse_util.py, 1.10 to 2.13). So a program that starts torchrun finds the other nodes without
    arguments. Kubeflow Trainer sets the same variables (pkg/runtime/framework/plugins/torch, v2.0).
    """
    numbers = {"NNODES": nodes, "NODE_RANK": settings.node_rank, "NPROC_PER_NODE": manifest.nproc_per_node}
    where = {**rendezvous_variables(settings), **{name: str(number) for name, number in numbers.items()}}
    # The output of every rank goes to the log and to a file, as with `--launcher torchrun`.
    logs = {"PET_TEE": "3", "PET_LOG_DIR": log_dir}
    return {**where, **{f"PET_{name}": value for name, value in where.items()}, **logs}


def task_variables(manifest: Manifest, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of srun for a task that is one rank; empty with another launcher."""
    if not starts_one_rank(manifest):
        return {}
    return {name: value for name, value in environ.items() if name in _OF_SLURM_TASK or name.startswith(_OF_PMI)}


def python_words(manifest: Manifest) -> list[str]:
    """Return Python's arguments for a rank: a script, a module, a console script, or the program of a session."""
    if manifest.session is not None:
        run = RunFolder(Path(manifest.run_folder))
        return [str(run.code / _HOLD), str(run.session_end)]
    if manifest.entry:
        return [str(RunFolder(Path(manifest.run_folder)).code / _ENTRY), manifest.entry]
    return ["-m", manifest.module] if manifest.module else [manifest.script]


def arguments(manifest: Manifest, settings: NodeSettings, *, nodes: int, log_dir: str) -> tuple[str, ...]:
    """Return the program's arguments on one node. With `--expand`, values replace the names in braces."""
    if not manifest.launch.expand:
        return manifest.args
    run = RunFolder(Path(manifest.run_folder))
    values = {
        "master_addr": settings.rendezvous.host,
        "master_port": settings.rendezvous.port,
        "nnodes": nodes,
        "node_rank": settings.node_rank,
        "nproc_per_node": manifest.nproc_per_node,
        "world_size": nodes * manifest.nproc_per_node,
        "node": settings.node,
        # The id of the rendezvous is JOB.ATTEMPT.
        "job_id": settings.rendezvous.id.rpartition(".")[0],
        "run": manifest.run,
        "run_folder": manifest.run_folder,
        "checkpoints": run.checkpoints,
        "log_dir": log_dir,
    }
    return expand(manifest.args, values)


def torchrun_argv(manifest: Manifest, settings: NodeSettings, *, nodes: int, log_dir: str) -> list[str]:
    """Return the arguments of torchrun on one node.

    `is_host` and `--local-addr` are given, because torch would compare host names to find these values. This comparison
    fails with several network cards (pytorch#73656). torch 1.10 to 2.15 accepts the option names with underscores,
    except `--local_addr` (see incontainer/agent.py). The output of each rank goes to a separate file and, with the rank
    as prefix, to the log. The user's options come first, because argparse uses the last value of a repeated option.
    """
    first, *rest = python_words(manifest)
    return [
        *manifest.launch.torchrun_args,
        f"--nnodes={nodes}",
        f"--nproc_per_node={manifest.nproc_per_node}",
        *_rendezvous_options(settings),
        f"--log_dir={log_dir}",
        "--tee=3",
        *(["--module"] if first == "-m" else []),
        # argparse removes only this first `--`. So a `--` among the script's arguments reaches the script.
        "--",
        *(rest if first == "-m" else [first, *rest]),
        *arguments(manifest, settings, nodes=nodes, log_dir=log_dir),
    ]


def _rendezvous_options(settings: NodeSettings) -> list[str]:
    """Return the rendezvous options of torchrun."""
    return [
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={_endpoint(settings)}",
        f"--rdzv_id={settings.rendezvous.id}",
        f"--rdzv_conf=is_host={int(settings.node_rank == 0)}",
        f"--local_addr={settings.local_address}",
    ]


def _endpoint(settings: NodeSettings) -> str:
    rendezvous = settings.rendezvous
    host = f"[{rendezvous.host}]" if ":" in rendezvous.host else rendezvous.host
    return f"{host}:{rendezvous.port}"
