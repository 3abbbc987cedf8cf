"""hpcenv.toml: what is accepted, and what is said about what is not."""

from __future__ import annotations

from typing import Any

import pytest
import tomlkit

from hpcenv.model.document import parse
from hpcenv.model.project import TEMPLATE, Project, time_minutes


def problems(text: str) -> tuple[str, ...]:
    return parse(Project, tomlkit.parse(text).unwrap())[1]


def test_the_template_of_init_is_valid_with_every_comment_removed() -> None:
    text = TEMPLATE.format(
        image="host", python='python = ".venv/bin/python"', plain_http='plain-http = ["registry.example:5000"]'
    )
    example = [
        line[2:] if line.startswith(("# ",)) and ("=" in line or line.startswith("# [[")) else line
        for line in text.splitlines()
    ]
    # The sentences among the comments are no TOML; the examples are.
    kept = [line for line in example if not line.startswith("#") and "hpcenv.toml:" not in line]
    kept = [
        line
        for line in kept
        if line and (line[0] in "[" or "=" in line) and "OWNER" not in line and "(image" not in line
    ]
    project, wrong = parse(Project, tomlkit.parse("\n".join(kept)).unwrap())
    assert wrong == ()
    assert project is not None
    assert project.submit.gpu_request == "gres"
    assert project.bind[0].read_only is True


def test_the_smallest_project_is_one_line() -> None:
    project, _ = parse(Project, {"image": "host"})
    assert project is not None
    assert project.on_host
    assert project.paths.runs == "runs"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "`image` is missing"),
        ('image = ""', "`image` = '': must not be empty"),
        ("image = 3", "`image` = 3: Input should be a valid string"),
        ('image = "host"\nimge = "x"', "unknown key `imge`, perhaps you meant `image`"),
        ('image = "host"\nnodes = 2', "unknown key `nodes`, it belongs under [submit]"),
        ('image = "host"\n[submit]\nnode = 2', "unknown key `submit.node`, perhaps you meant `nodes`"),
        ('image = "host"\n[submit]\nplatform = "x"', "unknown key `submit.platform`, the key belongs to the top of the file"),
        ('image = "host"\n[[bind]]\nsorce = "/x"', "unknown key `bind[0].sorce`, perhaps you meant `source`"),
        ('image = "host"\n[[bind]]\nsource = "/x"\ntarget = "x"', "`bind[0].target` = 'x': must be an absolute path in the container"),
        ('image = "host"\n[submit]\nnodes = 0', "`submit.nodes` = 0: must be at least 1"),
        ('image = "host"\n[submit]\nnodes = true', "`submit.nodes` = True: Input should be a valid integer"),
        ('image = "host"\n[submit]\ngpus = -1', "`submit.gpus` = -1: must not be negative"),
        ('image = "host"\n[submit]\ntime = "soon"', "`submit.time` = 'soon': is not a Slurm time: minutes, [hours:]minutes:seconds or days-hours[:minutes[:seconds]]"),
        ('image = "host"\n[submit]\npartition = "a b"', "`submit.partition` = 'a b': must be one word without blanks, quotes or backslashes"),
        ('image = "host"\n[submit]\npartition = "a\\nb"', "`submit.partition` = 'a\\nb': must be one word without blanks, quotes or backslashes"),
        ('image = "host"\n[env]\n"A B" = "x"', "`env` = {'A B': 'x'}: 'A B' is not a variable name"),
        ('image = "host"\n[policy]\n"torch.version" = "maybe"', "`policy.torch.version` = 'maybe': Input should be 'must', 'warn' or 'info'"),
    ],
)  # fmt: skip
def test_a_problem_names_key_value_and_remedy(text: str, said: str) -> None:
    assert said in problems(text)


def test_all_problems_are_told_at_once() -> None:
    assert len(problems('imge = "x"\n[submit]\nnodes = 0\n[paths]\nrun = "r"')) == 4


def test_a_long_value_is_cut() -> None:
    (said,) = problems(f'image = "host"\n[submit]\npartition = "{"x " * 500}"')
    assert len(said) < 200


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("5", 5), ("1:30", 1.5), ("1:00:00", 60), ("1-0", 1440), ("1-2:30", 1590), ("0-0:0:30", 0.5)],
)
def test_slurms_forms_of_a_time(text: str, minutes: float) -> None:
    assert time_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "5m", "-5", "1:2:3:4", "1-", "٣", "1 2", "5\n"])
def test_other_forms_are_no_time(text: str) -> None:
    assert time_minutes(text) is None


def test_zero_is_a_value(tmp_path: Any) -> None:
    project, _ = parse(Project, {"image": "host", "submit": {"gpus": 0}})
    assert project is not None
    assert project.submit.gpus == 0


def test_a_time_of_hundreds_of_digits_is_none() -> None:
    for text in ("1" * 400, "1-" + "2" * 400, "1" * 10, f"1:{'3' * 400}"):
        assert time_minutes(text) is None
    assert time_minutes("9" * 9) == 999_999_999
