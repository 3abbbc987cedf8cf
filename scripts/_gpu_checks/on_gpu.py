"""What one GPU computes: start, matmul, AMP, NCCL. Prints one JSON object. Needs torch.

Runs with the machine's own Python: `on_gpu.py PART`. The results are compared with values that are known without the
GPU: whole numbers that each format holds exactly.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

import torch


def start() -> list[str]:
    """Return what torch says about the GPU after the first kernel."""
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU")
    properties = torch.cuda.get_device_properties(0)
    ones = torch.ones(1 << 20, device="cuda") + 1
    total = int(ones.sum().item())
    if total != 2 << 20:
        raise SystemExit(f"the first kernel is wrong: {total}, not {2 << 20}")
    capability = f"{properties.major}.{properties.minor}"
    memory = properties.total_memory / 1e9
    return [
        f"{properties.name}, compute capability {capability}, {memory:.0f} GB",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, kernels for {' '.join(torch.cuda.get_arch_list())}",
    ]


def matmul() -> list[str]:
    """Return which formats multiply right, and how fast."""
    size = 4096
    row, column = torch.arange(size).reshape(-1, 1), torch.arange(size).reshape(1, -1)
    left, right = (row * 7 + column * 3) % 5 - 2, (row * 2 + column * 5) % 5 - 2
    # 4 * 4096 at most: exact in float32, whatever the order of the sums.
    checked = slice(0, 128)
    known = (left[checked].double() @ right.double()).float()
    seen = []
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = left.to("cuda", dtype), right.to("cuda", dtype)
        product = a @ b
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            product = a @ b
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / 10
        if not torch.equal(product[checked].cpu(), known.to(dtype)):
            raise SystemExit(f"{dtype}: the product is wrong")
        seen.append(f"{str(dtype).removeprefix('torch.')}: right, {2 * size**3 / seconds / 1e12:.1f} TFLOP/s")
    return [", ".join(seen)]


def amp() -> list[str]:
    """Return the losses of a few steps with automatic mixed precision."""
    seen = []
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        data = torch.randn(128, 64, device="cuda")
        losses = []
        for _ in range(30):
            with torch.autocast("cuda", dtype=dtype):
                loss = (net(data) - data).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        if not losses[-1] < losses[0] / 2:
            raise SystemExit(f"{dtype}: the loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}")
        seen.append(f"{str(dtype).removeprefix('torch.')}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return [", ".join(seen)]


def nccl() -> list[str]:
    """Return the version of NCCL after a process group of one rank and one all_reduce."""
    import torch.distributed as dist

    torch.cuda.set_device(0)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        value = torch.full((1024,), 3.0, device="cuda")
        dist.all_reduce(value)
        right = bool((value == 3.0).all().item())
        dist.destroy_process_group()
    if not right:
        raise SystemExit("all_reduce of one rank changed its values")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return [f"NCCL {version}, one rank, {time.perf_counter() - begin:.1f} s"]


if __name__ == "__main__":
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    parts = {"start": start, "matmul": matmul, "amp": amp, "nccl": nccl}
    print(json.dumps({"seen": parts[sys.argv[1]]()}))
