"""`hpcenv completion`: print the code that a shell loads for completion. The wheel has files with the same code.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from hpcenv.cli import _render

SHELLS = ("bash", "zsh", "fish")


def script(root: click.Command, shell: str) -> str:
    """Return the completion script that click makes for one of `SHELLS`."""
    made = get_completion_class(shell)
    # The `source` method of the class itself is not used, because it would start bash to find the version of bash.
    return "" if made is None else ShellComplete.source(made(root, {}, "hpcenv", "_HPCENV_COMPLETE"))


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@_render.json_option
@click.pass_context
def command(context: click.Context, /, shell: str, as_json: bool) -> None:
    """Print the script that lets a shell complete commands, options, and names of runs and lockfiles.

    \b
        eval "$(hpcenv completion bash)"     # in ~/.bashrc
        eval "$(hpcenv completion zsh)"      # in ~/.zshrc
        hpcenv completion fish | source      # in ~/.config/fish/config.fish
    """  # noqa: D301  (click's mark for "do not wrap")
    text = script(context.find_root().command, shell)
    if as_json:
        _render.success("completion", {"shell": shell, "script": text})
    else:
        _render.put(text)
