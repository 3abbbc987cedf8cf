"""A word of another program, or a task that another program has, is answered with what to type."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hpcenv.cli import _other_words


@pytest.mark.parametrize(
    ("typed", "what", "hint"),
    [
        ("ls", "no such command `hpcenv ls`", "hpcenv list"),
        ("kill 17", "no such command `hpcenv kill`", "hpcenv cancel RUN"),
        ("watch", "no such command `hpcenv watch`", "hpcenv top RUN"),
        ("cost", "no such command `hpcenv cost`", "hpcenv usage"),
        ("stop 17", "no such command `hpcenv stop`", "hpcenv cancel RUN"),
        ("tail", "no such command `hpcenv tail`", "hpcenv logs -f RUN"),
        ("exec ls", "no such command `hpcenv exec`", "hpcenv run -- COMMAND"),
        ("resume", "no such command `hpcenv resume`", "hpcenv submit SCRIPT --resume-from RUN"),
        ("train.py --nodes 2", "no such command `hpcenv train.py`", "hpcenv submit train.py --nodes 2"),
        ("./run/train.slurm", "no such command `hpcenv ./run/train.slurm`", "hpcenv submit ./run/train.slurm"),
        ("sign default", "no such command `hpcenv sign`", "ssh-keygen -Y sign -f KEY -n file FILE"),
        ("image push x.sif", "no such command `hpcenv image push`", "apptainer push -U FILE.sif oras://HOST/NAME:TAG"),
        ("bundle push a b", "no such command `hpcenv bundle push`", "oras push HOST/NAME:TAG FILE.hpcenv.zip"),
        ("image pull x:1 --on-cluster", "no such option `--on-cluster` of `hpcenv image pull`", "srun -c 8 hpcenv image pull REFERENCE"),
        ("reproduce one --key k", "no such option `--key` of `hpcenv reproduce`", "ssh-keygen -Y sign signs the output of `hpcenv reproduce --json`"),
        ("reproduce one --standalone", "no such option `--standalone` of `hpcenv reproduce`", "the rendezvous that hpcenv chooses"),
        ("export spdx", "Invalid value for 'FORMAT': 'spdx' is not one of 'cyclonedx', 'environment', 'pylock', 'requirements'", "hpcenv export cyclonedx -o bom.cdx.json"),
        ("export rocrate", "Invalid value for 'FORMAT': 'rocrate' is not one of 'cyclonedx', 'environment', 'pylock', 'requirements'", "`hpcenv bundle make RUN` describes the run in CITATION.cff and record.json"),
        ("image build Dockerfile --engine apptainer", "Invalid value for '--engine': 'apptainer' is not one of 'auto', 'buildah', 'podman'", "buildah or podman build a Dockerfile; `hpcenv image init` writes a definition file for Apptainer"),
        ("submit t.py --preflight deep", "Invalid value for '--preflight': 'deep' is not one of 'quick', 'full', 'off'", "`dcgmi diag -r 3` on a node puts a load on its GPUs; --preflight full has hpcenv's own tests"),
        ("submit t.py --licenses a", "no such option `--licenses`", "hpcenv submit t.py --sbatch licenses=a"),
        ("submit t.py --locked", "no such option `--locked` of `hpcenv submit`", "`hpcenv lock --check` before"),
        ("submit t.py --rocm", "no such option `--rocm` of `hpcenv submit`", "`rocm` under [submit] of hpcenv.toml"),
        ("submit t.py --cpu-binding off", "no such option `--cpu-binding` of `hpcenv submit`", "`cpu-binding` under [submit] of hpcenv.toml"),
        ("rerun one --no-record-metrics", "no such option `--no-record-metrics` of `hpcenv rerun`", "`record-metrics` under [submit] of hpcenv.toml"),
        ("submit t.py --max-requeues 1", "no such option `--max-requeues` of `hpcenv submit`", "`max-requeues` under [submit] of hpcenv.toml"),
        ("rerun one --template x", "no such option `--template` of `hpcenv rerun`", 'setup = ["LINE"] under [submit] of hpcenv.toml'),
    ],
)  # fmt: skip
def test_the_answer_is_what_to_type(hpcenv: Any, tmp_path: Path, typed: str, what: str, hint: str) -> None:
    done = hpcenv(*shlex.split(typed), cwd=tmp_path)
    assert done.status == 2
    assert done.stderr.splitlines()[0] == f"error[usage]: {what}"
    assert done.stderr.splitlines()[-1] == f"hint: {hint}"


def test_json_has_the_command_of_the_hint(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("ps", "--json", cwd=tmp_path)
    assert done.status == 2
    assert json.loads(done.stdout)["error"]["commands"] == [["hpcenv", "list"]]


def test_each_command_that_is_named_exists_and_has_the_options(hpcenv: Any, tmp_path: Path) -> None:
    """None of the words that are answered is a command, and `--help` of each command that is named has its options."""
    lines = [*_other_words._COMMANDS.values(), *_other_words._OPTIONS.values(), *_other_words._VALUES.values()]
    texts = [
        text[text.index("hpcenv ") :].replace("`", " ").split(" -- ")[0].split() for text in lines if "hpcenv " in text
    ]
    named = [words[1 : 3 if words[1] in ("image", "bundle") else 2] for words in texts if words[1] != "verifies"]
    assert len(named) > 10
    for words, verb in zip([text for text in texts if text[1] != "verifies"], named, strict=True):
        page = hpcenv(*verb, "--help", cwd=tmp_path)
        assert page.status == 0, words
        assert all(word in page.stdout for word in words if word.startswith("-")), words
    for name in _other_words._COMMANDS:
        assert hpcenv(*name.split()[1:], "--help", cwd=tmp_path).status == 2, name
