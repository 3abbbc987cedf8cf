"""Of several lines that can be the cause, the one that ended the run is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcenv.runs.diagnose.diagnose import FailureDiagnosis, diagnose_files

STEPS = "".join(f"step {n} loss {1 / (n + 1):.4f}\n" for n in range(60))
TRACEBACK = 'Traceback (most recent call last):\n  File "/p/train.py", line 7, in <module>\n    loss.backward()\n'
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
# Harmless lines of a beginning: NCCL's remarks, warnings, what was tried again, what recovered.
HARMLESS = {
    "plugin": "n1:1:1 [0] NCCL INFO NET/Plugin: Plugin load returned 2 : libnccl-net.so: cannot open shared object file:"
    " No such file or directory : when loading libnccl-net.so",
    "libibverbs": "libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': libmlx5-rdmav34.so: cannot open shared"
    " object file: No such file or directory",
    "tensorrt": "2024-01-01 10:00:00.000000: W tensorflow/stream_executor/platform/default/dso_loader.cc:64] Could not load"
    " dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared object file: No such file",
    "hub": "'(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /a\"))'"
    " thrown while requesting HEAD https://huggingface.co/a",
    "oom": f"{TRACEBACK}{OOM}\nINFO:accelerate.utils.memory:Decreasing batch size to: 16.",
    "nfs": "[  101.1] nfs: server nas1 not responding, still trying\n[  141.1] nfs: server nas1 OK",
    "chdir": "slurmstepd: error: couldn't chdir to `/scratch/a': No such file or directory: going to /tmp instead",
    "preempted": "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-08-01T10:00:00 DUE TO PREEMPTION ***",
}
REAL = {
    "gpu-out-of-memory": f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB.",
    "gpu-xid-hardware": "[ 99.5] NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.",
    "undefined-symbol": "ImportError: /env/a.so: undefined symbol: _ZN5torch3jit17parseSchemaOrNameE",
    "input-output-error": f"{TRACEBACK}OSError: [Errno 5] Input/output error: '/data/shard-7.tar'",
}


def diagnosis_of(folder: Path, text: str) -> FailureDiagnosis:
    (folder / "job.log").write_text(text)
    return diagnose_files([folder / "job.log"], ["job.log"])


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("harmless", HARMLESS)
def test_a_harmless_early_line_does_not_take_the_place_of_the_cause(tmp_path: Path, harmless: str, real: str) -> None:
    cause = diagnosis_of(tmp_path, f"{HARMLESS[harmless]}\n{STEPS}{REAL[real]}\n").cause
    assert cause is not None
    assert (cause.pattern, cause.text) == (real, REAL[real].splitlines()[-1])


@pytest.mark.parametrize("harmless", HARMLESS)
def test_a_harmless_early_line_of_a_run_that_went_well_is_no_cause(tmp_path: Path, harmless: str) -> None:
    assert diagnosis_of(tmp_path, f"{HARMLESS[harmless]}\n{STEPS}").cause is None


def test_remarks_of_every_rank_do_not_hide_the_rank_that_failed(tmp_path: Path) -> None:
    remarks = "".join(f"[{rank}] {HARMLESS['plugin']}\n" for rank in range(8))
    steps = "".join(f"[{rank}] step {n}\n" for n in range(30) for rank in range(8))
    ended = f"[5] {OOM}\nRoot Cause (first observed failure):\n[0]:\n  time      : 2026-01-01_10:00:00\n  rank      : 5 (local_rank: 5)\n"
    cause = diagnosis_of(tmp_path, remarks + steps + ended).cause
    assert cause is not None
    assert (cause.pattern, cause.rank) == ("gpu-out-of-memory", 5)


def test_the_rank_that_went_on_comes_after_the_rank_that_ended(tmp_path: Path) -> None:
    went_on = "".join(f"[1] step {n}\n" for n in range(20))
    log = f"[1] {OOM}\n{went_on}[2] RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x7 and 8x2)\n"
    diagnosis = diagnosis_of(tmp_path, f"{log}srun: error: n1: task 2: Exited with exit code 1\n")
    assert diagnosis.cause is not None
    assert (diagnosis.cause.pattern, diagnosis.cause.rank) == ("shape-mismatch", 2)
    assert ("gpu-out-of-memory", "maybe") in {(one.pattern, one.kind) for one in diagnosis.others}


@pytest.mark.parametrize("label", ["", "[1] ", "[rank1]: "])
def test_an_error_after_which_the_same_rank_went_on_is_at_most_maybe(tmp_path: Path, label: str) -> None:
    """Also in a short log, which does not say whether the run failed."""
    went_on = "".join(f"{label}step {n} loss 0.5\n" for n in range(4))
    diagnosis = diagnosis_of(tmp_path, f"{label}{OOM}\n{went_on}")
    found = [one for one in (diagnosis.cause, *diagnosis.others) if one is not None]
    assert {one.kind for one in found} <= {"maybe"}
    alone = diagnosis_of(tmp_path, f"{went_on}{label}{OOM}\n").cause
    assert alone is not None and alone.kind == "root"


def test_the_second_attempt_counts_even_if_it_fails_at_once(tmp_path: Path) -> None:
    first = f"[0] step 1\n[1] {OOM}\n{HARMLESS['preempted']}\n"
    cause = diagnosis_of(tmp_path, f"{first}[0] ModuleNotFoundError: No module named 'apex'\n").cause
    assert cause is not None and cause.pattern == "python-module-missing"


LOST = (
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "torch.distributed.DistNetworkError: Broken pipe",
    "torch.distributed.DistNetworkError: Connection reset by peer",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
)


@pytest.mark.parametrize("lost", LOST)
def test_the_rank_that_failed_is_named_not_the_rank_that_lost_it(tmp_path: Path, lost: str) -> None:
    log = "".join(f"[rank1]: {line}\n" for line in f"{TRACEBACK}{lost}".splitlines())
    alone = diagnosis_of(tmp_path, log)
    assert (alone.outcome, alone.cause) == ("consequences", None)
    log += "".join(f"[rank0]: {line}\n" for line in f"{TRACEBACK}KeyError: 17".splitlines())
    cause = diagnosis_of(tmp_path, log).cause
    assert cause is not None
    assert (cause.text, cause.rank, cause.owner) == ("KeyError: 17", 0, "unknown")


@pytest.mark.parametrize("first", [True, False])
def test_the_node_that_failed_is_named_not_that_of_the_batch_script(tmp_path: Path, first: bool) -> None:
    lines = [
        "srun: error: Node failure on n2",
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-08-01T10:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***",
    ]
    cause = diagnosis_of(tmp_path, "\n".join(lines if first else lines[::-1])).cause
    assert cause is not None
    assert (cause.pattern, cause.node) == ("slurm-node-failure", "n2")
    alone = diagnosis_of(tmp_path, lines[1]).cause
    assert alone is not None
    assert (alone.pattern, alone.node) == ("slurm-node-failure", "")


@pytest.mark.parametrize(
    "line",
    [
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "srun: error: get_addr_info: getaddrinfo() failed: Temporary failure in name resolution",
    ],
)
def test_the_name_of_a_node_is_no_internet(tmp_path: Path, line: str) -> None:
    diagnosis = diagnosis_of(tmp_path, line)
    assert diagnosis.cause is not None
    assert diagnosis.cause.pattern in ("torch-name-resolution", "slurm-name-resolution")
    assert diagnosis.cause.owner == "node"
    assert diagnosis.others == ()


# What srun and sbatch say themselves -> the pattern.
REFUSED = {
    "srun: fatal: cpus-per-task set by two different environment variables SLURM_CPUS_PER_TASK=12 != SLURM_TRES_PER_TASK=cpu:8": "slurm-options-conflict",
    "srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive.": "slurm-options-conflict",
    "srun: error: --gpus-per-node and --gres=gpu are mutually exclusive.": "slurm-options-conflict",
    "srun: fatal: SLURM_TRES_PER_TASK is mutually exclusive with --ntasks-per-gpu and SLURM_NTASKS_PER_GPU": "slurm-options-conflict",
    "srun: fatal: gpus-per-task is mutually exclusive with tres-per-task": "slurm-options-conflict",
    "sbatch: error: Batch job submission failed: Job dependency problem": "slurm-dependency",
    "srun: error: Unable to create step for job 1135: Requested nodes are busy": "slurm-step-refused",
    "srun: error: Unable to create step for job 88112: Job/step already completing or completed": "slurm-step-refused",
    "srun: fatal: Unable to initialize authentication plugin": "slurm-credential",
    "srun: error: plugin_load: libpmix.so.2: cannot open shared object file: No such file": "slurm-library-missing",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_srun_and_sbatch_refuse_is_named(tmp_path: Path, line: str) -> None:
    cause = diagnosis_of(tmp_path, f"starting\n{line}\n").cause
    assert cause is not None and cause.pattern == REFUSED[line]


# What the trial of 2026-11-24 found missing or wrong -> the pattern. The last ones are of two causes, of which the first line is one.
TRIAL = {
    TRACEBACK + "RuntimeError: CUDA error: out of memory": "gpu-out-of-memory",
    "n1:1:1 [0] include/alloc.h:99 NCCL WARN Cuda failure 'out of memory'": "gpu-out-of-memory",
    "n1:1:1 [0] NCCL WARN Failed to CUDA calloc 10485760 bytes": "gpu-out-of-memory",
    TRACEBACK + "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!": "gpu-none-visible",
    TRACEBACK + "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution": "gpu-nvlink",
    "srun: error: Task launch for StepId=12.0 failed on node n2: Communication connection failure\nsrun: error: Application launch failed: Communication connection failure": "slurm-launch-failed",
    "srun: error: Task launch for StepId=12.0 failed on node n2: Socket timed out on send/recv operation\nsrun: error: Application launch failed: Socket timed out on send/recv operation": "slurm-launch-failed",
    "srun: error: Node failure on n2": "slurm-node-failure",
    "salloc: error: Node failure on worker-1": "slurm-node-failure",
    "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)": "slurm-limit",
    "srun: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsrun: error: fetch_config: DNS SRV lookup failed\nsrun: error: _establish_config_source: failed to fetch config\nsrun: fatal: Could not establish a configuration source": "slurm-no-configuration",
    TRACEBACK + "ValueError: Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU with cuda>=11.0": "gpu-no-bfloat16",
    TRACEBACK + "RuntimeError: received 0 items of ancdata": "too-many-open-files",
    TRACEBACK + "    self.pid = os.fork()\nOSError: [Errno 12] Cannot allocate memory": "host-memory-allocation",
    TRACEBACK + "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.": "loss-scale-minimum",
    TRACEBACK + "    fcntl.flock(fd, fcntl.LOCK_EX)\nOSError: [Errno 37] No locks available": "no-locks",
    TRACEBACK + "    fcntl.flock(fd, fcntl.LOCK_EX)\nOSError: [Errno 38] Function not implemented": "no-locks",
    TRACEBACK + "BlockingIOError: [Errno 11] Unable to open file (unable to lock file, errno = 11, error message = 'Resource temporarily unavailable')": "file-locked",
    TRACEBACK + "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge": "checkpoint-truncated",
    TRACEBACK + "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer": "checkpoint-truncated",
    TRACEBACK + "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.": "compiler-missing",
    "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'": "triton-ptxas",
    TRACEBACK + "deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)": "compiler-missing",
    "FAILED: multi_tensor_adam.cuda.o\n/usr/local/cuda/bin/nvcc -c x.cu\nnvcc fatal   : Unsupported gpu architecture 'compute_120'\nninja: build stopped: subcommand failed.\n" + TRACEBACK + "RuntimeError: Error building extension 'fused_adam'": "extension-not-built",
    TRACEBACK + "RuntimeError: HIP error: invalid device function": "gpu-no-kernel-image",
    '"hipErrorNoBinaryForGpu: Unable to find code object for all current devices!"\nAborted (core dumped)': "gpu-no-kernel-image",
    "Memory access fault by GPU node-3 (Agent handle: 0x55) on address 0x7f. Reason: Page not present or supervisor privilege.": "gpu-illegal-access",
    TRACEBACK + "RuntimeError: MIOpen Error: /x/sqlite_db.cpp:225: Internal error while accessing SQLite database: locking protocol": "miopen-cache",
    "n1:1:1 [0] NCCL WARN NET/IB : Got async event : port error": "nccl-ib-link",
    "n1:1:1 [0] NCCL WARN NET/IB : Got async event : local catastrophic error": "nccl-ib-link",
    "n1:1:1 [0] NCCL WARN NET/IB : mlx5_0:1 async fatal event: local catastrophic error": "nccl-ib-link",
    "n1:1:1 [0] NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: port error(10)": "nccl-ib-link",
    "n1:1:1 [0] NCCL WARN Call to ibv_reg_dmabuf_mr failed with error Bad address": "nccl-dmabuf",
    "n1:1:1 [0] NCCL WARN socketStartConnect: Connect to 10.0.0.2<4000> failed : No route to host": "nccl-connect",
    "n1:1:1 [0] NCCL WARN Call to connect timeout : Connection refused": "nccl-connect",
    "n1:1:1 [0] NCCL WARN NET/OFI Couldn't open a fabric access domain. RC: -38, ERROR: Function not implemented": "nccl-ofi-provider",
    "WARNING:torch.distributed.elastic.agent.server.api:Received 1 death signal, shutting down workers\n" + TRACEBACK + "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 1": "torchrun-hangup",
    "Illegal instruction (core dumped)": "rank-illegal-instruction",
    "E torch.distributed.elastic.multiprocessing.api: failed (exitcode: -4) local_rank: 0 (pid: 7) of binary: /x/python": "rank-illegal-instruction",
    "Error: mkl-service + Intel(R) MKL: MKL_THREADING_LAYER=INTEL is incompatible with libgomp.so.1 library.": "mkl-threading",
    "[INFO] [launch.py:315:sigkill_handler] Killing subprocess 7\n[ERROR] [launch.py:321:sigkill_handler] ['/x/python', '-u', 'train.py'] exits with return code = -9": "rank-killed",
    "The application appears to have been direct launched using \"srun\",\nbut OMPI was not built with SLURM's PMI support and therefore cannot\nexecute.": "mpi-no-pmi",
    "FATAL:   container creation failed: while applying cgroups config: rootless cgroups require a D-Bus session: Interactive authentication required.": "apptainer-cgroups",
    "FATAL:   container creation failed: failed to resolve session directory /var/lib/apptainer/mnt/session: no such file or directory": "apptainer-session",
    "ERROR  : Failed to create mount namespace: mount namespace requires privileges, check Apptainer installation": "apptainer-userns",
    TRACEBACK + "wandb.errors.CommError: Run initialization has timed out after 90.0 sec.": "no-internet",
    TRACEBACK + "wandb.sdk.service.service.ServiceStartProcessError: The wandb service failed since the process is not available.": "wandb-service",
    '../aten/src/ATen/native/cuda/IndexKernel.cu:91: operator(): block: [0,0,0], thread: [1,0,0] Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.\n' + TRACEBACK + "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle)`": "gpu-device-assert",
    "n1:1:1 [0] find_ofi_provider:610 NCCL WARN NET/OFI Could not find any optimal provider\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-08-01T10:00:00 DUE TO TIME LIMIT ***": "nccl-ofi-provider",
    "n1:1:1 [0] NCCL WARN NET/IB : Got async event : port error\n[rank0]:[E ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.": "nccl-ib-link",
    "[rank0]:[E ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.\n" + TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.": "torch-collective-timeout",
}  # fmt: skip


@pytest.mark.parametrize("text", TRIAL)
def test_what_the_trial_missed_is_named(tmp_path: Path, text: str) -> None:
    cause = diagnosis_of(tmp_path, f"{STEPS}{text}\n").cause
    assert cause is not None and cause.pattern == TRIAL[text]


def test_a_rendezvous_that_was_refused_until_the_time_limit_is_the_cause(tmp_path: Path) -> None:
    waits = "[W1226 15:35:11.626 socket.cpp:752] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111)\n"
    limit = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-08-01T10:00:00 DUE TO TIME LIMIT ***\n"
    cause = diagnosis_of(tmp_path, waits * 5 + limit).cause
    assert cause is not None and cause.pattern == "torch-rendezvous-connect"
    # A job that trained in between reached its limit.
    cause = diagnosis_of(tmp_path, waits * 5 + STEPS + limit).cause
    assert cause is not None and cause.pattern == "slurm-time-limit"
