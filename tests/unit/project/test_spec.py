"""hpcenv.toml: what is accepted, and what is said about what is not."""

from __future__ import annotations

from typing import Any

import pytest
import tomlkit

from hpcenv.project.document import parse
from hpcenv.project.spec import TEMPLATE, Project


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
        ("image = 3", '`image` = 3: must be text in quotes: image = "3"'),
        ('image = "host"\nimge = "x"', "unknown key `imge`, perhaps you meant `image`"),
        ('image = "host"\ncosign-key = "a.pub"', "unknown key `cosign-key`: hpcenv verifies no signatures; remove the key, and before `hpcenv lock` type `cosign verify --key cosign.pub IMAGE@sha256:...`"),
        ('image = "host"\nnodes = 2', "unknown key `nodes`, it belongs under [submit]"),
        ('image = "host"\n[submit]\ntemplate = "x"', 'unknown key `submit.template`: this option is gone; in its place: setup = ["LINE"] under [submit] of hpcenv.toml'),
        ('image = "host"\n[submit]\nnode = 2', "unknown key `submit.node`, perhaps you meant `nodes`"),
        ('image = "host"\n[submit]\nplatform = "x"', "unknown key `submit.platform`, the key belongs to the top of the file"),
        ('image = "host"\n[[bind]]\nsorce = "/x"', "unknown key `bind[0].sorce`, perhaps you meant `source`"),
        ('image = "host"\n[[bind]]\nsource = "/x"\ntarget = "x"', "`bind[0].target` = 'x': must be an absolute path in the container"),
        ('image = "host"\n[submit]\nnodes = 0', "`submit.nodes` = 0: must be at least 1"),
        ('image = "host"\n[submit]\nnodes = 99999999999999999999', "`submit.nodes` = 99999999999999999999: must be less than 2^32"),
        ('image = "host"\n[submit]\nmax-requeues = 99999999999999999999', "`submit.max-requeues` = 99999999999999999999: must be less than 2^32"),
        ('image = "host"\n[submit]\nnodes = true', "`submit.nodes` = True: must be a whole number: nodes = 2"),
        ('image = "host"\n[submit]\ngpus = -1', "`submit.gpus` = -1: must not be negative"),
        ('image = "host"\n[submit]\ntime = "soon"', "`submit.time` = 'soon': is not a length of time: use a number, 90s, 30m, 2h, 1d, 1w, HH:MM:SS or D-HH:MM:SS"),
        ('image = "host"\n[submit]\npartition = "a b"', "`submit.partition` = 'a b': must be one word without blanks, quotes or backslashes"),
        ('image = "host"\n[submit]\npartition = "a\\nb"', "`submit.partition` = 'a\\nb': must be one word without blanks, quotes or backslashes"),
        ('image = "host"\n[submit]\ngrace = "1x"', "`submit.grace` = '1x': is not a length of time: use a number, 90s, 30m, 2h, 1d, 1w, HH:MM:SS or D-HH:MM:SS"),
        ('image = "host"\n[submit]\nstage-limit = "lots"', "`submit.stage-limit` = 'lots': is not a size, for example 200G"),
        ('image = "host"\n[sbatch]\ntime = "1h"', "`sbatch` = {'time': '1h'}: `time`: hpcenv has its own option: --time"),
        ('image = "host"\n[srun]\nlabel = true', "`srun` = {'label': True}: `label`: hpcenv writes the rank before each line"),
        ('image = "host"\n[env]\n"A B" = "x"', "`env` = {'A B': 'x'}: 'A B' is not a variable name"),
        ('image = "host"\n[environment.default]\npython = "p"', "`environment` = {'default': {'python': 'p'}}: `default` is the environment at the top of the file: write its keys there"),
        ('image = "host"\n[environment."a/b"]\npython = "p"', "`environment` = {'a/b': {'python': 'p'}}: `a/b` is not a name for a lockfile: use letters, digits, '.', '_' and '-'"),
        ('image = "host"\n[environment.data]\nimge = "x"', "unknown key `environment.data.imge`, perhaps you meant `image`"),
        ('image = "host"\n[environment.data]\ngpus = 8', "unknown key `environment.data.gpus`, it belongs under [submit]"),
        ('image = "host"\n[environment.data]\nimage = 3', '`environment.data.image` = 3: must be text in quotes: image = "3"'),
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


def test_zero_is_a_value(tmp_path: Any) -> None:
    project, _ = parse(Project, {"image": "host", "submit": {"gpus": 0}})
    assert project is not None
    assert project.submit.gpus == 0


def test_lengths_of_time_and_sizes_are_kept_as_numbers() -> None:
    project, wrong = parse(Project, {"image": "host", "submit": {"grace": "10m", "stage-limit": "200G", "time": "2h"}})
    assert wrong == ()
    assert project is not None
    assert (project.submit.grace, project.submit.stage_limit, project.submit.time) == (600, 200 * 10**9, "02:00:00")


def test_an_environment_has_its_own_image_and_adds_to_the_rest() -> None:
    top = {"image": "host", "python": ".venv/bin/python", "env": {"A": "1", "B": "1"}, "bind": [{"source": "/x"}]}
    data = {
        "policy": {"torch.version": "info"},
        "image": "docker://r.example/a:1",
        "env": {"B": "2"},
        "bind": [{"source": "/y"}],
        "allow-floating": False,
    }
    project, wrong = parse(Project, {**top, "allow-floating": True, "environment": {"data": data, "same": {}}})
    assert wrong == ()
    assert project is not None
    found = project.for_lock("data")
    assert (found.image, found.python, found.allow_floating) == ("docker://r.example/a:1", None, False)
    assert (found.env, [bind.source for bind in found.bind]) == ({"A": "1", "B": "2"}, ["/x", "/y"])
    assert (project.policy, found.policy) == ({}, {"torch.version": "info"})
    assert found.for_lock("data") == found  # once is enough
    for name in ("same", "default", "other"):
        same = project.for_lock(name)
        assert (same.image, same.python, same.env) == ("host", ".venv/bin/python", {"A": "1", "B": "1"})
    assert project.for_lock("default").submit == found.submit
