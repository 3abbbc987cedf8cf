"""What a user may add to the launch, and what would break it."""

from typing import Any

import pytest

from hpcenv.errors import UsageError
from hpcenv.records.manifest import Secret
from hpcenv.submission.launch_options import check_pass_env, check_secrets, check_torchrun_args, cpu_binding


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--monitor-interval=5",),
        ("--monitor_interval", "5"),
        ("--role", "a b"),
        ("--role=",),
        ("--numa-binding=exclusive", "--virtual-local-rank"),
        ("--local-ranks-filter", "0,1", "--event_log_handler=console"),
        ("--an-option-of-a-later-torch=1",),
    ],
)
def test_what_torchrun_may_be_told(words):
    check_torchrun_args(words)


@pytest.mark.parametrize("word", ["--bogus", "--bogus=1"])
def test_an_option_that_the_locked_torch_has_not_is_refused(word):
    with pytest.raises(UsageError) as error:
        check_torchrun_args([word], torch="2.13.0+cu130")
    assert error.value.why == "torchrun of torch 2.13.0+cu130 has no such option"
    for unknown in ("", "2.14.0", "3.0", "nightly"):
        check_torchrun_args([word], torch=unknown)


def test_a_beginning_of_an_option_is_one():
    check_torchrun_args(["--monitor=5"], torch="2.13.0")
    with pytest.raises(UsageError) as error:
        check_torchrun_args(["--monitor-intervall=5"], torch="2.13.0")
    assert error.value.hint == "--torchrun-args --monitor-interval"


@pytest.mark.parametrize(
    "word",
    [
        "--nnodes=2", "--nnode=2", "--nn", "--n", "--nproc-per-node=1", "--nproc_per_node=gpu", "--nproc", "--nproc_per",
        "--rdzv-backend=etcd", "--rdzv_endpoint=x:1", "--rdzv_id=1", "--rdzv_conf=a=b", "--rdzv", "--rd",
        "--local-addr=x", "--local_addr", "--local-a=x", "--log-dir=/tmp", "--log_dir", "--lo=x", "--logs-specs=x",
        "--tee=0", "--te=0", "-t", "-t0", "--redirects=3", "--redir", "-r", "-r3", "--master-addr=x", "--master_port=1",
        "--master", "--node-rank=1", "--node_rank", "--standalone",
        "--stand", "--run-path", "--run_path", "--module", "--mod", "-m", "-mx", "--no-python", "--no_python", "--no-p",
        "--signals-to-handle=SIGUSR1", "--help", "-h", "--use_env", "--use-env",
    ],
)  # fmt: skip
def test_what_decides_the_launch_is_refused_in_any_spelling(word):
    with pytest.raises(UsageError) as error:
        check_torchrun_args([word])
    assert error.value.what == f"`--torchrun-args {word}` cannot be passed on"
    assert error.value.why
    assert error.value.hint


@pytest.mark.parametrize(
    "words",
    [
        ("train.py",),
        ("",),
        ("--",),
        ("-",),
        ("--monitor-interval=5", "6"),
        ("--virtual-local-rank", "1"),
        ("--virtual-local-rank=1",),
        ("--role", "--monitor-interval=5"),
        ("--role",),
        ("--role", "--"),
        ("--unknown", "x"),
        ("---x=1",),
        ("--x y",),
    ],
)
def test_what_torchrun_would_take_for_the_script_or_not_at_all_is_refused(words):
    with pytest.raises(UsageError):
        check_torchrun_args(words)


def test_names_to_pass_on():
    check_pass_env(["HF_HOME", "HF_*", "*", "_x1"])
    for wrong in ("", "A=1", "A B", "1A", "*_TOKEN", "A*B", "A\n", "A**", "-x"):
        with pytest.raises(UsageError):
            check_pass_env([wrong])


def test_a_secrets_file_has_an_absolute_path():
    check_secrets([Secret(name="A", source=source, origin="x") for source in ("env:B", "file:/a b", "file:~/.token")])
    for wrong in ("file:token", "file:./token", "file:~bob/token", "file:$HOME/token"):
        with pytest.raises(UsageError, match="not an absolute path"):
            check_secrets([Secret(name="A", source=wrong, origin="--secret")])


@pytest.mark.parametrize(
    ("asked", "torchrun_args", "srun", "binding"),
    [
        (None, (), {}, "near-gpu"),
        ("near-gpu", ("--monitor-interval=1",), {"cpu-bind": "none"}, "near-gpu"),
        ("off", (), {}, "off"),
        # torchrun and srun bind the ranks themselves then.
        (None, ("--numa-binding=node",), {}, "off"),
        (None, ("--numa_binding", "exclusive"), {}, "off"),
        (None, (), {"gpu-bind": "closest"}, "off"),
    ],
)
def test_who_binds_the_ranks_to_cpus(asked: Any, torchrun_args: Any, srun: Any, binding: str) -> None:
    assert cpu_binding(asked, torchrun_args, srun) == binding
