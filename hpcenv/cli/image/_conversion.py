"""Options and output that several `hpcenv image` commands share.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, cast

import click

from hpcenv import size
from hpcenv.cli import _render
from hpcenv.cli._help_all import RareOption
from hpcenv.errors import Command as HintCommand
from hpcenv.errors import HpcenvError, SpecError
from hpcenv.image.convert.layer_index import LayerLimits
from hpcenv.image.pull import BuiltImage, ConvertOptions, ImageRequest
from hpcenv.image.reference import (
    LayeredImage,
    Platform,
    RegistryName,
    SifReference,
    parse_layered,
    parse_platform,
    parse_reference,
)
from hpcenv.image.registry.oci_layout import local_form
from hpcenv.image.registry.source import Access

# The value of `--plain-http` without a host. A user cannot type it, because it is not a valid host.
_OWN_REGISTRY = "<the registry of the reference>"


def _check_hosts(_ctx: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse values that are not HOST[:PORT]. Without this check, a typo would have no effect, and no error."""
    for value in values:
        try:
            valid = value == _OWN_REGISTRY or parse_reference(f"docker://{value}/x").registry == value
        except SpecError:
            valid = False
        if not valid:
            raise click.BadParameter(f"{value!r} is not HOST or HOST:PORT, for example registry:5000")
    return values


class _PlatformType(click.ParamType):  # type: ignore[type-arg]  # not generic at run time before click 8.2
    name = "platform"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Platform:
        if isinstance(value, Platform):
            return value
        try:
            return parse_platform(value)
        except SpecError as error:
            self.fail(f"{error.what}; {error.hint}", param, ctx)


PLATFORM = _PlatformType()

platform = click.option(
    "--platform",
    type=PLATFORM,
    default="linux/amd64",
    show_default=True,
    metavar="OS/ARCH",
    help="Platform to select from a multi-platform image.",
)
plain_http = click.option(
    "--plain-http",
    multiple=True,
    metavar="HOST",
    callback=_check_hosts,
    help="Use http instead of https for this registry; only for networks that you trust.",
)
_plain_http_or_own = click.option(
    "--plain-http",
    multiple=True,
    metavar="[HOST]",
    is_flag=False,
    flag_value=_OWN_REGISTRY,
    callback=_check_hosts,
    help="Use http instead of https for the registry HOST; without HOST, for the registry of the image. Use this "
    "option only in networks that you trust.",
)
_ca_file = click.option(
    "--ca-file", cls=RareOption, metavar="FILE", help="Certificates to trust for the registry, in PEM form."
)


def layered_image(text: str) -> LayeredImage:
    """Parse the name of an image that hpcenv can convert.

    Raises:
        SpecError: the text is not the name of an image, or the image has no layers. If the text is a path without a
            scheme, the hint contains the path with a scheme.
    """
    try:
        return parse_layered(text)
    except SpecError as error:
        form = local_form(_render.cwd() / text)
        if form is None:
            raise
        words = (f"{form}:{text}" if word == text else word for word in _render.command_line())
        raise error.changed(why="it is a path without a scheme", hint=HintCommand(*words)) from error


def image_options(command: _render.Decorated) -> _render.Decorated:
    """Add the options that describe an image and its registry. `image_request` reads these options."""
    return platform(_plain_http_or_own(_ca_file(command)))


def image_request(source: LayeredImage, values: dict[str, Any], *, allow_floating: bool) -> ImageRequest:
    """Return the request that the image options describe."""
    return ImageRequest(
        source=source,
        platform=values["platform"],
        access=registry_access(source, values),
        allow_floating=allow_floating,
    )


def registry_access(source: LayeredImage | RegistryName, values: dict[str, Any]) -> Access:
    """Return how to connect to registries, from the options --plain-http and --ca-file."""
    own = source.registry if isinstance(source, RegistryName) else ""
    hosts = (own if host == _OWN_REGISTRY else host for host in values["plain_http"])
    ca_file = values["ca_file"]
    return Access(
        plain_http=tuple(filter(None, hosts)),
        ca_file=None if ca_file is None else Path(os.path.abspath(_render.cwd() / ca_file)),
        environ=os.environ,
    )


