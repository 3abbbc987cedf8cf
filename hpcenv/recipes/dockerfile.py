"""Parser for Dockerfiles. Pure; standard library only.

Runs on: LOGIN NODE.

The parser follows Docker's Dockerfile reference (read 2026-11) and BuildKit's parser: parser directives, the `escape`
directive, comments and blank lines inside continued lines, here-documents of RUN, COPY and ADD, JSON and shell form,
build stages, and ARG values in FROM lines. `image/convert/definition.py` is the parser for definition files.

The parser runs no command and downloads nothing. For every text, it returns a result or raises a `SpecError`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcenv.errors import SpecError

# Dockerfiles are written by hand. A larger file cannot be a Dockerfile.
_MOST_CHARACTERS = 4 * 1024 * 1024
_MOST_INSTRUCTIONS = 20_000

_DIRECTIVE = re.compile(r"#[ \t]*(syntax|escape|check)[ \t]*=[ \t]*(\S.*?)[ \t]*", re.IGNORECASE)
_WITH_HEREDOC = re.compile(r"\s*(?:ONBUILD\s+)?(?:RUN|COPY|ADD)\b", re.IGNORECASE)
# Quoted text, escaped characters and `<<<` begin no here-document.
_HEREDOC = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|<<<|\d*<<(?P<dash>-?)(?P<quote>["']?)(?P<name>[A-Za-z0-9_.-]+)(?P=quote)""",
    re.DOTALL,
)
_FLAG = re.compile(r"\s*--([a-z][a-z0-9-]*)(?:=(\S*))?(?:[ \t]+|$)")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^{}]*))?\})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Heredoc:
    """A here-document. `line` is the number of the first line of the document's text."""

    name: str
    text: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """An instruction of a Dockerfile.

    Attributes:
        line: number of the instruction's first line, counted from 1.
        name: the instruction's name in upper case.
        flags: the `--name=value` words before the arguments, in order.
        arguments: the text after the flags. Continued lines are joined, but their line breaks stay. Comment lines
            between continued lines become empty lines.
        arguments_line: number of the line where the arguments begin.
        argv: the list of the JSON form; None for the shell form.
        heredocs: the here-documents, in order.
    """

    line: int
    name: str
    flags: tuple[tuple[str, str], ...] = ()
    arguments: str = ""
    arguments_line: int = 0
    argv: tuple[str, ...] | None = None
    heredocs: tuple[Heredoc, ...] = ()

    def flag(self, name: str) -> str | None:
        """Return the last value of a flag, None when the flag is not given."""
        return next((value for key, value in reversed(self.flags) if key == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildStage:
    """A build stage.

    Attributes:
        line: number of its FROM line.
        name: the name after `AS`; empty without a name.
        base: the image that FROM names, with ARG values filled in.
        base_known: whether all variables in `base` have a value in this file.
        parent: index of the earlier stage that `base` names; None if `base` is an image.
    """

    line: int
    name: str
    base: str
    base_known: bool
    parent: int | None
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dockerfile:
    """A Dockerfile: its parser directives, the ARG instructions before the first FROM, and its stages."""

    directives: Mapping[str, str]
    global_arguments: tuple[Instruction, ...]
    stages: tuple[BuildStage, ...]


def parse(text: str, *, origin: str = "Dockerfile", arguments: Mapping[str, str] | None = None) -> Dockerfile:
    """Parse a Dockerfile.

    Args:
        text: the whole file.
        origin: its path, for messages.
        arguments: values for ARG, instead of the defaults.

    Returns:
        The parsed file.

    Raises:
        SpecError: the file is too long, has no FROM, has an instruction before FROM that is not ARG, or has a
            here-document without an end.
    """
    if len(text) > _MOST_CHARACTERS:
        raise SpecError(
            f"`{origin}` is too long", why=f"it has {len(text)} characters, the limit is {_MOST_CHARACTERS}"
        )
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    directives = _directives(lines)
    escape = directives.get("escape", "\\")
    if escape not in ("\\", "`"):
        raise SpecError(f"`{origin}`: the escape directive is {escape[:20]!r}", why="Docker allows only \\ and `")
    instructions = tuple(_instructions(lines, len(directives), escape, origin))
    first = next((n for n, instruction in enumerate(instructions) if instruction.name == "FROM"), None)
    if first is None:
        raise SpecError(f"`{origin}` has no FROM", hint="a Dockerfile begins with FROM IMAGE@DIGEST")
    before = instructions[:first]
    early = next((instruction for instruction in before if instruction.name != "ARG"), None)
    if early is not None:
        raise SpecError(
            f"`{origin}`:{early.line}: the instruction {early.name[:40]} is before the first FROM",
            why="only ARG is allowed there",
        )
    stages = _stages(before, instructions[first:], arguments or {})
    return Dockerfile(directives=directives, global_arguments=before, stages=stages)


def _directives(lines: Sequence[str]) -> dict[str, str]:
    """Return the parser directives at the top of the file.

    The first line that is not a directive ends the directives.
    """
    directives: dict[str, str] = {}
    for line in lines:
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None or match[1].lower() in directives:
            break
        directives[match[1].lower()] = match[2]
    return directives


def _instructions(lines: Sequence[str], start: int, escape: str, origin: str) -> Iterator[Instruction]:
    # An escape character that is itself escaped does not continue the line.
    continues = re.compile(rf"(?:^|[^{re.escape(escape)}]){re.escape(escape)}[ \t]*$")
    position, count = start, 0
    while position < len(lines):
        if _is_empty(lines[position]):
            position += 1
            continue
        first = position
        logical, position = _logical_line(lines, position, continues)
        if not logical.strip():
            continue
        heredocs, position = _heredocs(logical, lines, position, origin)
        count += 1
        if count > _MOST_INSTRUCTIONS:
            raise SpecError(f"`{origin}` has more than {_MOST_INSTRUCTIONS} instructions")
        yield _instruction(logical, first + 1, heredocs)


def _is_empty(line: str) -> bool:
    stripped = line.strip()
    return not stripped or stripped.startswith("#")


def _logical_line(lines: Sequence[str], position: int, continues: re.Pattern[str]) -> tuple[str, int]:
    """Join a line with the lines that continue it. Return the text, and the position after the last of these lines."""
    parts: list[str] = []
    while position < len(lines):
        line = lines[position]
        position += 1
        if parts and _is_empty(line):
            # An empty line is kept, so that the numbers of later lines stay correct.
            parts.append("")
        elif continues.search(line):
            parts.append(line.rstrip(" \t")[:-1])
        else:
            parts.append(line)
            break
    return "\n".join(parts), position


def _heredocs(logical: str, lines: Sequence[str], position: int, origin: str) -> tuple[tuple[Heredoc, ...], int]:
    """Read the here-documents of an instruction. Return them, and the position after the last document."""
    if not _WITH_HEREDOC.match(logical) or "<<" not in logical:
        return (), position
    heredocs = []
    for start in _HEREDOC.finditer(logical):
        if start["name"] is None:
            continue
        begin, body = position, []
        while True:
            if position >= len(lines):
                raise SpecError(f"`{origin}`:{begin}: the here-document `{start['name']}` has no end")
            line = lines[position].lstrip("\t") if start["dash"] else lines[position]
            position += 1
            if line == start["name"]:
                break
            body.append(line)
        heredocs.append(Heredoc(name=start["name"], text="\n".join(body) + "\n", line=begin + 1))
    return tuple(heredocs), position


def _instruction(logical: str, line: int, heredocs: tuple[Heredoc, ...]) -> Instruction:
    # split(None, 1) would lose line breaks before the arguments, which are needed to count lines.
    match = re.match(r"\s*(\S+)[ \t]*", logical)
    assert match is not None
    rest, flags = logical[match.end() :], []
    while flag := _FLAG.match(rest):
        flags.append((flag[1], flag[2] or ""))
        rest = rest[flag.end() :]
    arguments = rest.strip()
    return Instruction(
        line=line,
        name=match[1].upper(),
        flags=tuple(flags),
        arguments=arguments,
        arguments_line=line + logical[: len(logical) - len(rest.lstrip())].count("\n"),
        argv=_json_form(arguments),
        heredocs=heredocs,
    )


def _json_form(arguments: str) -> tuple[str, ...] | None:
    """Return the list of the JSON form. If the arguments are not valid JSON, return None: they have the shell form."""
    if not arguments.startswith("["):
        return None
    try:
        argv = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return tuple(argv) if isinstance(argv, list) and all(isinstance(word, str) for word in argv) else None


def _stages(
    before: Sequence[Instruction], instructions: Sequence[Instruction], arguments: Mapping[str, str]
) -> tuple[BuildStage, ...]:
    values: dict[str, str] = {}
    for instruction in before:
        for name, value in assignments(instruction):
            if name in arguments:
                values[name] = arguments[name]
            elif value is not None:
                values[name] = expand(value, values)[0]
    stages: list[BuildStage] = []
    bodies: list[list[Instruction]] = []
    for instruction in instructions:
        if instruction.name == "FROM":
            stages.append(_stage(instruction, values, stages))
            bodies.append([])
        else:
            bodies[-1].append(instruction)
    return tuple(replace(stage, instructions=tuple(body)) for stage, body in zip(stages, bodies, strict=True))


def _stage(instruction: Instruction, values: Mapping[str, str], earlier: Sequence[BuildStage]) -> BuildStage:
    words = instruction.arguments.split()
    base, known = expand(words[0] if words else "", values)
    names = {stage.name.lower(): n for n, stage in enumerate(earlier) if stage.name}
    names |= {str(n): n for n in range(len(earlier))}
    return BuildStage(
        line=instruction.line,
        name=words[2] if len(words) >= 3 and words[1].upper() == "AS" else "",
        base=base,
        base_known=known,
        parent=names.get(base.lower()),
        instructions=(),
    )


def expand(text: str, values: Mapping[str, str]) -> tuple[str, bool]:
    """Fill in the values of `$NAME`, `${NAME}`, `${NAME:-word}` and `${NAME:+word}`.

    Returns:
        The text, and whether every variable had a value.
    """
    known = True

    def value_of(match: re.Match[str]) -> str:
        nonlocal known
        name, sign, word = match[1] or match[2], match[3] or "", match[4] or ""
        value = values.get(name)
        is_set = bool(value) if sign.startswith(":") else value is not None
        if sign.endswith("+"):
            return word if is_set else ""
        if is_set:
            return value or ""
        if sign.endswith("-"):
            return word
        known = False
        return ""

    return _VARIABLE.sub(value_of, text), known


def assignments(instruction: Instruction) -> tuple[tuple[str, str | None], ...]:
    """Return the names and values that ENV, ARG or LABEL sets, without quotes; None for an ARG without a value."""
    text = instruction.arguments.replace("\n", " ")
    words = split_words(text)
    if instruction.name == "ENV" and words and "=" not in words[0]:
        # The old form is `ENV NAME VALUE`. The value is the whole text after the first blank.
        name, _, value = text.partition(" ")
        return ((name, value.strip()),)
    pairs = (word.partition("=") for word in words)
    return tuple((name, value if equals else None) for name, equals, value in pairs)


def split_words(text: str) -> list[str]:
    """Split shell text into words and remove quotes. If the quotes do not match, split at blanks only."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
