"""Kinds of slow work of healthy ranks, for tests that no slow work is called a hang.

The script makes no optimizer step for about `LENGTH` seconds in each kind that its arguments name. In most kinds, a rank
stays on one line. The lines before the script make `dist`, `torch`, `rank`, `parameter`, `optimizer` and `step`.
"""

SLOW = """\
import hashlib, multiprocessing, os, subprocess, sys, tempfile, time
from hpcenv import training
LENGTH = float(os.environ.get("LENGTH", "20"))
part, last = LENGTH / 20, dist.get_world_size() - 1
here = os.environ["HPCENV_RUN_FOLDER"]
def seconds(length=LENGTH):
    until = time.time() + length
    while time.time() < until:
        yield time.time()
def computes(length=LENGTH):
    for now in seconds(length):
        sum(range(50000))
        sum(range(60000))
def one_call():
    # Calls of C on one line that do not hold Python's lock.
    all(hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2000000) for now in seconds())
def child(program):
    subprocess.run([sys.executable, "-I", "-c", program], check=True)
def pause(length):
    time.sleep(length)
    return True
BUSY = f"import time; end = time.time() + {LENGTH}\\nwhile time.time() < end: pass"
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 13
    def __getitem__(self, index):
        if case == "workers-compute":
            computes(1.5 * part)
        elif case == "workers-read":
            with open(f"{tempfile.gettempdir()}/read-{os.getppid()}", "rb") as file:
                file.read()
            time.sleep(1.5 * part)
        else:
            time.sleep(2 * part)
        return torch.ones(2)
def batches(count, workers=0):
    for number, batch in enumerate(torch.utils.data.DataLoader(Data(), num_workers=workers)):
        if number == count:
            break
def evaluates(model=torch.nn.Linear(2, 2)):
    with torch.no_grad():
        for now in seconds():
            for _ in range(200):
                out = model(torch.ones(64, 2))
                loss = out.pow(2).sum()
                loss = loss + out.abs().mean()
def saves():
    with training.saving(10 + rank) as file:
        time.sleep(LENGTH)
        torch.save(parameter, file)
def closure():
    computes(2 * part)
    optimizer.zero_grad()
    loss = (parameter ** 4).sum()
    loss.backward()
    return loss
for case in sys.argv[1:]:
    if not case.startswith("before"):
        step()
    if rank == 0:
        print(f"kind {case} {time.time():.0f}", flush=True)
    if case == "evaluates":
        evaluates()
    elif case == "rank-0-evaluates":
        if rank == 0:
            evaluates()
        dist.barrier()
    elif case == "one-call":
        if rank == last:
            one_call()
    elif case == "one-call-in-all":
        one_call()
    elif case == "saves":
        saves()
    elif case == "rank-0-saves":
        if rank == 0:
            saves()
        dist.barrier()
    elif case == "writes":
        if rank == 0:
            with open(f"{here}/written", "wb", buffering=0) as file:
                all(file.write(bytes(1000000)) and pause(0.2) for now in seconds())
        dist.barrier()
    elif case == "reads":
        if rank == last:
            with open("/dev/zero", "rb", buffering=0) as file:
                all(file.read(1000000) and pause(0.2) for now in seconds())
    elif case == "workers-compute":
        batches(13, workers=1)
    elif case == "workers-read":
        with open(f"{tempfile.gettempdir()}/read-{os.getpid()}", "wb") as file:
            file.write(bytes(4000000))
        batches(13, workers=1)
        os.remove(file.name)
    elif case == "slow-batches":
        for _ in range(4):
            batches(2)
            step()
    elif case == "accumulates":
        for _ in range(20):
            computes(part)
            (parameter ** 2).sum().backward()
    elif case == "before-compiles":
        child(BUSY)
    elif case == "before-sleeps":
        time.sleep(LENGTH)
    elif case == "compiles":
        child(BUSY)
    elif case == "pool":
        if rank == 0:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                pool.apply(exec, (BUSY,))
        dist.barrier()
    elif case == "gathers":
        all(dist.all_reduce(torch.ones(2)) is None and pause(0.2 * part) for _ in range(100))
    elif case == "polls":
        if rank == 0:
            child(BUSY)
            open(f"{here}/ready", "w").close()
        while not os.path.exists(f"{here}/ready"):
            time.sleep(0.5)
    elif case == "ends-early":
        if rank != last:
            for _ in range(7):
                computes(3 * part)
                optimizer.step()
        dist.barrier()
    elif case == "closure":
        torch.optim.LBFGS([parameter], lr=0.01, max_iter=10, tolerance_change=0, tolerance_grad=0).step(closure)
    elif case == "suspended":
        for _ in range(4):
            if rank == last:
                program = f"import os, time; os.kill({os.getpid()}, 19); time.sleep({6 * part}); os.kill({os.getpid()}, 18)"
                subprocess.run([sys.executable, "-I", "-c", program])
            step()
    else:
        raise SystemExit(f"unknown: {case}")
    step()
os._exit(0)
"""
# They save, end or step before a rank is looked at.
QUICK = {"saves", "slow-batches", "before-compiles", "before-sleeps", "suspended"}
