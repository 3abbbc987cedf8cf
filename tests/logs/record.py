"""Record example logs: programs that fail in a known way, and programs that run well, on this machine.

    python tests/logs/record.py failed [ID ...]
    python tests/logs/record.py healthy [NAME ...]

It runs each program with the Python that runs it (torch for CPUs is needed), and writes its output to
`failed/ID.log` or `healthy/NAME.log`. Paths of this machine are replaced: the folder of the program by /project,
the environment by /env, the host by n1.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch

HERE = Path(__file__).parent
# The checkout; `pip list` names it where hpcenv is installed from there.
ROOT = str(HERE.parents[1])
ENV = str(Path(sys.prefix))
RUN = [sys.executable, "train.py"]
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--tee", "3", "--log-dir", "ranks",
    "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "train.py",
]  # fmt: skip
GLOO = "import datetime, os, sys, time, torch, torch.distributed as dist\n"
START = GLOO + "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=8))\nrank = dist.get_rank()\n"
NET = "import torch\nfrom torch import nn\n"

# id -> (command, script, variables)
FAILED: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "python-exception": (
        TORCHRUN,
        START
        + """
        def step(number):
            if rank == 1 and number == 3:
                raise ValueError("loss is nan")
            dist.all_reduce(torch.ones(4))
            print(f"step {number} loss {1 / (number + 1):.4f}", flush=True)
        for number in range(6):
            step(number)
        """,
        {},
    ),
    "python-module-missing": (RUN, "import torch\nimport apex_missing_module\n", {}),
    "variable-not-passed": (RUN, "import os\nimport torch\ncache = os.environ['HF_HOME']\n", {}),
    "relative-import": (RUN, "import torch\nfrom . import model\n", {}),
    "python-syntax": (RUN, "import torch\nfor step in range(3)\n    print(step)\n", {}),
    "script-arguments": (
        RUN,
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        parser.parse_args(["--lr", "0.1", "--warmup", "10"])
        """,
        {},
    ),
    "file-missing": (RUN, "open('/data/imagenet/train.bin', 'rb')\n", {}),
    "permission-denied": (
        RUN,
        """
        import os
        os.mkdir("closed", 0o500)
        open("closed/data.bin", "w").close()
        os.chmod("closed/data.bin", 0)
        os.chmod(".", 0o755)
        os.setuid(65534)
        open("closed/data.bin", "rb")
        """,
        {},
    ),
    "disk-full": (
        RUN,
        """
        import torch
        with open("/dev/full", "wb", buffering=0) as file:
            torch.save({"model": torch.zeros(100)}, file)
        """,
        {},
    ),
    "too-many-open-files": (
        RUN,
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        files = [open("train.py") for _ in range(100)]
        """,
        {},
    ),
    "host-memory-allocation": (RUN, "import torch\ntorch.empty(1 << 48)\n", {}),
    "python-memory-error": (RUN, "def load():\n    return bytearray(1 << 46)\nload()\n", {}),
    "no-internet": (
        RUN,
        "import requests\nrequests.get('https://data.example.org/model.bin', timeout=5)\n",
        {"https_proxy": "", "HTTPS_PROXY": "", "all_proxy": "", "ALL_PROXY": ""},
    ),
    "cuda-library-missing": (RUN, "import ctypes\nctypes.CDLL('libcudart.so.12')\n", {}),
    "torch-without-cuda": (RUN, "import torch\ntorch.zeros(2).cuda()\n", {}),
    "nccl-not-built": (
        RUN,
        GLOO + "dist.init_process_group('nccl', init_method='tcp://127.0.0.1:29711', rank=0, world_size=1)\n",
        {},
    ),
    "shape-mismatch": (RUN, "import torch\ntorch.nn.Linear(4, 2)(torch.ones(3, 5))\n", {}),
    "dtype-mismatch": (RUN, "import torch\ntorch.nn.Linear(4, 2)(torch.ones(3, 4, dtype=torch.float64))\n", {}),
    "embedding-index": (RUN, "import torch\ntorch.nn.Embedding(10, 4)(torch.tensor([3, 12]))\n", {}),
    "autograd-inplace": (
        RUN,
        """
        import torch
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        y += 1
        y.sum().backward()
        """,
        {},
    ),
    "autograd-twice": (
        RUN,
        """
        import torch
        x = torch.ones(3, requires_grad=True)
        loss = (x * x).sum()
        loss.backward()
        loss.backward()
        """,
        {},
    ),
    "autograd-nan": (
        RUN,
        """
        import torch
        torch.autograd.set_detect_anomaly(True)
        x = torch.zeros(3, requires_grad=True)
        (torch.sqrt(x) * 0).sum().backward()
        """,
        {},
    ),
    "ddp-unused-parameters": (
        TORCHRUN,
        START
        + textwrap.dedent("""
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            def forward(self, x):
                return self.used(x)
        net = torch.nn.parallel.DistributedDataParallel(Net())
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
        """),
        {},
    ),
    "checkpoint-keys": (
        RUN,
        NET
        + """
        torch.save(nn.Linear(4, 2).state_dict(), "model.pt")
        nn.Sequential(nn.Linear(4, 2)).load_state_dict(torch.load("model.pt"))
        """,
        {},
    ),
    "checkpoint-shapes": (
        RUN,
        NET
        + """
        torch.save(nn.Linear(4, 2).state_dict(), "model.pt")
        nn.Linear(4, 3).load_state_dict(torch.load("model.pt"))
        """,
        {},
    ),
    "checkpoint-weights-only": (
        RUN,
        NET
        + """
        class Config:
            lr = 0.1
        torch.save({"config": Config()}, "model.pt")
        torch.load("model.pt")
        """,
        {},
    ),
    "checkpoint-not-written": (RUN, "import torch\ntorch.save({'model': torch.zeros(1 << 20)}, '/dev/full')\n", {}),
    "checkpoint-truncated": (
        RUN,
        NET
        + """
        torch.save(nn.Linear(400, 200).state_dict(), "model.pt")
        open("model.pt", "r+b").truncate(1000)
        torch.load("model.pt")
        """,
        {},
    ),
    "checkpoint-newer-torch": (
        RUN,
        """
        import zipfile, torch
        with zipfile.ZipFile("model.pt", "w") as file:
            file.writestr("archive/version", "99")
            file.writestr("archive/data.pkl", b"")
        torch._C.PyTorchFileReader("model.pt")
        """,
        {},
    ),
    "dataloader-worker-killed": (
        RUN,
        """
        import os, signal, torch
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, n):
                if n == 3: os.kill(os.getpid(), signal.SIGKILL)
                return torch.ones(2)
        if __name__ == "__main__":
            for batch in torch.utils.data.DataLoader(Data(), num_workers=2): pass
        """,
        {},
    ),
    "dataloader-bus-error": (
        RUN,
        """
        import os, signal, torch
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, n):
                if n == 3: os.kill(os.getpid(), signal.SIGBUS)
                return torch.ones(2)
        if __name__ == "__main__":
            for batch in torch.utils.data.DataLoader(Data(), num_workers=2): pass
        """,
        {},
    ),
    "pickle-local": (
        RUN,
        """
        import torch
        class Data(torch.utils.data.Dataset):
            def __init__(self): self.change = lambda x: x
            def __len__(self): return 8
            def __getitem__(self, n): return torch.ones(2)
        if __name__ == "__main__":
            for batch in torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn"): pass
        """,
        {},
    ),
    "main-guard-missing": (
        RUN,
        """
        import multiprocessing
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=print)
        process.start()
        process.join()
        raise SystemExit(1)
        """,
        {},
    ),
    "rank-segfault": (
        TORCHRUN,
        START
        + """
        import ctypes
        if rank == 1:
            ctypes.string_at(0)
        dist.barrier()
        """,
        {},
    ),
    "rank-bus-error": (
        TORCHRUN,
        START
        + """
        import mmap
        if rank == 1:
            with open("data.bin", "w+b") as file:
                file.truncate(1 << 20)
                view = mmap.mmap(file.fileno(), 1 << 20)
                file.truncate(0)
                print(view[4096])
        dist.barrier()
        """,
        {},
    ),
    "rank-killed": (
        TORCHRUN,
        START
        + """
        import signal
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        """,
        {},
    ),
    "torch-address-in-use": (
        RUN,
        GLOO
        + """
        import socket
        busy = socket.socket(); busy.bind(("127.0.0.1", 0)); busy.listen()
        store = dist.TCPStore("127.0.0.1", busy.getsockname()[1], world_size=1, is_master=True)
        """,
        {},
    ),
    "torch-rendezvous-connect": (
        RUN,
        GLOO
        + """
        import socket
        free = socket.socket(); free.bind(("127.0.0.1", 0)); port = free.getsockname()[1]; free.close()
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=datetime.timedelta(seconds=2))
        """,
        {},
    ),
    "torch-name-resolution": (
        RUN,
        GLOO
        + """
        dist.init_process_group("gloo", init_method="tcp://node17.cluster.invalid:29500", rank=1, world_size=2, timeout=datetime.timedelta(seconds=2))
        """,
        {},
    ),
    "torch-clients-missing": (
        RUN,
        GLOO
        + """
        dist.TCPStore("127.0.0.1", 0, world_size=4, is_master=True, timeout=datetime.timedelta(seconds=2))
        """,
        {},
    ),
    "torch-store-timeout": (
        RUN,
        GLOO
        + """
        store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True, timeout=datetime.timedelta(seconds=2))
        store.get("checkpoint-path")
        """,
        {},
    ),
    "gloo-timeout": (
        TORCHRUN,
        START
        + """
        if rank == 1:
            time.sleep(14)
        dist.all_reduce(torch.ones(4))
        """,
        {},
    ),
    "torch-monitored-barrier": (
        TORCHRUN,
        START
        + """
        if rank == 1:
            time.sleep(12)
        else:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=3))
        """,
        {},
    ),
    "torch-collective-mismatch": (
        TORCHRUN,
        START
        + """
        if rank == 1:
            dist.all_reduce(torch.ones(8))
        else:
            dist.broadcast(torch.ones(4), 0)
        """,
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ),
    "torch-rank-variables": (RUN, GLOO + "dist.init_process_group('gloo')\n", {}),
    "torchrun-store-unreachable": (
        [*TORCHRUN[:-2], "127.0.0.1:9", "--rdzv-conf", "is_host=0,timeout=2,join_timeout=3", "train.py"],
        "print(1)\n",
        {},
    ),
    "shadowed-module": (
        RUN,
        """
        open("random.py", "w").write("import torch\\n")
        import random
        random.seed(1)
        """,
        {},
    ),
    "torch-shm-failed": (
        RUN,
        """
        import torch
        try:
            import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
            import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        finally:
            torch.zeros(1 << 20).share_memory_()
        """,
        {},
    ),
    "gpu-fork": (
        RUN,
        "import torch\ntorch.cuda._initialized = True\ntorch.cuda._in_bad_fork = True\ntorch.cuda._is_in_bad_fork = lambda: True\ntorch.cuda._initialized = False\ntorch.cuda._lazy_init()\n",
        {},
    ),
}

TRAIN = START + textwrap.dedent("""
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(40):
        loss = net(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(f"step {step} loss {loss.item():.4f} lr 1.00e-03 tokens/s {8000 + step}", flush=True)
    dist.destroy_process_group()
    """)
LOADER = """
    import logging, warnings, torch
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log = logging.getLogger("trainer")
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 64
        def __getitem__(self, n): return torch.full((4,), float(n))
    if __name__ == "__main__":
        log.info("errors 0, failed 0, retries 0 (error budget 5)")
        warnings.warn("the learning rate is high; training may fail to converge")
        for epoch in range(3):
            for batch in torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2):
                log.debug("batch mean %.3f", batch.mean())
            log.info("epoch %d: validation error 0.%d, timeout 600 s", epoch, 9 - epoch)
    """
HEALTHY: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "ddp": (TORCHRUN, TRAIN, {}),
    "ddp-cpp-log-info": (TORCHRUN, TRAIN, {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO"}),
    "ddp-torch-logs": (TORCHRUN, TRAIN, {"TORCH_LOGS": "+distributed", "LOGLEVEL": "INFO"}),
    "no-destroy": (TORCHRUN, TRAIN.replace("dist.destroy_process_group()", ""), {}),
    "loader": (RUN, LOADER, {}),
    "exception-handled": (
        RUN,
        """
        import logging, torch
        logging.basicConfig()
        for step in range(60):
            try:
                torch.load("nosuch.pt") if step == 4 else None
            except OSError:
                logging.exception("no checkpoint yet: starts anew")
            print(f"step {step} loss {1 / (step + 1):.3f}")
        print("training finished")
        """,
        {},
    ),
    "oom-retry": (
        RUN,
        """
        import torch
        size = 1 << 46
        while True:
            try:
                torch.empty(size)
                break
            except RuntimeError as error:
                size >>= 8
        for step in range(100):
            print(f"step {step} batch {size}")
        """,
        {},
    ),
    "elastic-restart": (
        [*TORCHRUN[:-1], "--max-restarts", "1", "train.py"],
        START
        + """
        print("restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        for step in range(30):
            dist.all_reduce(torch.ones(2)); print("step", step, flush=True)
        dist.destroy_process_group()
        """,
        {},
    ),
    "compile": (
        RUN,
        """
        import torch
        f = torch.compile(lambda x: (x * 2).relu(), backend="eager")
        for n in range(1, 12):
            print(n, f(torch.randn(n)).sum().item())
        """,
        {"TORCH_LOGS": "+dynamo,recompiles"},
    ),
    "checkpoints": (
        RUN,
        NET
        + """
        net = nn.Linear(8, 8)
        for step in range(5):
            torch.save({"step": step, "model": net.state_dict()}, f"step{step}.pt")
            print(torch.load(f"step{step}.pt")["step"], "saved")
        """,
        {},
    ),
    "amp": (
        RUN,
        NET
        + """
        net, scaler = nn.Linear(8, 8), torch.amp.GradScaler("cuda")
        for step in range(20):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(torch.randn(4, 8)).square().mean()
            scaler.scale(loss).backward()
            print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale()}")
        """,
        {},
    ),
    "profiler": (
        RUN,
        NET
        + """
        with torch.profiler.profile() as p:
            nn.Linear(64, 64)(torch.randn(64, 64)).sum().backward()
        print(p.key_averages().table(row_limit=20))
        """,
        {},
    ),
    "collect-env": ([sys.executable, "-m", "torch.utils.collect_env"], "", {}),
    "pip-list": ([sys.executable, "-m", "pip", "list", "--verbose", "--disable-pip-version-check"], "", {}),
    "pip-check": ([sys.executable, "-m", "pip", "check"], "", {}),
    "unittest": (
        [sys.executable, "-m", "unittest", "-v", "train.py"],
        """
        import unittest
        class Errors(unittest.TestCase):
            def test_connection_refused_is_reported(self): self.assertTrue(True)
            def test_out_of_memory_is_reported(self): self.assertTrue(True)
            @unittest.expectedFailure
            def test_fails(self): self.assertTrue(False)
        """,
        {},
    ),
    "multiprocess-spawn": (
        RUN,
        """
        import torch.multiprocessing as mp
        def work(rank): print("rank", rank, "of", 3, flush=True)
        if __name__ == "__main__":
            mp.spawn(work, nprocs=3)
        """,
        {},
    ),
    "fsdp": (
        TORCHRUN,
        START
        + textwrap.dedent("""
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        for step in range(10):
            net(torch.randn(8, 16)).sum().backward()
            print("step", step, flush=True)
        dist.destroy_process_group()
        """),
        {},
    ),
    "distributed-checkpoint": (
        TORCHRUN,
        START
        + textwrap.dedent("""
        import torch.distributed.checkpoint as dcp
        net = torch.nn.Linear(8, 8)
        dcp.save(net.state_dict(), checkpoint_id="checkpoint")
        dcp.load(net.state_dict(), checkpoint_id="checkpoint")
        print("loaded", flush=True)
        dist.destroy_process_group()
        """),
        {},
    ),
    "stopped-and-saved": (
        RUN,
        """
        import os, signal, time
        stop = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        for step in range(50):
            print("step", step, flush=True)
            if step == 20: os.kill(os.getpid(), signal.SIGTERM)
            if stop:
                print("asked to stop: state saved at step", step); break
        """,
        {},
    ),
    "text-of-a-dataset": (
        RUN,
        """
        for n in range(200):
            print(f"sample {n}: the ship was lost, the crew failed to signal; killed by the cold, no space was left in the boat.")
        """,
        {},
    ),
}


def main() -> int:
    """Record the named logs, or all."""
    kind, names = sys.argv[1], sys.argv[2:]
    cases = FAILED if kind == "failed" else HEALTHY
    for name in names or cases:
        text, status = record(*cases[name])
        good = (status == 0) == (kind == "healthy")
        print(
            f"{name:30} status {status}, {len(text)} characters" + ("" if good else "   <-- not as wanted"), flush=True
        )
        if good:
            head = f"# hpcenv example log: recorded with torch {torch.__version__} by tests/logs/record.py; exit status {status}\n"
            (HERE / kind / f"{name}.log").write_text(head + text)
    return 0


def record(argv: list[str], script: str, variables: dict[str, str]) -> tuple[str, int]:
    """Run a program in its own folder; return what it wrote, and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(_flat(script))
        os.chmod(folder, 0o755)
        environ = {**os.environ, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] ", "OMP_NUM_THREADS": "1",
                   "PYTHONUNBUFFERED": "1", **variables}  # fmt: skip
        done = subprocess.run(
            argv, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
        )
        text = done.stdout.decode("utf-8", "replace").replace(folder, "/project")
    # The environment first: it may lie in the checkout.
    text = text.replace(ENV, "/env").replace(ROOT, "/project")
    text = text.replace(socket.gethostname(), "n1").replace(os.path.dirname(os.__file__), "/usr/lib/python3")
    return re.sub(r"/tmp/[\w/.-]+", "/tmp/x", text), done.returncode


def _flat(script: str) -> str:
    """Return a script without the indentation of this file; its first lines may have none."""
    lines = script.split("\n")
    inner = [len(line) - len(line.lstrip()) for line in lines if line.startswith("    ")]
    if not inner or any(line and not line.startswith((" ", "import", "dist.", "rank", "from")) for line in lines):
        return script
    cut = min(inner)
    return "\n".join(line[cut:] if line.startswith(" " * cut) else line for line in lines)


if __name__ == "__main__":
    sys.exit(main())
