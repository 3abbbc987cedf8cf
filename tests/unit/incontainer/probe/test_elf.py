"""ELF files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from probe_world import Venv
from torch_world import install_cuda_torch


def test_files_that_are_hardly_elf_neither_crash_nor_hang(env: Venv, tmp_path: Path) -> None:
    install_cuda_torch(env, cuda=False)
    path = env.site / "torch/lib/libtorch_cpu.so"
    good = path.read_bytes()
    random = __import__("random").Random(1)
    script = tmp_path / "fuzz.py"
    script.write_text(FUZZ)
    cases = tmp_path / "cases"
    cases.mkdir()
    for number in range(400):
        data = bytearray(good[: random.choice((len(good), random.randrange(len(good))))])
        for _ in range(random.choice((0, 1, 3, 30))):
            place = random.choice((random.randrange(min(64, len(data) or 1)), random.randrange(len(data) or 1)))
            data[place : place + 1] = bytes([random.choice((0, 255, random.randrange(256)))])
        (cases / f"{number:04}").write_bytes(data)
    done = subprocess.run([sys.executable, "-B", script, cases], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "400"


FUZZ = """
import os, struct, sys
from hpcenv.incontainer.probe.elf import Elf
count = 0
for name in sorted(os.listdir(sys.argv[1])):
    descriptor = os.open(os.path.join(sys.argv[1], name), os.O_RDONLY)
    try:
        elf = Elf(descriptor)
        elf.symbol_names(descriptor)
    except (OSError, ValueError):
        pass
    os.close(descriptor)
    count += 1
print(count)
"""