_limit = click.option(
    "--limit",
    "limits",
    cls=RareOption,
    metavar="NAME=NUMBER",
    multiple=True,
    help="Raise a limit for an image that you trust; NAME=none removes the limit. The error for an image that is "
    "too large names the limit.",
)


def limit(command: _render.Decorated) -> _render.Decorated:
    """Give --limit to a command that reads layers. The hints of the command's errors then name this command."""

    @functools.wraps(command)
    def with_own_command(*args: Any, **words: Any) -> Any:
        try:
            return command(*args, **words)
        except HpcenvError as problem:
            raise problem.changed(hint=tuple(map(_own_command, problem.hint_parts))) from problem

    return cast("_render.Decorated", _limit(with_own_command))


def _own_command(part: str | HintCommand) -> str | HintCommand:
    """Return the typed command with one more option, for a hint that says how to repeat a conversion.

    The code that raises the error does not have the typed command. So the hint of the error names `hpcenv image build`
    (for a project's image) or `hpcenv image pull` with --platform. This function replaces that command.
    """
    if isinstance(part, HintCommand):
        verb, rest = part[:3], part[3:]
        while rest[:1] in (("--store",), ("--trust",)):  # the typed command already has these options
            rest = rest[2:]
        if verb == ("hpcenv", "image", "build") and rest[:1] in ((), ("--limit",)):
            return HintCommand(*_render.command_line(), *rest)
        if verb == ("hpcenv", "image", "pull") and rest[-2:-1] == ("--platform",):
            return HintCommand(*_render.command_line(), *rest[-2:])
    return part


def convert_options(command: _render.Decorated) -> _render.Decorated:
    """Add the options of a conversion, which `chosen` reads."""
    for option in reversed(
        [
            click.option(
                "--builder",
                cls=RareOption,
                type=click.Choice(["auto", "hpcenv", "apptainer"]),
                default="auto",
                show_default=True,
                help="Program that writes the SIF. auto: hpcenv if a suitable squashfs-tools is on PATH, else "
                "apptainer build.",
            ),
            click.option(
                "--compression",
                cls=RareOption,
                type=click.Choice(["auto", "zstd", "gzip"]),
                default="auto",
                show_default=True,
                help="Compression of a new SIF. auto: gzip if SingularityCE starts the containers, because "
                "SingularityCE cannot read zstd; else zstd, because zstd is faster.",
            ),
            click.option(
                "--no-proof",
                cls=RareOption,
                is_flag=True,
                help="Do not compare the new SIF with the layers of the image.",
            ),
            limit,
        ]
    ):
        command = option(command)
    return command


def chosen(values: dict[str, Any]) -> ConvertOptions:
    """Return how to convert, from the options that `convert_options` added."""
    return ConvertOptions(
        builder=values["builder"],
        compression=values["compression"],
        prove=not values["no_proof"],
        limits=LayerLimits().raised(values["limits"]),
    )


def show_result(command: str, result: BuiltImage, *, as_json: bool, verify: str | None = None) -> int:
    """Print the result of a conversion, and return the exit status.

    Args:
        command: the name of the command, for --json.
        result: the SIF.
        as_json: print JSON.
        verify: the command that reads the SIF again and compares it with the layers.
    """
    record = result.record
    if as_json:
        data = {"path": result.path, "reused": result.reused, "read": result.read, "verify": verify}
        _render.success(command, {**data, "notes": result.notes, "record": record})
        return 0
    for note in result.notes:
        _render.tell(f"note: {note}")
    _render.tell(
        f"{record.digest} for {record.platform}: {', '.join((*_summary(result), size.shown(record.sif.size)))}"
    )
    if verify is not None and not result.read:
        _render.tell(f"to read it and compare it with the layers: {verify}")
    _render.say(str(result.path))
    return 0


def _summary(result: BuiltImage) -> tuple[str, ...]:
    record = result.record
    if result.reused:
        return ("already in the store", "its bytes are those in the record" if result.read else "not read again")
    made = f"made by {record.made.builder}"
    if record.references and record.references[0].startswith(f"{SifReference.scheme}://"):
        return "fetched as a finished SIF", f"tree {record.tree_sha256}"
    if record.tree_sha256 is not None:
        return made, f"tree {record.tree_sha256}"
    if record.manifest_digest is None:
        return f"{made} from a definition file", "which has no layers to compare with"
    return made, "not compared with the layers (--no-proof)"
