"""Mirrors and indexes of packages that the commands of a recipe leave in the image. Pure.

Runs on: LOGIN NODE. The commands are read as text and never run. A vendor's additional repository, for example for CUDA
or ROCm, is no mirror. A setting that a later command removes is not reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ReadCommand = tuple[int, tuple[str, ...], bool]
"""The line of a command, its words without quotes, and whether it reads from a pipe."""


class LeftSetting(NamedTuple):
    """A setting that a command leaves in the image.

    `key` is the file or the word that a command must name to remove the setting.
    """

    line: int
    what: str
    key: str


VARIABLE = re.compile(
    r"(?:PIP|UV)_(?:EXTRA_|DEFAULT_)?INDEX(?:_URL)?|CONDA_CHANNEL_ALIAS|HF_ENDPOINT|(?i:npm_config_registry)"
)
"""Variables that name an index or a mirror to pip, uv, conda, npm and the hub of Hugging Face."""

# `pip config set global.index-url URL`, `conda config --add channels URL`, `npm config set registry URL`. `key` is the
# word that `unset`, `--remove` and `delete` must name.
_CONFIGURES = (
    re.compile(r"\bpip[\d.]* (?:-\S+ )*config (?:-\S+ )*set (?:-\S+ )*(?P<key>\S*index-url)\b"),
    re.compile(
        r"\b(?:conda|mamba|micromamba) config (?:.* )?(?:channels|channel_alias|default_channels) (?P<key>\S*://\S+)"
    ),
    re.compile(r"\b(?:npm|pnpm|yarn) (?:config )?(?:-\S+ )*set (?:-\S+ )*(?P<key>registry)\b"),
)
_GIT = re.compile(
    r"\bgit config .*--(?:global|system)\b.* (?P<key>url\.(?P<new>\S+)\.insteadof) (?P<old>\S+)", re.IGNORECASE
)
_REMOVES = {"unset", "--unset", "--unset-all", "--remove", "delete"}

# Files with the settings of pip, of apt for the distribution itself, and of other programs. hpcenv does not read the
# files that a recipe copies, so only the first two kinds count for a copy.
_PIP_FILE = r"/etc/(?:xdg/pip/)?pip\.conf|\.(?:config/)?pip/pip\.conf|env/pip\.conf"
_APT_FILE = r"/etc/apt/sources\.list(?:\.d/(?:debian|ubuntu)\.sources)?"
_OTHER_FILE = r"/etc/apt/sources\.list\.d/[^\s'\"|]+|/etc/yum\.repos\.d/[^\s'\"|]+|\.?condarc|npmrc|/uv/uv\.toml"
_COPIED = re.compile(rf"(?:{_PIP_FILE}|{_APT_FILE})$")
_FILE = re.compile(rf"[^\s'\"=>|]*(?:{_PIP_FILE}|{_APT_FILE}|{_OTHER_FILE})(?![\w.])")
_VENDORS = re.compile(r"/etc/(?:apt/sources\.list\.d/(?!(?:debian|ubuntu)\.sources)|yum\.repos\.d/)")

_SERVER = re.compile(r"(?i)(?:https?|mirror)://|\$\{?\w*mirror")
# A server with the packages of the distribution itself, and not with the packages of a vendor.
_DISTRIBUTION_SERVER = re.compile(r"(?i)://[^/\s]+/(?:debian|ubuntu)(?:-\w+)?(?![\w/-])|mirror")
_SUBSTITUTION = re.compile(r"(?<!\w)s([^\w\s\\;.-])(.*?)\1(.*?)\1")
_HOST = re.compile(r"(?:[\w-]+\\?\.)+[a-z]{2,}", re.IGNORECASE)


def copied(source: str, destination: str) -> str | None:
    """Return the file with settings of pip or apt that a copy writes; None for another file."""
    path = destination + source.rsplit("/", 1)[-1] if destination.endswith("/") else destination
    return _from_home(path) if _COPIED.search(path) else None


def left(commands: Sequence[ReadCommand], lines: Sequence[str]) -> Iterator[LeftSetting]:
    """Yield the settings that the commands of one stage make and that no later command removes.

    Args:
        commands: the commands of the stage, in order.
        lines: the lines of the recipe, for here-documents.
    """
    for n, command in enumerate(commands):
        found = _configured(command) or _written(commands, n, lines)
        if found is not None and not removed(found, commands[n + 1 :]):
            yield found


def removed(setting: LeftSetting, commands: Sequence[ReadCommand]) -> bool:
    """Return whether a command after the setting removes or replaces it."""
    return any(line >= setting.line and _removes(argv, setting.key) for line, argv, _ in commands)


def _removes(argv: Sequence[str], key: str) -> bool:
    if _REMOVES & {*argv}:
        return key in argv
    program, paths = argv[0].rsplit("/", 1)[-1], [_from_home(word).rstrip("/*") for word in argv[1:]]
    if program in ("rm", "unlink"):
        return any(path and (key == path or key.startswith(f"{path}/")) for path in paths)
    return program in ("mv", "cp") and paths[-1:] == [key]


def _configured(command: ReadCommand) -> LeftSetting | None:
    """Return the setting that `pip config`, `conda config`, `npm config` or `git config` makes."""
    line, argv, _ = command
    text = " ".join(argv)
    for pattern in _CONFIGURES:
        if match := pattern.search(text):
            return LeftSetting(line, f"`{_without_login(text)[:80]}` stays in the image", match["key"])
    match = _GIT.search(text)
    # git@HOST and https://HOST name the same server.
    if match and _domains(match["new"]) - _domains(match["old"]):
        return LeftSetting(line, f"`{_without_login(text)[:80]}` stays in the image", match["key"])
    return None


def _written(commands: Sequence[ReadCommand], n: int, lines: Sequence[str]) -> LeftSetting | None:
    """Return the file with a server that a command writes."""
    line, argv, _ = commands[n]
    text, program = " ".join(argv), argv[0].rsplit("/", 1)[-1]
    if program == "sed":
        file = _FILE.search(text)
        names_server = file is not None and bool(re.search(r" (?:-\w*i|--in-place)", text)) and _puts_server(text)
    else:
        target = text if program == "tee" else text.partition(">")[2]
        file, content = _FILE.search(target), _content(commands, n, lines)
        if file is None and ">" in text and re.search(rf"\b(?:{VARIABLE.pattern})=\S*://", content):
            return LeftSetting(line, f"`{program}` writes the variable of an index into a file", target.lstrip("> "))
        pattern = _DISTRIBUTION_SERVER if file is not None and _VENDORS.search(file[0]) else _SERVER
        names_server = program in ("echo", "printf", "cat", "tee", "}", ")") and pattern.search(content) is not None
    if file is None or not names_server:
        return None
    key = _from_home(file[0])
    return LeftSetting(line, f"`{program}` writes a server into {key[:80]}", key)


def _content(commands: Sequence[ReadCommand], n: int, lines: Sequence[str]) -> str:
    """Return the text that a command writes: words of the command, a here-document, or the output of a pipe."""
    line, argv, piped = commands[n]
    text = " ".join(argv)
    if here := re.search(r"<<-?\s*(\w+)", text):
        body = lines[line:]
        return "\n".join(body[: next((k for k, one in enumerate(body) if one.strip() == here[1]), 0)])
    if piped and n:
        return " ".join(commands[n - 1][1])
    if argv[0] not in ("}", ")"):
        return text
    before = [" ".join(one[1]) for one in commands[:n]]
    first = next((k for k in range(n, 0, -1) if not re.match(r"echo|printf|cat", before[k - 1])), 0)
    return "\n".join(before[first:])


def _puts_server(script: str) -> bool:
    """Return whether a sed script replaces a server by another server."""
    pairs = [(match[2], match[3]) for match in _SUBSTITUTION.finditer(script)]
    if not pairs:
        return _SERVER.search(script) is not None
    return any(_domains(new) - _domains(old) or re.search(r"(?i)\$\{?\w*mirror", new) for old, new in pairs)


def _domains(text: str) -> set[str]:
    """Return the domains of the hosts in a text: `example.org` for `http://packages.example.org/debian`."""
    return {".".join(host.replace("\\", "").lower().split(".")[-2:]) for host in _HOST.findall(text)}


def _from_home(path: str) -> str:
    return re.sub(r"^(?:~|\$HOME|\$\{HOME\})(?=/)", "/root", path)


def _without_login(text: str) -> str:
    return re.sub(r"://[^/\s@]*@", "://***@", text)
