"""Options of sbatch become options of `hpcenv submit`, with the same number of nodes, GPUs, ranks and CPUs."""

from __future__ import annotations

import pytest

from hpcenv.errors import ScriptUnusable
from hpcenv.submission import sbatch_directives, shell_script


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("--nodes=2 --gres=gpu:4 --time=04:00:00", "--gpus 4 --nodes 2 --time 04:00:00"),
        ("-N 2\n#SBATCH -p gpu -A acc\n#SBATCH --gres gpu:a100:4,nvme:100", "--gpus 4 --gpu-type a100 --sbatch gres=nvme:100 --nodes 2 --partition gpu --account acc"),
        ("--nodes=2 --gpus=8", "--gpus 4 --nodes 2"),
        ("--ntasks-per-node=4 --gpus-per-task=1 --cpus-per-task=8", "--gpus 4 --cpus 32"),
        ("--gpus-per-node=h100:8 --cpus-per-gpu=12", "--gpus 8 --gpu-type h100 --cpus 96"),
        ("--gres=gpu", "--gpus 1"),
        ("--nodes=2 --ntasks=8 --mem 10G", "--nproc 4 --nodes 2 --mem 10G"),
        ("--signal=B:USR1@300 --exclusive --mail-type=END", "--grace 300 --stop-signal USR1 --sbatch exclusive --sbatch mail-type=END"),
        ("--job-name=x   # a comment\n# SBATCH --time=1\n##SBATCH --qos=q\necho\n#SBATCH --mem=1G", "--name x"),
    ],
)  # fmt: skip
def test_the_directives_of_a_file(lines: str, words: str) -> None:
    given = sbatch_directives.read(f"#!/bin/bash\n\n#SBATCH {lines}\nsrun python t.py\n")
    assert " ".join(sbatch_directives.translate(given)[0]) == words


def test_what_is_left_out_has_its_reason() -> None:
    given = {"output": "logs/%j.out", "export": "ALL", "account": "<account>", "time": "1"}
    words, left = sbatch_directives.translate(given)
    assert words == ("--time", "1")
    assert left["output"] == "the log of a run is job.log in its folder"
    assert "--env" in left["export"]
    assert left["account"] == "its value `<account>` is to be filled in"


def test_the_hint_is_the_whole_line() -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:2\n#SBATCH -o x.out\nsrun python -m torch.distributed.launch t.py --lr 1\n"
    with pytest.raises(ScriptUnusable) as stop:
        shell_script.refuse("train.slurm", text.encode())
    assert "`hpcenv submit t.py --gpus 2 --nodes 2 -- --lr 1`" in str(stop.value.hint)
    assert "\nLeft out: --output (the log of a run is job.log in its folder)." in str(stop.value.hint)
