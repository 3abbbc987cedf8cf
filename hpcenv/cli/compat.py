"""`hpcenv compat`."""

from __future__ import annotations

import datetime as dt

import click

from hpcenv.cli import _render
from hpcenv.errors import Status, UsageError
from hpcenv.survey.compatibility import MACHINES, Answer, BuildAnswer, compat
from hpcenv.text import wrap

_WORDS = {"match": "yes", "mismatch": "no", "unknown": "?"}
_RESULTS = {"match": "it runs", "mismatch": "it does not run", "unknown": "it is not known"}
_STATUSES = {"match": 0, "mismatch": Status.DOES_NOT_RUN, "unknown": Status.NOT_IN_TABLE}


@click.command("compat")
@click.option("--gpu", metavar="NAME", default="", help="GPU, as NVIDIA or Slurm names it: A100, h100, `RTX 4090`.")
@click.option("--driver", metavar="VERSION", default="", help="Version of the NVIDIA driver, as nvidia-smi shows it.")
@click.option(
    "--torch", metavar="VERSION", default="", help="torch release: 2.9.1, 2.9 or 2.7.1+cu118. Default: every release."
)
@click.option("--cuda", metavar="VERSION", default="", help="CUDA of the torch build, or of another program.")
@click.option(
    "--python", metavar="VERSION", default="", help="Python version: 3.13, or 3.13t for a free-threaded build."
)
@click.option("--machine", metavar="NAME", default="", help=f"Processors: {' or '.join(MACHINES)}.")
@click.option(
    "--with",
    "packages",
    metavar="NAME==VERSION",
    multiple=True,
    help="One more package of the combination. Can be repeated.",
)
@click.option(
    "--cuda-compat", metavar="VERSION", default="", help="Version of a cuda-compat package that the loader finds first."
)
@_render.json_option
def command(packages: tuple[str, ...], as_json: bool, **parts: str) -> int:
    """Say which GPU, driver, torch, CUDA and Python run together. hpcenv asks no cluster.

    The answer comes from a table with a source and a date for every row. hpcenv ends with 43 if the combination does
    not run, and with 44 if the table does not contain the combination.
    """
    _refuse_empty(click.get_current_context(), parts)
    answer = compat(**parts, packages=packages, today=dt.datetime.now(tz=dt.timezone.utc).date())
    status = _STATUSES[answer.result]
    if as_json:
        _render.verdict_on("compat", answer, ok=status == 0)
        return status
    for note in answer.notes:
        _render.tell(f"note: {note}")
    asked = bool(packages) or any(value for name, value in parts.items() if name != "torch")
    _show(answer, asked=asked or answer.result != "match")
    return status


def _refuse_empty(context: click.Context, parts: dict[str, str]) -> None:
    """Refuse an option with an empty value. The value may come from an empty variable of a script."""
    for name, value in parts.items():
        if not value and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"`--{name.replace('_', '-')}` is empty", hint="give its value, or leave it out")


def _show(answer: Answer, *, asked: bool) -> None:
    for check in answer.checks:
        _render.say(wrap(f"{_WORDS[check.result]:<3} {check.part:<7} {check.what}", indent=12))
        for label, text in (("source", check.why), ("do", check.hint)):
            if text:
                _render.say(wrap(f"{'':<12}{label}: {text}", indent=14))
    if answer.builds:
        if answer.checks:
            _render.say()
        _render.say(f"{'':<4}{'torch':<8} {'CUDA':<6} {'Python':<10} why not")
        for build in answer.builds:
            _render.say(wrap(_row(build), indent=32))
        _render.say("* the build of the default index")
    _render.say()
    alone = "this release is known" if answer.question.torch else "these releases are known"
    result = _RESULTS[answer.result] if asked else alone
    _render.say(f"{result}, by the table of {answer.dated}")


def _row(build: BuildAnswer) -> str:
    why = "; ".join(part for part in (build.what, build.hint) if part)
    cuda = f"{build.cuda}{'*' if build.default else ''}"
    return f"{_WORDS[build.result]:<3} {build.torch:<8} {cuda:<6} {build.python:<10} {why}".rstrip()
