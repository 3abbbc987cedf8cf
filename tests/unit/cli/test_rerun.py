"""`hpcenv rerun`: the request of a run, changed or not, makes the same submission again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import UsageError
from hpcenv.project.options import OPTIONS, Option, in_place
from hpcenv.records import codec
from hpcenv.records.request import RequestRecord
from hpcenv.submission.request import SubmitOptions, command_of, from_command_line, from_record, to_record
from hpcenv.submission.rerun import change, changes, free_name

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
OLD = from_command_line(
    "a b.py",
    ("--lr", "1", "--json", "--", "$(id)"),
    {
        "nodes": 2, "gpus": 8, "workdir": "live", "env": ("A=1", "B=x y"), "torchrun_args": ("--role=x",), "stage": True,
        "name": "first", "sbatch": ("mail-type=END", "exclusive"), "grace": "10m", "secret": ("T=env:T",),
    },
)  # fmt: skip


def again(options: SubmitOptions) -> SubmitOptions:
    """Write the record of a request and read it."""
    record = to_record(options)
    assert record is not None
    return from_record(codec.decode_record(RequestRecord, codec.encode_record(record), origin="test"))


def test_a_request_survives_being_written_and_read() -> None:
    assert again(OLD) == OLD
    assert command_of(OLD) == (
        *("hpcenv", "submit", "a b.py", "--nodes", "2", "--gpus", "8", "--sbatch", "mail-type=END", "--sbatch"),
        *("exclusive", "--torchrun-args", "--role=x", "--env", "A=1", "--env", "B=x y", "--secret", "T=env:T"),
        *(
            "--grace",
            "600",
            "--workdir",
            "live",
            "--stage",
            "--name",
            "first",
            "--",
            "--lr",
            "1",
            "--json",
            "--",
            "$(id)",
        ),
    )


@given(args=st.lists(TEXTS), value=TEXTS, name=TEXTS)
def test_any_argument_survives(args: list[str], value: str, name: str) -> None:
    options = from_command_line("t.py", args, {"env": (f"A={value}",), "name": name, "torchrun_args": (value,)})
    assert again(options) == options
    assert (options.args, options.env) == (tuple(args), {"A": value})


def test_bytes_that_are_no_text_survive() -> None:
    options = from_command_line("\udcff.py", ("\udcff",), {})
    assert again(options) == options


def test_what_is_typed_takes_the_place_of_what_was() -> None:
    given_now = {"nodes": 4, "env": {"B": "3", "C": "4"}, "sbatch": {"mail-type": "ALL"}}
    new = change(OLD, given_now, ("--torchrun-args", "stage"), ("--lr", "2"))
    told = {change.flag: (change.before, change.after) for change in changes(OLD, new)}
    assert told == {
        "--nodes": ("--nodes 2", "--nodes 4"),
        "--sbatch": ("--sbatch mail-type=END --sbatch exclusive", "--sbatch mail-type=ALL --sbatch exclusive"),
        "--torchrun-args": ("--torchrun-args --role=x", ""),
        "--env": ("--env A=1 --env 'B=x y'", "--env A=1 --env B=3 --env C=4"),
        "--stage": ("--stage", ""),
        "--": ("-- --lr 1 --json -- '$(id)'", "-- --lr 2"),
    }
    assert changes(OLD, change(OLD, {}, (), None)) == ()


def test_a_sweep_changes_by_the_names_of_its_values() -> None:
    old = from_command_line("t.py", (), {"sweep": ("lr=1,2", "seed=0..1")})
    assert change(old, {"sweep": ("seed=5",)}, (), None).sweep == ("lr=1,2", "seed=5")


def some_value(option: Option) -> Any:
    if option.kind in ("flag", "switch"):
        return option.kind == "flag"
    if option.kind == "choice":
        return option.choices[0]
    lists = {"texts": ("a", "b"), "variables": ("A=1",), "secrets": ("A=env:B",), "native": ("wckey=1",)}
    return {"trace_steps": "1:2"}.get(option.name) or lists.get(option.kind, "2")


@pytest.mark.parametrize("option", in_place("command"), ids=lambda option: option.flag)
def test_each_option_is_remembered_and_can_be_left_out(option: Option) -> None:
    old = from_command_line("t.py", (), {option.name: some_value(option)})
    assert again(old) == old
    assert option.name in json.loads(codec.encode_record(to_record(old)))["options"]
    new = change(old, {}, (option.key,), None)
    assert command_of(new) == ("hpcenv", "submit", "t.py")
    assert new == from_command_line("t.py", (), {})


def test_what_cannot_be_submitted_again_is_said() -> None:
    with pytest.raises(UsageError, match="has no such option"):
        change(OLD, {}, ("nosuch",), None)
    with pytest.raises(UsageError, match="was submitted without it"):
        change(OLD, {}, ("nodelist",), None)
    record = RequestRecord(schema=1, script="t.py", args=(), options={"warp": 9})
    with pytest.raises(UsageError, match="cannot submit the run again") as caught:
        from_record(record)
    assert "warp" in str(caught.value.why)
    with pytest.raises(UsageError) as caught:
        from_record(RequestRecord(schema=1, script="t.py", args=(), options={"nodes": "many"}))
    assert caught.value.why == "`nodes` = 'many': must be a whole number (from request.json)"


def test_no_record_holds_the_value_of_a_secret() -> None:
    secrets = [option for option in OPTIONS if option.kind == "secrets"]
    for option in secrets:
        with pytest.raises(UsageError) as caught:
            from_command_line("t.py", (), {option.name: ("TOKEN=hunter2",)})
        assert "hunter2" not in f"{caught.value.what} {caught.value.why} {caught.value.hint}"
    values: Mapping[str, Any] = from_command_line("t.py", (), {"secret": ("TOKEN=env:T",)}).secret
    assert values == {"TOKEN": "env:T"}


def test_names_of_further_runs(tmp_path: Path) -> None:
    for name in ("a", "a-2", "seed-7"):
        (tmp_path / name).mkdir()
    assert free_name("a", tmp_path) == "a-3"
    assert free_name("a-2", tmp_path) == "a-3"
    assert free_name("seed-7", tmp_path) == "seed-7-2"
    assert free_name("new", tmp_path) == "new"


def test_a_run_again_takes_its_own_lockfile_and_refuses_another_script(hpcenv: Any, project: Path) -> None:
    done = hpcenv("submit", "train.py", "--nproc", "1", "--cluster", "local", "--name", "one", "--", "x", cwd=project)
    assert done.status == 0, done.stderr
    hpcenv("wait", "one", "--timeout", "60s", cwd=project, timeout=90)
    lock = project / "lockfiles" / "default.lock.toml"
    lock.write_text("nothing that could be a lockfile")

    elsewhere = project / "deeper"
    elsewhere.mkdir()
    plan = hpcenv("rerun", "one", "--dry-run", "--json", "--", "y", cwd=elsewhere)
    assert plan.status == 0, plan.stdout
    manifest = plan.envelope["data"]["manifest"]
    assert (manifest["run"], manifest["args"], manifest["workdir"]) == (
        "one-2",
        ["y"],
        str(project / "runs" / "one-2" / "source"),
    )
    assert manifest["lockfile"] == "runs/one/lock.toml"
    told = hpcenv("rerun", "one", "--dry-run", "--nproc", "2", cwd=project).stderr
    assert "  - --nproc 1\n  + --nproc 2\n" in told
    assert not (project / "runs" / "one-2").exists()

    record = project / "runs" / "one" / "request.json"
    record.write_text(record.read_text().replace('"nproc"', '"standalone": true, "max_restarts": 0, "nproc"'))
    noted = hpcenv("rerun", "one", "--dry-run", "--json", cwd=project).envelope["data"]["notes"]
    assert [note for note in noted if "an option that is gone" in note] == [
        "the run had standalone = true, an option that is gone: the rendezvous that hpcenv chooses"
    ]

    (project / "train.py").write_text("print('another')\n")
    refused = hpcenv("rerun", "one", "--json", cwd=project)
    assert refused.status == 2
    assert "the script was" in refused.envelope["error"]["why"]
    allowed = hpcenv("rerun", "one", "--allow-changed", "--dry-run", "--json", cwd=project)
    assert allowed.status == 0


def test_a_variable_of_the_shell_that_differs_from_the_first_run_is_noted_and_compared_on_the_nodes(
    hpcenv: Any, project: Path
) -> None:
    def run(*words: str, **environ: str) -> Any:
        done = hpcenv(*words, cwd=project, environ={**os.environ, **environ}, timeout=120)
        assert done.status == 0, done.stdout + done.stderr
        return done

    def findings(name: str) -> list[tuple[str, str, str, str]]:
        verdict = json.loads((project / "runs" / name / "verdict.json").read_text())
        assert verdict["result"] == "match"
        rows = (row for row in verdict["findings"] if row["field"].startswith("env."))
        return [(row["field"], row["severity"], row["locked"], row["found"]) for row in rows]

    first = {"MKL_CBWR": "AVX2", "NCCL_ALGO": "Ring", "KMP_BLOCKTIME": "0"}
    run("submit", "train.py", "--nproc", "1", "--cluster", "local", "--name", "one", "--wait", **first)
    same = run("rerun", "one", "--wait", LC_ALL="C", TZ="Asia/Tokyo", SLURM_JOB_NAME="x", PYTHONPATH="/x", **first)
    assert "this shell has other variables" not in same.stderr
    assert findings("one-2") == []
    typed = {"MKL_CBWR": "COMPATIBLE", "CUDA_LAUNCH_BLOCKING": "1", "NCCL_ALGO": "Tree"}
    other = run("rerun", "one", "--env", "KMP_BLOCKTIME=7", "--wait", **typed)
    said = "this shell has other variables than the ranks of one had: CUDA_LAUNCH_BLOCKING=1 (absent before), "
    assert f"{said}MKL_CBWR=COMPATIBLE (AVX2 before), NCCL_ALGO=Tree (Ring before)" in other.stderr
    assert findings("one-3") == [
        ("env.CUDA_LAUNCH_BLOCKING", "warn", "absent", "1"),
        ("env.MKL_CBWR", "warn", "AVX2", "COMPATIBLE"),
        ("env.NCCL_ALGO", "warn", "Ring", "Tree"),
    ]
    unset = run("rerun", "one", "--wait", NCCL_ALGO="Ring", KMP_BLOCKTIME="0")
    assert "this shell has other variables" not in unset.stderr
    assert findings("one-4") == [("env.MKL_CBWR", "warn", "AVX2", "absent")]
