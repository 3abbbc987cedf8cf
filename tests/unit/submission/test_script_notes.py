"""Notes on scripts that start or meet their ranks in another way than hpcenv does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcenv.submission.script_notes import LaunchShape, notes_on

ROOT = Path(__file__).resolve().parents[3]
TWO = LaunchShape(launcher="torchrun", nodes=2, nproc_per_node=4)


def notes(text: str, shape: LaunchShape = TWO, script: str = "t.py") -> list[str]:
    tree = compile(text, "t.py", "exec", flags=0x400, dont_inherit=True)
    return notes_on(script, text.encode(), tree, shape)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("pkg/train.py", ["-m pkg.train"]),
        ("./pkg/sub/train.py", ["-m pkg.sub.train"]),
        ("train.py", ["-m PACKAGE.MODULE, from the folder above it"]),
        ("/job/pkg/train.py", ["-m PACKAGE.MODULE, from the folder above it"]),
        ("pkg.train", []),
    ],
)
def test_a_relative_import_in_a_file_is_named_with_its_module(script: str, said: list[str]) -> None:
    """The ranks ended with ImportError after a minute, and nothing named `-m pkg.train`."""
    found = notes("import torch\nfrom .model import Net\n", script=script)
    assert [note.partition("the module is ")[2] for note in found] == said
    assert all(note.startswith(f"`{script}`, line 2: `from .` fails") for note in found)
    assert notes("try:\n    from . import model\nexcept ImportError:\n    import model\n", script=script) == []
    alone = LaunchShape(launcher="none", nodes=1, nproc_per_node=1)
    assert notes("from . import model\n", alone, script=script) != [] or not said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\n\nmodel = torch.nn.DataParallel(model)", "line 3: DataParallel is for one process"),
        ("model = DataParallel(model)\nother = nn.DataParallel(o)", "line 1: DataParallel is for one process"),
        ("mp.spawn(main, nprocs=8)", "line 1: the script starts processes itself (mp.spawn): each of the 4 ranks"),
        ("torch.multiprocessing.spawn(main)", "(torch.multiprocessing.spawn)"),
        ("from torch.multiprocessing import spawn\nif True:\n    spawn(main)", "line 3: the script starts processes itself"),
        ('os.environ["MASTER_PORT"] = "29500"', "MASTER_PORT is set to '29500', although the launch sets it: another job"),
        ('os.environ["MASTER_PORT"] = str(12355)', "MASTER_PORT is set to '12355'"),
        ('os.environ["MASTER_ADDR"] = "localhost"', "MASTER_ADDR is set to 'localhost', although the launch sets it: the nodes may not"),
        ('dist.init_process_group("nccl", init_method="tcp://10.0.0.1:23456")', "init_method is 'tcp://10.0.0.1:23456'"),
        ('dist.init_process_group("nccl", "tcp://10.0.0.1:23456")', "init_method is 'tcp://10.0.0.1:23456'"),
        ('os.environ.update({"MASTER_PORT": "29500", **more})', "MASTER_PORT is set to '29500'"),
        ('environ.update(MASTER_PORT="29500")', "MASTER_PORT is set to '29500'"),
        ('store = dist.TCPStore("localhost", 29500, 2)', "TCPStore has the fixed port 29500: another job on the node may have"),
        ("store = TCPStore(host, port=29500)", "TCPStore has the fixed port 29500"),
        ('p.add_argument("--local_rank", type=int, default=0)', "the ranks do not get --local_rank, so all would take its default"),
        ('p.add_argument("-l", "--local-rank")', "read int(os.environ['LOCAL_RANK'])"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_line(text: str, said: str) -> None:
    (note,) = notes(text)
    assert note.startswith("`t.py`, line ")
    assert said in note


@pytest.mark.parametrize(
    "text",
    [
        "model = DistributedDataParallel(model)  # not DataParallel",
        '"""mp.spawn and nn.DataParallel(model)"""',
        'os.environ.setdefault("MASTER_PORT", "29500")',
        'os.environ["MASTER_PORT"] = free_port()',
        'print(os.environ["MASTER_PORT"])',
        'p.add_argument("--local-rank", default=int(os.environ.get("LOCAL_RANK", 0)))',
        'dist.init_process_group("nccl", init_method="env://")',
        "process.spawn(main)",
        'os.environ.update({"MASTER_PORT": free_port(), "OTHER": "1"}); os.environ.update(settings)',
        "store = dist.TCPStore(host, 0, 2); other = dist.TCPStore(host, port=free_port())",
        'data.start_processes = 3; url = "tcp://x"',
    ],
)
def test_what_fits_is_not_named(text: str) -> None:
    assert notes(text) == []


def test_a_program_that_starts_its_ranks_may_do_all_of_it() -> None:
    text = 'os.environ["MASTER_PORT"] = "1"\nmp.spawn(main)\nnn.DataParallel(m)\n'
    assert len(notes(text)) == 3
    assert notes(text, LaunchShape(launcher="none", nodes=1, nproc_per_node=1)) == []
    one = notes(text, LaunchShape(launcher="torchrun", nodes=1, nproc_per_node=1))
    assert "(mp.spawn): the rank of each node would start processes again" in "".join(one)
    assert not [note for note in one if "DataParallel" in note]


def test_the_examples_have_none() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert notes(path.read_text(encoding="utf-8")) == []


def test_submit_prints_them_before_anything_is_queued(project: Path, hpcenv: Any) -> None:
    (project / "old.py").write_text("import os\nos.environ['MASTER_PORT'] = '29500'\n")
    done = hpcenv("submit", "old.py", "--nproc", "2", "--dry-run", cwd=project)
    assert done.status == 0
    assert "note: `old.py`, line 2: MASTER_PORT is set to '29500'" in done.stderr
