"""A shell script that is given to `hpcenv submit` is answered with the command that works."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import ScriptUnusable
from hpcenv.submission import shell_script

BATCH = """#!/bin/bash
#SBATCH --nodes=2
module load cuda
# python old.py
srun torchrun --nproc_per_node=8 \\
    src/train.py --lr 3e-4 --out $SCRATCH/out
"""


def answer(script: str, text: str) -> str:
    with pytest.raises(ScriptUnusable) as caught:
        shell_script.refuse(script, text.encode())
    return str(caught.value)


def test_the_hint_is_the_command_for_the_python_script_that_it_starts() -> None:
    text = answer("job.sh", BATCH)
    assert "`job.sh` is a bash script" in text
    assert "hpcenv submit src/train.py --nodes 2 --gpus G -- --lr 3e-4 --out ARG" in text


@pytest.mark.parametrize("head", ["#!/bin/sh", "#! /usr/bin/env bash", "#!/usr/bin/env -S zsh -e", "echo no line"])
def test_every_kind_of_shell_script_is_recognised(head: str) -> None:
    text = answer("job.sh", f"{head}\nexit 0\n")
    assert "hpcenv submit SCRIPT --nodes N --gpus G -- ARGS" in text


def test_a_program_is_recognised() -> None:
    assert "`a.out` is a program" in answer("a.out", "\x7fELF\x02")


@pytest.mark.parametrize("text", ["#!/usr/bin/env python3\n", "import os\n", "", "#!/opt/bashful/python\n"])
def test_a_python_script_passes(text: str) -> None:
    shell_script.refuse("train.py", text.encode())


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("python -m package.train --lr 1", "hpcenv submit -m package.train --nodes N --gpus G -- --lr 1"),
        ("srun torchrun --nnodes 2 -m package.train x", "hpcenv submit -m package.train --nodes N --gpus G -- x"),
        (
            "python -m torch.distributed.run --nproc_per_node=8 src/train.py --lr 1",
            "hpcenv submit src/train.py --nodes N --gpus G -- --lr 1",
        ),
        (
            "python3 -m torch.distributed.launch --module package.train",
            "hpcenv submit -m package.train --nodes N --gpus G",
        ),
        (
            'srun bash -c "cd /x && python pretrain.py --lr 1"',
            "hpcenv submit pretrain.py --nodes N --gpus G -- --lr 1",
        ),
        ('CMD="finetune.py --lr 1"\npython $CMD', "hpcenv submit SCRIPT --nodes N --gpus G -- ARGS"),
        ("python -m accelerate.commands.launch train.py", "hpcenv submit train.py --nodes N --gpus G"),
    ],
)
def test_a_module_that_it_starts_is_a_module_in_the_hint(line: str, command: str) -> None:
    assert command in answer("job.sh", f"#!/bin/bash\n{line}\n")


@pytest.mark.parametrize(
    "lines",
    [
        "# python3 old.py \\\nsrun python3 src/train.py \\\n    --multirun \\\n    seed=0 \\\n",
        "srun python3 src/train.py --multirun seed=0 \\",
        "srun python3 src/train.py \\\r\n    --multirun seed=0\r\n",
        "srun python3 src/train.py --multirun seed=0 \\\n# --lr 1 \\\n",
    ],
)
def test_backslashes_at_ends_of_lines_are_read_as_bash_reads_them(lines: str) -> None:
    assert "hpcenv submit src/train.py --nodes N --gpus G -- --multirun seed=0`" in answer(
        "job.sh", f"#!/bin/bash\n{lines}"
    )


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("torchrun t.py --gpus 0 --nproc 2", "hpcenv submit t.py --gpus 0 --nproc 2"),
        ("--nproc 2 python t.py -- --lr 1", "hpcenv submit --nproc 2 t.py -- --lr 1"),
        ("--nproc 2 -- python t.py --lr 1", "hpcenv submit --nproc 2 -- t.py --lr 1"),
        ("srun python3 t.py --nproc 2", "hpcenv submit t.py --nproc 2"),
        ("accelerate launch t.py --nproc 2", "hpcenv submit t.py --nproc 2"),
        ("python3 -m t --nproc 2", "hpcenv submit -m t --nproc 2"),
        ("'python t.py' --nproc 2", "hpcenv submit t.py --nodes N --gpus G"),
        ("python --nproc 2", "hpcenv submit SCRIPT --nodes N --gpus G"),
    ],
)
def test_a_word_that_starts_scripts_is_left_out(hpcenv: Any, project: Path, typed: str, hint: str) -> None:
    """`hpcenv submit torchrun train.py` looked for a script `torchrun`, and said no more."""
    (project / "t.py").write_text("")
    done = hpcenv("submit", *shlex.split(typed), cwd=project)
    assert done.status == 13
    assert done.stderr.splitlines()[-1] == f"hint: {hint}"
    (project / "python").write_text("print(1)\n")
    done = hpcenv("submit", "python", "--nproc", "1", "--cluster", "local", "--dry-run", cwd=project)
    assert done.status == 0, done.stderr
