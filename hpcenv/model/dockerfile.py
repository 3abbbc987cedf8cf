"""Dockerfiles, and shell commands in recipes, parsed. Pure; standard library only.

Runs on: LOGIN NODE.

Dockerfile: Docker's Dockerfile reference (read 2026-11) with the details of BuildKit's parser: parser
directives, `escape`, comments and blank lines inside continued lines, a continuation only after an
escape character that is not itself escaped, here-documents of RUN, COPY and ADD, JSON and shell form,
stages, and ARG values in FROM lines. Definition files: see `model/definition.py`.

Nothing is run or fetched, and any text gives a result or a `SpecError`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcenv.errors import SpecError

# A recipe is typed by people; more is no recipe.
_MOST_CHARACTERS = 4 * 1024 * 1024
_MOST_INSTRUCTIONS = 20_000

_DIRECTIVE = re.compile(r"#[ \t]*([A-Za-z][A-Za-z0-9_-]*)[ \t]*=[ \t]*(\S.*?)[ \t]*")
_HEREDOC = re.compile(r"(?P<fd>\d*)<<(?P<dash>-?)(?P<quote>[\"']?)(?P<name>[A-Za-z0-9_.-]+)(?P=quote)")
_WITH_HEREDOC = ("RUN", "COPY", "ADD")
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)(?:=(\S*))?(?:[ \t]+|$)")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^{}]*))?\})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Heredoc:
    """A here-document; `line` is where its text begins."""

    name: str
    text: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile.

    Attributes:
        line, end: first and last line, from 1.
        name: in upper case.
        flags: `--name=value` before the arguments, in order.
        arguments: the rest, continued lines joined, each with the line breaks it had.
        words: the list of the JSON form, None for the shell form.
        heredocs: in order.
        comments: comment lines directly before and inside, without `#`.
    """

    line: int
    end: int
    name: str
    flags: tuple[tuple[str, str], ...] = ()
    arguments: str = ""
    words: tuple[str, ...] | None = None
    heredocs: tuple[Heredoc, ...] = ()
    comments: tuple[tuple[int, str], ...] = ()

    def flag(self, name: str) -> str | None:
        """Return the last value of a flag, None when it is not given."""
        return next((value for key, value in reversed(self.flags) if key == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A build stage.

    Attributes:
        base: what FROM names with ARG values put in; `asked` is what stands there.
        known: False when a variable of `asked` has no value here.
        parent: index of the stage that `base` names, None for an image.
        comments: comment lines directly above FROM.
    """

    line: int
    name: str
    asked: str
    base: str
    known: bool
    platform: str
    parent: int | None
    instructions: tuple[Instruction, ...]
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Dockerfile:
    """A Dockerfile: parser directives, what stands before the first FROM, and the stages."""

    directives: Mapping[str, str]
    before: tuple[Instruction, ...]
    stages: tuple[Stage, ...]


# -- Dockerfile -----------------------------------------------------------------------------------------------------


def parse(text: str, *, origin: str = "Dockerfile") -> Dockerfile:
    """Parse a Dockerfile.

    Args:
        text: all of it.
        origin: its path, for messages.

    Raises:
        SpecError: too long, no FROM, an instruction before it, or a here-document without an end.
    """
    lines = _lines(text, origin)
    directives, start = _directives(lines)
    escape = directives.get("escape", "\\")
    if escape not in ("\\", "`"):
        raise SpecError(f"`{origin}`: the escape directive is {escape[:20]!r}", why="it can be \\ or ` only")
    instructions = tuple(_instructions(lines, start, escape, origin))
    first = next((n for n, one in enumerate(instructions) if one.name == "FROM"), None)
    if first is None:
        raise SpecError(f"`{origin}` has no FROM", hint="a Dockerfile begins with FROM IMAGE@DIGEST")
    before = instructions[:first]
    early = next((one for one in before if one.name != "ARG"), None)
    if early is not None:
        raise SpecError(f"`{origin}`:{early.line}: {early.name[:40]} stands before the first FROM", why="only ARG may")
    return Dockerfile(directives=directives, before=before, stages=_stages(before, instructions[first:]))


def _lines(text: str, origin: str) -> list[str]:
    if len(text) > _MOST_CHARACTERS:
        raise SpecError(f"`{origin}` has {len(text)} characters", why="that is no recipe that a person wrote")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")


def _directives(lines: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return the parser directives; they end at the first line that is none."""
    found: dict[str, str] = {}
    for number, line in enumerate(lines):
        match = _DIRECTIVE.fullmatch(line.strip())
        name = match[1].lower() if match else ""
        if match is None or name not in ("syntax", "escape", "check") or name in found:
            return found, number
        found[name] = match[2]
    return found, len(lines)


def _instructions(lines: Sequence[str], start: int, escape: str, origin: str) -> Iterator[Instruction]:
    continues = re.compile(rf"(?:^|[^{re.escape(escape)}]){re.escape(escape)}[ \t]*$")
    comments: list[tuple[int, str]] = []
    position, count = start, 0
    while position < len(lines):
        stripped = lines[position].strip()
        if not stripped or stripped.startswith("#"):
            # A comment belongs to what follows it; a blank line parts them.
            comments = [*comments, (position + 1, stripped[1:].strip())] if stripped else []
            position += 1
            continue
        first, parts = position, []
        while position < len(lines):
            line = lines[position]
            stripped = line.strip()
            if position > first and (not stripped or stripped.startswith("#")):
                if stripped:
                    comments.append((position + 1, stripped[1:].strip()))
                # Nothing of it is read, but the lines after it keep their numbers.
                parts.append("")
                position += 1
                continue
            position += 1
            if not continues.search(line):
                parts.append(line)
                break
            parts.append(line.rstrip(" \t")[:-1])
        logical = "\n".join(parts)
        if not logical.strip():
            continue
        heredocs, position = _heredocs(logical, lines, position, origin)
        count += 1
        if count > _MOST_INSTRUCTIONS:
            raise SpecError(f"`{origin}` has more than {_MOST_INSTRUCTIONS} instructions")
        yield _instruction(logical, first + 1, position, heredocs, tuple(comments))
        comments = []


def _heredocs(logical: str, lines: Sequence[str], position: int, origin: str) -> tuple[tuple[Heredoc, ...], int]:
    words = logical.split(None, 2)
    name = words[0].upper()
    if name == "ONBUILD" and len(words) > 1:
        name = words[1].upper()
    if name not in _WITH_HEREDOC or "<<" not in logical:
        return (), position
    found = []
    for start in _heredoc_starts(logical):
        begin, body = position, []
        while True:
            if position >= len(lines):
                raise SpecError(f"`{origin}`:{begin}: the here-document `{start['name']}` has no end")
            line = lines[position].lstrip("\t") if start["dash"] else lines[position]
            position += 1
            if line == start["name"]:
                break
            body.append(line)
        found.append(Heredoc(name=start["name"], text="\n".join(body) + "\n", line=begin + 1))
    return tuple(found), position


def _heredoc_starts(logical: str) -> Iterator[re.Match[str]]:
    """Find `<<EOF` outside of quotes: a `<<` inside a string starts nothing."""
    quote, position = "", 0
    while position < len(logical):
        char = logical[position]
        if quote:
            position += 2 if char == "\\" and quote == '"' else 1
            quote = "" if char == quote else quote
            continue
        if char in "\"'":
            quote = char
        elif logical.startswith("<<<", position):
            position += 3
            continue
        elif char == "\\":
            position += 2
            continue
        elif logical.startswith("<<", position):
            match = _HEREDOC.match(logical, position)
            if match:
                yield match
                position = match.end()
                continue
        position += 1


def _instruction(
    logical: str, line: int, end: int, heredocs: tuple[Heredoc, ...], comments: tuple[tuple[int, str], ...]
) -> Instruction:
    # Not split(None, 1): leading line breaks of the arguments count for line numbers.
    match = re.match(r"\s*(\S+)[ \t]*", logical)
    assert match is not None
    rest = logical[match.end() :]
    flags = []
    while flag := re.match(r"\s*" + _FLAG.pattern, rest):
        flags.append((flag[1], flag[2] or ""))
        rest = rest[flag.end() :]
    return Instruction(
        line=line,
        end=end,
        name=match[1].upper(),
        flags=tuple(flags),
        arguments=rest.rstrip(),
        words=_json_words(rest),
        heredocs=heredocs,
        comments=comments,
    )


def _json_words(arguments: str) -> tuple[str, ...] | None:
    """Return the list of the JSON form; what only looks like one is the shell form, as for Docker."""
    if not arguments.lstrip().startswith("["):
        return None
    try:
        words = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _stages(before: Sequence[Instruction], instructions: Sequence[Instruction]) -> tuple[Stage, ...]:
    values: dict[str, str] = {}
    for one in before:
        for name, value in assignments(one):
            if value is not None:
                values[name] = expand(value, values)[0]
    stages: list[Stage] = []
    body: list[list[Instruction]] = []
    for one in instructions:
        if one.name == "FROM":
            stages.append(_stage(one, values, stages))
            body.append([])
        else:
            body[-1].append(one)
    return tuple(replace(stage, instructions=tuple(inner)) for stage, inner in zip(stages, body, strict=True))


def _stage(one: Instruction, values: Mapping[str, str], earlier: Sequence[Stage]) -> Stage:
    words = one.arguments.split()
    asked = words[0] if words else ""
    base, known = expand(asked, values)
    name = words[2] if len(words) >= 3 and words[1].upper() == "AS" else ""
    names = {stage.name.lower(): n for n, stage in enumerate(earlier) if stage.name}
    names |= {str(n): n for n in range(len(earlier))}
    return Stage(
        line=one.line,
        name=name,
        asked=asked,
        base=base,
        known=known,
        platform=one.flag("platform") or "",
        parent=names.get(base.lower()),
        instructions=(),
        comments=tuple(text for _, text in one.comments),
    )


def expand(text: str, values: Mapping[str, str]) -> tuple[str, bool]:
    """Put values in for `$NAME`, `${NAME}`, `${NAME:-word}` and `${NAME:+word}`.

    Returns:
        The text, and whether every variable had a value.
    """
    known = True

    def put(match: re.Match[str]) -> str:
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

    return _VARIABLE.sub(put, text), known


def assignments(one: Instruction) -> tuple[tuple[str, str | None], ...]:
    """Return what ENV, ARG and LABEL set, quotes taken away; None for an ARG without a value."""
    text = one.arguments.replace("\n", " ")
    words = _words(text)
    if one.name == "ENV" and words and "=" not in words[0]:
        # The old form: one name, a blank, and all the rest is the value.
        name, _, value = text.strip().partition(" ")
        return ((name, value.strip()),)
    found: list[tuple[str, str | None]] = []
    for word in words:
        name, equals, value = word.partition("=")
        found.append((name, value if equals else None))
    return tuple(found)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


# -- shell ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A simple command of a shell script.

    Attributes:
        line: where its first word stands.
        words: quotes taken away; variables stay as they are written.
        after: what stands before it: `|`, `&&`, `;` and so on; empty at the beginning.
        comments: comment lines directly above it.
    """

    line: int
    words: tuple[str, ...]
    after: str = ""
    comments: tuple[str, ...] = ()


# Words that begin a command but are not one.
_KEYWORDS = frozenset({"if", "then", "else", "elif", "do", "while", "until", "!", "{", "(", "time", "exec"})


def commands(script: str, *, line: int = 1) -> tuple[Command, ...]:
    """Split a shell script into its simple commands, roughly: enough to see what it installs.

    Not a shell: here-documents are read as commands, substitutions stay text. Nothing is evaluated.

    Args:
        script: the text.
        line: of its first line, for the commands' own.
    """
    found: list[Command] = []
    comments: list[str] = []
    pending, start, after = "", line, ""
    for number, raw in enumerate(script.split("\n"), start=line):
        stripped = raw.strip()
        if not pending and (not stripped or stripped.startswith("#")):
            comments = [*comments, stripped[1:].strip()] if stripped else []
            continue
        if not pending:
            start = number
        if stripped.startswith("#"):
            comments.append(stripped[1:].strip())
            pending += "\n"
            continue
        if raw.rstrip().endswith("\\") and not raw.rstrip().endswith("\\\\"):
            pending += raw.rstrip()[:-1] + "\n"
            continue
        pieces, after = _split(pending + raw, start, after)
        found += [replace(piece, comments=tuple(comments)) for piece in pieces]
        pending, comments = "", []
    if pending.strip():
        pieces, _ = _split(pending, start, after)
        found += [replace(piece, comments=tuple(comments)) for piece in pieces]
    return tuple(found)


def _split(text: str, line: int, after: str) -> tuple[list[Command], str]:
    """Split one logical line at its operators; the last operator may join the next line."""
    found: list[Command] = []
    words: list[str] = []
    begin = line
    joined = after if after in ("|", "&&", "||") else ""
    for token, number in _tokens(text, line):
        if token.kind == "operator":
            if words:
                found.append(Command(line=begin, words=tuple(words), after=joined))
            words, joined = [], token.text
            continue
        if not words and token.text in _KEYWORDS:
            continue
        if not words:
            begin = number
        words.append(token.text)
    if words:
        found.append(Command(line=begin, words=tuple(words), after=joined))
        joined = ""
    return found, joined


@dataclass(frozen=True, kw_only=True, slots=True)
class _Token:
    kind: str
    text: str


def _tokens(text: str, line: int) -> Iterator[tuple[_Token, int]]:
    word: list[str] = []
    open_word, quote, position, begin = False, "", 0, line
    while position < len(text):
        char = text[position]
        if char == "\n":
            line += 1
        if quote:
            if char == quote:
                quote = ""
            elif char == "\\" and quote == '"' and position + 1 < len(text):
                position += 1
                word.append(text[position])
            else:
                word.append(char)
            position += 1
            continue
        operator = next(
            (one for one in ("&&", "||", ";;", "|&", ";", "|", "&", ")") if text.startswith(one, position)), ""
        )
        if char == "&" and (word[-1:] in ([">"], ["<"]) or text.startswith("&>", position)):
            operator = ""  # 2>&1 and &>file
        if operator or char.isspace() or (char == "#" and not open_word):
            if open_word:
                yield _Token(kind="word", text="".join(word)), begin
                word, open_word = [], False
            if char == "#":
                position = text.find("\n", position)
                if position < 0:
                    return
                continue
            if operator:
                yield _Token(kind="operator", text=operator), line
            position += max(len(operator), 1)
            continue
        if not open_word:
            open_word, begin = True, line
        if char in "\"'":
            quote = char
        elif char == "\\" and position + 1 < len(text):
            position += 1
            word.append(text[position])
        else:
            word.append(char)
        position += 1
    if open_word:
        yield _Token(kind="word", text="".join(word)), begin
