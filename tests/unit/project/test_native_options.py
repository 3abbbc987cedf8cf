"""Options that are passed on to sbatch and srun: which, and why others are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.project import native_options
from hpcenv.project.options import OPTIONS
from hpcenv.submission import batch_script

# Long options of sbatch 26.05 and srun 26.05 that hpcenv passes on.
PASSED_ON = {
    "sbatch": (
        "acctg-freq batch bb bbf begin burst-buffer comment contiguous core-spec cores-per-socket cpu-freq deadline "
        "delay-boot distribution exclusive extra extra-node-info gpu-bind gpu-freq gres-flags hint hold "
        "kill-on-invalid-dep licenses mail-type mail-user mcs-label mem-bind mem-per-cpu mem-per-gpu mincpus network "
        "nice oom-kill-step overcommit oversubscribe power prefer priority profile propagate reboot "
        "resv-ports segment sockets-per-node spread-job stepmgr switches thread-spec threads-per-core time-min tmp "
        "tres-bind use-min-nodes wckey x11"
    ),
    "srun": (
        "accel-bind acctg-freq cpu-bind cpu-freq disable-status distribution exact gpu-bind gpu-freq "
        "gres-flags hint mem-bind mem-per-cpu mem-per-gpu mpi msg-timeout network overcommit overlap profile "
        "propagate resv-ports slurmd-debug threads-per-core tres-bind use-min-nodes"
    ),
}


@pytest.mark.parametrize("program", PASSED_ON)
def test_other_options_are_passed_on(program: str) -> None:
    owned = native_options.owned(program)
    for name in PASSED_ON[program].split():
        if name not in {option.sbatch for option in OPTIONS}:
            assert name not in owned
            native_options.check(program, name, "x")


@pytest.mark.parametrize(
    ("program", "name", "why"),
    [
        ("sbatch", "nodes", "hpcenv has its own option: --nodes"),
        ("sbatch", "cpus-per-task", "hpcenv has its own option: --cpus"),
        ("sbatch", "signal", "--grace, --stop-signal and --requeue"),
        ("sbatch", "output", "the log of a run is job.log in its folder"),
        ("sbatch", "gpus-per-task", "the GPUs of each node are --gpus"),
        ("srun", "gres", "they belong to the whole job: --sbatch gres=LIST"),
        ("sbatch", "tasks-per-node", "hpcenv starts one task on each node"),
        ("sbatch", "wrap", "the job is the script"),
        ("srun", "nodes", "hpcenv has its own option: --nodes"),
        ("srun", "partition", "it belongs to the whole job: --partition"),
        ("srun", "kill-on-bad-exit", "hpcenv ends all nodes when one has failed"),
        ("srun", "task-prolog", "the program would run outside the environment"),
        ("srun", "time", "the time limit belongs to the whole job"),
        # sbatch and srun take the beginning of a name for the whole name.
        ("sbatch", "outp", "sbatch would read it as --output"),
        ("sbatch", "ntask", "sbatch would read it as --ntasks"),
        ("srun", "kill-on", "srun would read it as --kill-on-bad-exit"),
        ("sbatch", "N", "hpcenv has its own option: --nodes"),
        ("sbatch", "-p", "hpcenv has its own option: --partition"),
        ("sbatch", "H", "use the long name of -H"),
        ("sbatch", "--mail-type", "leave out the dashes: --sbatch mail-type=x"),
        ("sbatch", "", "is not the name of an option"),
        ("sbatch", "a b", "is not the name of an option"),
        ("sbatch", "Output", "is not the name of an option"),
        ("srun", "cpu-bind\n", "is not the name of an option"),
    ],
)
def test_an_option_that_hpcenv_sets_is_refused_with_the_reason(program: str, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        native_options.check(program, name, "x")
    assert why in str(caught.value)


@pytest.mark.parametrize("value", ["a\nb", "a\0", "\x1b[31m", "a\rb"])
@pytest.mark.parametrize("program", ["sbatch", "srun"])
def test_a_value_with_a_control_character_is_refused(program: str, value: str) -> None:
    with pytest.raises(ValueError, match="control character"):
        native_options.check(program, "wckey" if program == "sbatch" else "mpi", value)


@pytest.mark.parametrize(
    "value", ["gpu:2", "gpu", "nvme:10,gpu:a100:4", "shard:1", "mps:50", "gres/gpu:1", "gres:gpu=2", None]
)
def test_gpus_are_not_asked_for_as_other_resources(value: str | None) -> None:
    with pytest.raises(ValueError, match="the GPUs of each node are --gpus"):
        native_options.check("sbatch", "gres", value)
    native_options.check("sbatch", "gres", "nvme:100,tmpscratch:10G,gpuless:1")


@given(st.text(), st.text())
def test_what_passes_the_check_can_be_written_as_a_directive(name: str, value: str) -> None:
    try:
        native_options.check("sbatch", name, value)
    except ValueError:
        return
    line = batch_script.directives([(name, value)])
    assert len(line.splitlines()) == 1
    assert line.startswith(f"#SBATCH --{name}=")


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="`wckey` is given twice"):
        native_options.parse("sbatch", ("wckey=a", "wckey=b"))


def test_in_a_table_true_is_an_option_without_a_value() -> None:
    table = {"exclusive": True, "nice": 100, "mail-type": "END"}
    assert native_options.parse("sbatch", table) == {"exclusive": None, "nice": "100", "mail-type": "END"}
    assert native_options.options_of({"exclusive": None, "nice": "100"}) == ["--exclusive", "--nice=100"]
    for value in (False, 1.5, ["a"], {"a": 1}):
        with pytest.raises(ValueError, match="must be a text, a whole number or true"):
            native_options.parse("sbatch", {"wckey": value})
