"""The spellings of sbatch, srun and torchrun end with status 2 and print the command that works."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("typed", "what", "hint"),
    [
        ("submit t.py -N 2 -- -N 3", "`-N`; hpcenv calls it `--nodes`", "hpcenv submit t.py --nodes 2 -- -N 3"),
        ("submit t.py -N2", "`-N`; hpcenv calls it `--nodes`", "hpcenv submit t.py --nodes=2"),
        ("submit t.py -p gpu", "`-p`; hpcenv calls it `--partition`", "hpcenv submit t.py --partition gpu"),
        ("rerun one -t 5", "`-t`; hpcenv calls it `--time`", "hpcenv rerun one --time 5"),
        ("submit t.py --cpus-per-task=4", "`--cpus-per-task`; hpcenv calls it `--cpus`", "hpcenv submit t.py --cpus=4"),
        ("submit t.py --gpus-per-node 4", "`--gpus-per-node`; hpcenv calls it `--gpus`", "hpcenv submit t.py --gpus 4"),
        ("submit t.py --nproc_per_node=2", "`--nproc_per_node`; hpcenv calls it `--nproc`", "hpcenv submit t.py --nproc=2"),
        ("submit t.py --nnodes 2", "`--nnodes`; hpcenv calls it `--nodes`", "hpcenv submit t.py --nodes 2"),
        ("submit t.py --gpus-per-task=4 -- x", "`--gpus-per-task`", "hpcenv submit t.py --gpus 4 -- x"),
        ("submit t.py --signal B:USR1@300", "`--signal`", "hpcenv submit t.py --grace 300 --stop-signal USR1"),
        ("submit t.py --ntasks-per-node=4", "`--ntasks-per-node`", "hpcenv submit t.py --nproc 4"),
        ("submit t.py --tasks-per-node=4", "`--tasks-per-node`", "hpcenv submit t.py --nproc 4"),
        ("submit t.py --gres gpu:4", "`--gres`", "hpcenv submit t.py --gpus 4"),
        ("submit t.py --gres=nvme:100", "`--gres`", "hpcenv submit t.py --sbatch gres=nvme:100"),
        ("submit t.py -n 4", "`-n`", "hpcenv submit t.py --nproc 4"),
        ("submit t.py -n4 --mem 1G", "`-n`", "hpcenv submit t.py --nproc 4 --mem 1G"),
        ("submit t.py -M c", "`-M`", "leave this one out"),
        ("submit t.py -L a", "`-L`", "hpcenv submit t.py --sbatch licenses=a"),
        ("submit t.py --output=x", "`--output`", "leave this one out"),
        ("submit t.py --mail-type END", "`--mail-type`", "hpcenv submit t.py --sbatch mail-type=END"),
        ("submit --exclusive t.py", "`--exclusive`", "hpcenv submit --sbatch exclusive t.py"),
        ("submit t.py --cpu-bind=none", "`--cpu-bind`", "hpcenv submit t.py --srun cpu-bind=none"),
        ("submit t.py --monitor-interval=1", "`--monitor-interval`", "--torchrun-args=--monitor-interval=1"),
        ("submit t.py --rdzv_endpoint=a:1", "`--rdzv_endpoint`", "leave this one out"),
        ("submit t.py --local-rank=0", "`--local-rank`", "LOCAL_RANK"),
    ],
)  # fmt: skip
def test_an_option_of_sbatch_srun_or_torchrun_is_answered_with_the_command_that_works(
    hpcenv: Any, tmp_path: Path, typed: str, what: str, hint: str
) -> None:
    done = hpcenv(*shlex.split(typed), cwd=tmp_path)
    assert done.status == 2
    assert done.stderr.splitlines()[0] == f"error[usage]: no such option {what}"
    assert hint in done.stderr.splitlines()[-1]


def test_an_option_that_only_sbatch_has_is_answered_with_the_reason(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("submit", "t.py", "--ntasks-per-node", "3", cwd=tmp_path)
    assert done.status == 2
    assert "hpcenv starts one task on each node; the ranks are --nproc" in done.stderr


def test_a_batch_script_without_any_option_is_answered_with_the_whole_line(
    hpcenv: Any, project: Path, fake_slurm: Any
) -> None:
    """What users of sbatch type first, before they know that hpcenv has options of its own."""
    text = "#!/bin/bash\n#SBATCH -N 2\n#SBATCH --ntasks-per-node=4\nsrun python train.py --lr 1\n"
    (project / "train.slurm").write_text(text)
    done = hpcenv("submit", "train.slurm", cwd=project, environ=fake_slurm.environ)
    assert "`train.slurm` is a bash script" in done.stderr
    line = "hpcenv submit train.py --nproc 4 --nodes 2 --gpus 0 -- --lr 1"
    assert f"hint: `{line}`" in done.stderr


@pytest.mark.parametrize("typed", ["submit t.py --requeue", "submit t.py --requeue --nodes 2", "submit --requeue t.py"])
def test_requeue_of_sbatch_has_no_value(hpcenv: Any, tmp_path: Path, typed: str) -> None:
    done = hpcenv(*typed.split(), cwd=tmp_path)
    assert done.status == 2
    assert "hint: --requeue always is what --requeue of sbatch means; saved and never are the others" in done.stderr
