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
        ("--array=1-4%2 --time 5", "--array 1-4%2 --time 5"),
        ("--nodes=3 --ntasks=9 --gpus=6", "--gpus 2 --nodes 3"),
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


@pytest.mark.parametrize(
    ("given", "words", "name", "reason"),
    [
        ({"nodes": "2-4", "gpus": "8"}, "", "nodes", "hpcenv needs one number of nodes, and `2-4` is none"),
        ({"nodes": "2-4", "gpus": "8"}, "", "gpus", "8 for the job, and the number of nodes is open"),
        ({"nodes": "3", "gpus": "a100:8"}, "--nodes 3", "gpus", "8 do not divide by 3 nodes"),
        ({"nodes": "4", "ntasks": "10"}, "--nodes 4", "ntasks", "10 do not divide by 4 nodes"),
    ],
)
def test_a_count_for_the_job_that_does_not_divide_is_left_out(
    given: dict[str, str], words: str, name: str, reason: str
) -> None:
    """The hint had fewer GPUs or ranks than the file asks for, and did not say so."""
    made, left = sbatch_directives.translate(given)
    assert " ".join(made) == words
    assert left[name] == reason


def test_the_hint_is_the_whole_line() -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:2\n#SBATCH -o x.out\nsrun python -m torch.distributed.launch t.py --lr 1\n"
    with pytest.raises(ScriptUnusable) as stop:
        shell_script.refuse("train.slurm", text.encode())
    assert "`hpcenv submit t.py --gpus 2 --nodes 2 -- --lr 1`" in str(stop.value.hint)
    assert "\nLeft out: --output (the log of a run is job.log in its folder)." in str(stop.value.hint)
