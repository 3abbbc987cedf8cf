"""What the verbs about images share: options, and what is said of a conversion's result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpcenv.cli import _render
from hpcenv.model import size

if TYPE_CHECKING:
    from hpcenv.steps.image.pull import BuiltImage


# What `--plain-http` without a host stands for; nobody can type it as one.
_OF_REFERENCE = "<that of the reference>"


def _hosts(_ctx: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse what is no registry: it would be trusted with nothing, and nobody would be told."""
    from hpcenv.adapters.references import parse_reference
    from hpcenv.errors import SpecError

    for value in values:
        try:
            known = value == _OF_REFERENCE or parse_reference(f"docker://{value}/x").registry == value
        except SpecError:
            known = False
        if not known:
            raise click.BadParameter(f"{value!r} is not HOST or HOST:PORT, for example registry:5000")
    return values


plain_http = click.option(
    "--plain-http",
    multiple=True,
    metavar="HOST",
    callback=_hosts,
    help="Registry that is spoken to without TLS: you trust the network to it.",
)
# Where one reference is on the command line its registry need not be named again.
plain_http_of_reference = click.option(
    "--plain-http",
    multiple=True,
    metavar="HOST",
    is_flag=False,
    flag_value=_OF_REFERENCE,
    callback=_hosts,
    help="Registry that is spoken to without TLS: you trust the network to it.",
)


def registries(named: tuple[str, ...], reference: str) -> tuple[str, ...]:
    """Return the registries of `--plain-http`; without a host it is that of the reference."""
    from hpcenv.adapters.references import Reference, parse_source

    source = parse_source(reference)
    own = source.registry if isinstance(source, Reference) else ""
    return tuple(filter(None, (own if name == _OF_REFERENCE else name for name in named)))


limit = click.option(
    "--limit",
    "limits",
    metavar="NAME=NUMBER",
    multiple=True,
    help="Raise what a trusted image may cost; a refusal names the limit.",
)


def options(command: _render.Command) -> _render.Command:
    """Give a verb the options of a conversion."""
    for option in reversed(
        [
            click.option(
                "--builder",
                type=click.Choice(["auto", "hpcenv", "apptainer"]),
                default="auto",
                show_default=True,
                help="auto: stream the layers where squashfs-tools can, else `apptainer build`.",
            ),
            click.option("--no-proof", is_flag=True, help="Do not read the SIF again to compare it with the layers."),
            limit,
            click.option("--on-cluster", is_flag=True, help="Fetch here, convert in an allocation of Slurm."),
            click.option("--partition", metavar="NAME", help="With --on-cluster: where."),
            click.option("--account", metavar="NAME", help="With --on-cluster: on whose account."),
            click.option("--cpus", type=click.IntRange(min=1), default=8, show_default=True, help="... with how many."),
            click.option("--time", metavar="TIME", default="01:00:00", show_default=True, help="... for how long."),
        ]
    ):
        command = option(command)
    return command


def chosen(words: dict[str, Any]) -> dict[str, Any]:
    """Return what was chosen, as keyword arguments of a step's `Asked`."""
    from hpcenv.adapters.layer_index import Limits
    from hpcenv.errors import UsageError
    from hpcenv.steps.image.on_cluster import Allocation

    if not words["on_cluster"] and (words["partition"] or words["account"]):
        raise UsageError("--partition and --account go with --on-cluster", hint="add --on-cluster")
    allocation = Allocation(
        partition=words["partition"], account=words["account"], cpus=words["cpus"], time=words["time"]
    )
    return {
        "builder": words["builder"],
        "prove": not words["no_proof"],
        "allocation": allocation if words["on_cluster"] else None,
        "limits": Limits().raised(words["limits"]),
    }


def tell(command: str, result: BuiltImage, *, as_json: bool, verify: str | None = None) -> int:
    """Print the result of a conversion.

    Args:
        verify: the command that reads the SIF again and compares it with the layers.
    """
    record = result.record
    if as_json:
        data = {"path": result.path, "reused": result.reused, "read": result.read, "verify": verify}
        _render.success(command, {**data, "notes": result.notes, "record": record})
        return 0
    for note in result.notes:
        _render.tell(f"note: {note}")
    _render.tell(f"{record.digest} for {record.platform}: {', '.join((*_how(result), size.shown(record.sif.size)))}")
    if verify is not None and not result.read:
        _render.tell(f"to read it and compare it with the layers: {verify}")
    _render.say(str(result.path))
    return 0


def _how(result: BuiltImage) -> tuple[str, ...]:
    record = result.record
    if result.reused:
        return ("was there already", "with the bytes that were recorded" if result.read else "not read again")
    made = f"made by {record.made.builder}"
    if record.tree_sha256 is not None:
        return made, f"tree {record.tree_sha256}"
    if record.manifest_digest is None:
        return f"{made} from a definition file", "which has no layers to compare it with"
    return made, "not compared with the layers (--no-proof)"
