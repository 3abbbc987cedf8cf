"""What is wrong with a Dockerfile or a definition file. Pure.

Runs on: LOGIN NODE.

Both are brought into one form (stages with their scripts, variables and copied files), and the rules of
`model/image_lint.py` look at that. Shell commands are read, never run, and only as far as they are plain: what a
variable or a substitution does at build time is not known here, and nothing is said about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from hpcenv.errors import SpecError
from hpcenv.model import definition as definition_file
from hpcenv.model import dockerfile as syntax
from hpcenv.model.dockerfile import Command
from hpcenv.model.image_lint import (
    RULES,
    SEVERITIES,
    Finding,
    Trouble,
    allowed,
    finding,
    secret_file,
    secret_name,
    secrets_in,
    troubles_of,
)

# -- one form for both kinds of recipe ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Script:
    """Shell commands that make one layer (RUN) or all of a stage (%post)."""

    line: int
    commands: tuple[Command, ...]
    cached: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    line: int
    kind: Literal["ENV", "ARG"]
    name: str
    value: str | None
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    line: int
    sources: tuple[str, ...]
    destination: str
    from_stage: bool
    adds: bool
    checksum: bool
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """Any text that a secret may stand in."""

    line: int
    text: str
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    line: int
    name: str
    base: str
    base_known: bool
    pulled: bool
    platform: str
    parent: int | None
    user: tuple[int, str] | None
    runs_as_caller: bool
    scripts: tuple[_Script, ...]
    settings: tuple[_Setting, ...]
    copies: tuple[_Copy, ...]
    texts: tuple[_Text, ...]
    comments: tuple[str, ...]


def lint_dockerfile(text: str, *, origin: str, troubles: Sequence[Trouble] = ()) -> tuple[Finding, ...]:
    """Judge a Dockerfile.

    Raises:
        SpecError: it cannot be parsed.
    """
    parsed = syntax.parse(text, origin=origin)
    stages = [_docker_stage(stage) for stage in parsed.stages]
    before = [
        _Setting(line=one.line, kind="ARG", name=name, value=value, comments=_said(one))
        for one in parsed.before
        for name, value in syntax.assignments(one)
    ]
    stages[0] = replace(stages[0], settings=(*before, *stages[0].settings))
    return _judge(stages, origin, troubles)


def lint_definition(text: str, *, origin: str, troubles: Sequence[Trouble] = ()) -> tuple[Finding, ...]:
    """Judge a definition file.

    Raises:
        SpecError: it cannot be parsed.
    """
    parsed = definition_file.parse(text, origin=f"`{origin}`")
    for number, line in parsed.stray:
        raise SpecError(
            f"`{origin}`:{number}: {line.strip()[:60]!r} belongs to no section",
            why="a definition file begins with `Bootstrap:`, then come `NAME: VALUE` and sections, `%NAME`",
        )
    lines = text.replace("\r\n", "\n").split("\n")
    stages = [_definition_stage(stage, parsed, lines) for stage in parsed.stages]
    return _judge(stages, origin, troubles)


def _said(one: syntax.Instruction) -> tuple[str, ...]:
    return tuple(text for _, text in one.comments)


def _docker_stage(stage: syntax.Stage) -> _Stage:
    scripts, settings, copies, texts = [], [], [], []
    user = None
    for one in stage.instructions:
        comments = _said(one)
        if one.name not in ("ENV", "ARG"):
            texts.append(_Text(line=one.line, text=one.arguments, comments=comments))
        if one.name == "RUN":
            scripts.append(_run_script(one, comments))
            texts += [_Text(line=doc.line, text=doc.text, comments=comments) for doc in one.heredocs]
        elif one.name in ("ENV", "ARG"):
            kind: Literal["ENV", "ARG"] = "ENV" if one.name == "ENV" else "ARG"
            settings += [
                _Setting(line=one.line, kind=kind, name=name, value=value, comments=comments)
                for name, value in syntax.assignments(one)
            ]
        elif one.name in ("COPY", "ADD"):
            copies.append(_docker_copy(one, comments))
        elif one.name == "USER":
            user = (one.line, one.arguments.strip())
    return _Stage(
        line=stage.line,
        name=stage.name,
        base=stage.base,
        base_known=stage.known,
        pulled=stage.parent is None and stage.base.lower() != "scratch",
        platform=stage.platform,
        parent=stage.parent,
        user=user,
        runs_as_caller=False,
        scripts=tuple(scripts),
        settings=tuple(settings),
        copies=tuple(copies),
        texts=tuple(texts),
        comments=stage.comments,
    )


def _run_script(one: syntax.Instruction, comments: tuple[str, ...]) -> _Script:
    found: list[Command] = []
    if one.words is not None:
        found = list(_of_words(one.words, one.line))
    else:
        # A continuation is joined without a line break; the backslash keeps the line numbers.
        stripped = one.arguments.lstrip()
        line = one.line + one.arguments[: len(one.arguments) - len(stripped)].count("\n")
        text = stripped.replace("\n", "\\\n")
        is_shell = re.fullmatch(r"\s*(?:(?:/usr)?/bin/)?(?:(?:ba|da)?sh\b[^<]*)?<<.*", text, re.DOTALL)
        if not (one.heredocs and is_shell):
            found = list(syntax.commands(text, line=line))
        for doc in one.heredocs if is_shell else ():
            found += syntax.commands(doc.text, line=doc.line)
    caches = [value for name, value in one.flags if name == "mount" and "type=cache" in value]
    targets = [part[7:] for value in caches for part in value.split(",") if part.startswith("target=")]
    return _Script(line=one.line, commands=_resolved(found), cached=tuple(targets), comments=comments)


def _of_words(words: Sequence[str], line: int) -> tuple[Command, ...]:
    if len(words) >= 3 and words[0].rsplit("/", 1)[-1] in ("sh", "bash", "dash") and "c" in words[1]:
        return syntax.commands(words[2], line=line)
    return (Command(line=line, words=tuple(words)),) if words else ()


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def _resolved(found: Iterable[Command]) -> tuple[Command, ...]:
    """Put in what a script's own variables say where one stands for a program: `$apt install`."""
    values: dict[str, str] = {}
    commands = []
    for one in found:
        words = list(one.words)
        for word in words:
            match = _ASSIGNMENT.fullmatch(word)
            if match is None:
                break
            values[match[1]] = syntax.expand(match[2], values)[0]
        if words and words[0].startswith("$"):
            words[:1] = syntax.expand(words[0], values)[0].split() or words[:1]
        commands.append(replace(one, words=tuple(words)))
    return tuple(commands)


def _docker_copy(one: syntax.Instruction, comments: tuple[str, ...]) -> _Copy:
    words = list(one.words) if one.words is not None else one.arguments.split()
    words = [word for word in words if not word.startswith("<<")]
    return _Copy(
        line=one.line,
        sources=tuple(words[:-1]) if len(words) > 1 else (),
        destination=words[-1] if words else "",
        from_stage=one.flag("from") is not None,
        adds=one.name == "ADD",
        checksum=one.flag("checksum") is not None,
        comments=comments,
    )


def _definition_stage(stage: definition_file.Stage, parsed: definition_file.Definition, lines: Sequence[str]) -> _Stage:
    scripts: list[_Script] = []
    settings: list[_Setting] = []
    copies: list[_Copy] = []
    texts: list[_Text] = []
    for section in stage.sections:
        if section.name == "post":
            comments = _comments_above(lines, section.line)
            found = syntax.commands(section.text, line=section.line + 1)
            scripts.append(_Script(line=section.line, commands=_resolved(found), comments=comments))
        elif section.name == "environment":
            settings += _exports(section)
        elif section.name == "files":
            copies += _files(section)
        for number, text in section.lines if section.name != "environment" else ():
            if not text.strip().startswith("#"):
                texts.append(_Text(line=number, text=text, comments=_comments_above(lines, number)))
    agent = stage.header("bootstrap").lower()
    base, known = _with_arguments(stage.header("from"), parsed.arguments)
    return _Stage(
        line=stage.line,
        name=stage.header("stage"),
        base=base,
        base_known=known,
        pulled=agent in ("docker", "library", "oras", "shub"),
        platform="",
        parent=None,
        user=None,
        runs_as_caller=True,
        scripts=tuple(scripts),
        settings=tuple(settings),
        copies=tuple(copies),
        texts=tuple(texts),
        comments=_comments_above(lines, stage.line),
    )


def _with_arguments(text: str, arguments: Mapping[str, str]) -> tuple[str, bool]:
    """Put in the defaults of build arguments: `{{ NAME }}`."""
    known = True

    def put(match: re.Match[str]) -> str:
        nonlocal known
        known = known and match[1] in arguments
        return arguments.get(match[1], "")

    return re.sub(r"\{\{\s*(\w+)\s*\}\}", put, text), known


def _comments_above(lines: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the comment lines directly above line `number` (from 1)."""
    found: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not line.strip().startswith("#"):
            break
        found.insert(0, line.strip()[1:].strip())
    return tuple(found)


def _exports(section: definition_file.Section) -> Iterator[_Setting]:
    for command in syntax.commands(section.text, line=section.line + 1):
        words = command.words[1:] if command.words[:1] == ("export",) else command.words
        for word in words:
            match = _ASSIGNMENT.fullmatch(word)
            if match is not None:
                yield _Setting(line=command.line, kind="ENV", name=match[1], value=match[2], comments=command.comments)


def _files(section: definition_file.Section) -> Iterator[_Copy]:
    from_stage = section.arguments.lower().startswith("from ")
    comments: list[str] = []
    for number, line in section.lines:
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            comments = [*comments, stripped[1:].strip()] if stripped else []
            continue
        words = stripped.split()
        yield _Copy(
            line=number,
            sources=(words[0],),
            destination=words[-1],
            from_stage=from_stage,
            adds=False,
            checksum=False,
            comments=tuple(comments),
        )
        comments = []


# -- judging a recipe -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    """Where a rule looks: the recipe, and which stages end in the image."""

    origin: str
    stages: tuple[_Stage, ...]
    kept: frozenset[int]
    troubles: tuple[Trouble, ...]

    def settings(self, number: int) -> dict[str, str]:
        """Return the variables of a stage with those of the stages it starts from."""
        stage = self.stages[number]
        below = {} if stage.parent is None else self.settings(stage.parent)
        return below | {one.name: one.value or "" for one in stage.settings if one.value is not None}


def _judge(stages: Sequence[_Stage], origin: str, troubles: Sequence[Trouble]) -> tuple[Finding, ...]:
    kept, last = set(), len(stages) - 1
    number: int | None = last
    while number is not None:
        kept.add(number)
        number = stages[number].parent
    context = _Context(origin=origin, stages=tuple(stages), kept=frozenset(kept), troubles=tuple(troubles))
    found: list[Finding] = []
    for number, stage in enumerate(stages):
        accepted = allowed(stage.comments)
        inside = [*_judge_base(context, stage), *_judge_stage(context, number, stage)]
        if number == last:
            inside += _judge_result(context, number, stage)
        found += [_accept(one, accepted) for one in inside]
        found += _without_reason(context, stage)
    return tuple(
        sorted(dict.fromkeys(found), key=lambda one: (one.line or 0, SEVERITIES.index(one.severity), one.rule))
    )


def _accept(found: Finding, accepted: Mapping[str, str]) -> Finding:
    reason = accepted.get(found.rule)
    return found if not reason or found.allowed else replace(found, allowed=reason)


def _without_reason(context: _Context, stage: _Stage) -> Iterator[Finding]:
    places = [(stage.line, stage.comments)]
    places += [(script.line, script.comments) for script in stage.scripts]
    places += [(setting.line, setting.comments) for setting in stage.settings]
    places += [(copy.line, copy.comments) for copy in stage.copies]
    places += [(command.line, command.comments) for script in stage.scripts for command in script.commands]
    for line, comments in dict.fromkeys(places):
        for rule, reason in allowed(comments).items():
            if rule not in RULES:
                yield finding("allow-without-reason", context.origin, f"`{rule}` is no rule", line=line)
            elif not reason:
                yield finding(
                    "allow-without-reason", context.origin, f"`{rule}` is allowed without a reason", line=line
                )


def _judge_base(context: _Context, stage: _Stage) -> Iterator[Finding]:
    if stage.platform and "$" not in stage.platform:
        what = f"FROM asks for the platform {stage.platform[:60]}"
        yield finding("platform-fixed", context.origin, what, line=stage.line, place=stage.name)
    if not stage.pulled:
        return
    if not stage.base_known or not stage.base:
        yield finding("base-unknown", context.origin, "the base cannot be told", line=stage.line, place=stage.name)
        return
    base = stage.base.partition("://")[2] or stage.base
    name, at, digest = base.partition("@")
    if at and re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        return
    tag = name.rsplit("/", 1)[-1].partition(":")[2]
    if not tag or tag in ("latest", "stable", "main", "master", "nightly", "edge", "rolling"):
        what = f"the base `{base[:200]}` {'names no tag' if not tag else f'has the tag `{tag}`'}"
        yield finding("base-floating", context.origin, what, line=stage.line, place=stage.name)
    else:
        what = f"the base `{base[:200]}` has no digest"
        yield finding("base-no-digest", context.origin, what, line=stage.line, place=stage.name)


def _judge_stage(context: _Context, number: int, stage: _Stage) -> Iterator[Finding]:
    settings = context.settings(number)
    for setting in stage.settings:
        yield from _judge_setting(context, stage, setting)
    for copy in stage.copies:
        accepted = allowed(copy.comments)
        yield from (_accept(one, accepted) for one in _judge_copy(context, stage, copy))
    for text in stage.texts:
        for kind in secrets_in(text.text):
            what = f"the text holds {kind}"
            one = finding("secret-in-file", context.origin, what, line=text.line, place=stage.name)
            yield _accept(one, allowed(text.comments))
    for script in stage.scripts:
        above = allowed(script.comments)
        for one, comments in _judge_script(context, number, stage, script, settings):
            yield _accept(_accept(one, allowed(comments)), above)


def _judge_setting(context: _Context, stage: _Stage, setting: _Setting) -> Iterator[Finding]:
    accepted = allowed(setting.comments)
    value = setting.value
    if value is not None and (secret_name(setting.name, value) or secrets_in(value)):
        what = f"{setting.kind} {setting.name[:60]} holds a secret"
        one = finding("secret-in-environment", context.origin, what, line=setting.line, place=stage.name)
        yield _accept(one, accepted)
    elif value is None and secret_name(setting.name, "value"):
        what = f"ARG {setting.name[:60]} asks for a secret"
        one = finding("secret-as-argument", context.origin, what, line=setting.line, place=stage.name)
        yield _accept(one, accepted)


def _judge_copy(context: _Context, stage: _Stage, copy: _Copy) -> Iterator[Finding]:
    where: dict[str, Any] = {"line": copy.line, "place": stage.name}
    for source in copy.sources:
        if copy.adds and re.match(r"(?i)(https?|ftp)://", source) and not copy.checksum:
            yield finding("add-url", context.origin, f"ADD fetches {_shown_url(source)}", **where)
        holds = None if copy.from_stage else secret_file(source) or secret_file(copy.destination)
        if holds:
            yield finding("secret-in-file", context.origin, f"{source[:100]} holds {holds}", **where)


def _shown_url(url: str) -> str:
    return re.sub(r"://[^/@]*@", "://***@", url.partition("?")[0])[:150]


def _judge_script(
    context: _Context, number: int, stage: _Stage, script: _Script, settings: Mapping[str, str]
) -> Iterator[tuple[Finding, tuple[str, ...]]]:
    environ = dict(settings)
    removed = _removed(script.commands)
    for position, command in enumerate(script.commands):
        words = _program(command, environ)
        if not words:
            continue
        where: dict[str, Any] = {"line": command.line, "place": stage.name}
        for rule, what in _judge_command(context, number, script, words, environ, removed):
            yield finding(rule, context.origin, what, **where), command.comments
        if _is_shell(words) and command.after == "|" and position and _fetches(script.commands[position - 1]):
            what = f"`{script.commands[position - 1].words[0][:40]} ... | {words[0][:40]}` runs what a server sends"
            yield finding("pipe-to-shell", context.origin, what, **where), command.comments
        for name, version in _asked_of_pip(words):
            for _, trouble in troubles_of(context.troubles, {name: version}):
                yield (
                    finding(
                        "known-trouble",
                        context.origin,
                        f"{name}{f' {version}' if version else ''} has known trouble",
                        **where,
                        why=f"{trouble.why} ({trouble.source})",
                        advice=trouble.advice,
                    ),
                    command.comments,
                )


def _program(command: Command, environ: dict[str, str]) -> tuple[str, ...]:
    """Return the words from the program on; assignments before it, and exports, are remembered."""
    words = list(command.words)
    while words:
        match = _ASSIGNMENT.fullmatch(words[0])
        if match is not None:
            environ[match[1]] = match[2]
            words.pop(0)
        elif words[0] in ("sudo", "env", "nice", "command", "eatmydata") and len(words) > 1:
            words.pop(0)
            while words and words[0].startswith("-"):
                words.pop(0)
        elif words[0] == "export":
            environ |= {m[1]: m[2] for word in words[1:] if (m := _ASSIGNMENT.fullmatch(word))}
            return ()
        else:
            break
    return tuple(words)


def _judge_command(
    context: _Context,
    number: int,
    script: _Script,
    words: tuple[str, ...],
    environ: Mapping[str, str],
    removed: tuple[str, ...],
) -> Iterator[tuple[str, str]]:
    """Yield (rule, what) for one command."""
    tool = words[0].rsplit("/", 1)[-1]
    verbs = [word for word in words[1:] if not word.startswith("-")]
    kept = number in context.kept
    upgrade = {"apt-get": ("upgrade", "dist-upgrade"), "apt": ("upgrade", "full-upgrade"), "apk": ("upgrade",)}
    if tool in upgrade and any(verb in verbs for verb in upgrade[tool]):
        yield "unpinned-upgrade", f"`{tool} {next(v for v in verbs if v in upgrade[tool])}`"
    if tool in ("dnf", "yum", "microdnf") and verbs in (["update"], ["upgrade"]):
        yield "unpinned-upgrade", f"`{tool} {verbs[0]}`"
    cache = _cache_of(tool, words, verbs, environ)
    if kept and cache is not None:
        folder, name = cache
        mounted = any(folder.startswith(target.rstrip("/")) for target in script.cached)
        if not mounted and not any(_covers(pattern, folder) for pattern in removed):
            yield "cache-left", f"`{name}` leaves {folder} in the layer"
    arguments = _pip_arguments(words)
    if arguments is not None:
        problem = _pip_problem(arguments, environ)
        if problem:
            yield "pip-no-hashes", problem
        if "--user" in arguments:
            yield "private-folder", "`pip install --user` puts packages below the home folder of who builds"
    if tool in ("chmod", "install", "mkdir"):
        private = _made_private(tool, words)
        if private:
            yield "private-folder", f"`{private[:80]}` can be read by its owner only"
    prefix = next((word for word in words if re.search(r"(^|=)/root/[\w./-]*(conda|mamba|venv|env)", word)), None)
    if prefix is not None and kept and tool not in ("rm", "echo", "export"):
        yield "private-folder", f"`{prefix[:80]}` lies below /root, which only root can read"


def _cache_of(
    tool: str, words: Sequence[str], verbs: Sequence[str], environ: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return the cache that a command fills, and its name for a person."""
    if tool in ("apt-get", "apt") and ("update" in verbs or "install" in verbs):
        # Without `update` the lists are those of the base, or of an earlier RUN that was judged.
        return ("/var/lib/apt/lists", f"{tool} update") if "update" in verbs else None
    if tool in ("dnf", "yum", "microdnf") and verbs[:1] == ["install"]:
        return "/var/cache/dnf" if tool != "yum" else "/var/cache/yum", f"{tool} install"
    if tool == "apk" and verbs[:1] == ["add"] and "--no-cache" not in words:
        return "/var/cache/apk", "apk add"
    if tool in ("conda", "mamba", "micromamba") and verbs[:1] and verbs[0] in ("install", "create", "env", "update"):
        return "/opt/conda/pkgs", f"{tool} {verbs[0]}"
    arguments = _pip_arguments(words)
    if arguments is None or "--no-cache-dir" in words or "--no-cache" in words:
        return None
    off = environ.get("PIP_NO_CACHE_DIR", "") not in ("", "0", "false", "off", "no")
    if tool == "uv":
        return (
            None if environ.get("UV_NO_CACHE", "") not in ("", "0", "false") else ("/root/.cache/uv", "uv pip install")
        )
    return None if off else ("/root/.cache/pip", "pip install")


def _removed(found: Iterable[Command]) -> tuple[str, ...]:
    """Return what a script removes at its end, and the caches that tools empty themselves."""
    patterns: list[str] = []
    for command in found:
        words = _program(command, {})
        tool = words[0].rsplit("/", 1)[-1] if words else ""
        if tool == "rm":
            patterns += [word for word in words[1:] if not word.startswith("-")]
        elif tool in ("dnf", "yum", "microdnf") and "clean" in words:
            patterns += ["/var/cache/dnf", "/var/cache/yum"]
        elif tool in ("conda", "mamba", "micromamba") and "clean" in words:
            patterns += ["/opt/conda/pkgs"]
        elif tool in ("pip", "pip3") and "cache" in words and "purge" in words:
            patterns += ["/root/.cache/pip"]
    return tuple(patterns)


def _covers(pattern: str, folder: str) -> bool:
    """Say whether removing `pattern` empties `folder`."""
    plain = re.sub(r"^(~|\$HOME|\$\{HOME\})(?=/|$)", "/root", pattern)
    plain = re.sub(r"/(\*|\{\*,\.\*\}|\.\*)?$", "", plain)
    return bool(plain) and (folder == plain or folder.startswith(plain + "/"))


_PIP_WITH_VALUE = {
    "-r", "--requirement", "-c", "--constraint", "-i", "--index-url", "--extra-index-url", "-f", "--find-links",
    "-t", "--target", "--prefix", "--root", "--python", "-p", "--report", "--platform", "--python-version",
    "--implementation", "--abi", "--cache-dir", "--timeout", "--retries", "--proxy", "--cert", "--only-binary",
    "--no-binary", "--src", "--progress-bar", "--upgrade-strategy", "--config-settings", "--global-option",
    "--trusted-host", "--log", "--exists-action", "--index", "--default-index", "-C", "-e", "--editable",
    "--index-strategy", "--torch-backend",
}  # fmt: skip


def _pip_arguments(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return what follows `pip install`, None for another command."""
    tool = words[0].rsplit("/", 1)[-1]
    rest = list(words[1:])
    if re.fullmatch(r"python(\d(\.\d+)?)?|\$\{?\w*PYTHON\w*\}?", tool, re.IGNORECASE):
        if "-m" not in rest or rest.index("-m") + 1 >= len(rest) or rest[rest.index("-m") + 1] != "pip":
            return None
        rest = rest[rest.index("-m") + 2 :]
    elif tool == "uv":
        if rest[:1] != ["pip"]:
            return None
        rest = rest[1:]
    elif not re.fullmatch(r"pip(\d(\.\d+)?)?", tool):
        return None
    while rest and rest[0] != "install":
        if not rest[0].startswith("-"):
            return None
        rest = rest[2:] if rest[0] in _PIP_WITH_VALUE else rest[1:]
    return tuple(rest[1:]) if rest else None


def _pip_names(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return what is named to pip install, and whether a requirements file or an editable is."""
    names, files, position = [], False, 0
    while position < len(arguments):
        word = arguments[position]
        if word in _PIP_WITH_VALUE:
            files = files or word in ("-r", "--requirement")
            position += 2
            continue
        if (word.startswith("-r") and not word.startswith("--")) or word.startswith("--requirement="):
            files = True
        elif not word.startswith("-") and not re.match(r"\d?>|<", word):
            names.append(word)
        position += 1
    return names, files


def _pip_problem(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    if "--require-hashes" in arguments or environ.get("PIP_REQUIRE_HASHES", "") in ("1", "true", "on", "yes"):
        return ""
    names, files = _pip_names(arguments)
    # A folder of the context, without what it needs, comes from where the recipe does.
    foreign = [name for name in names if not re.match(r"\.{0,2}/|\.$|\.\[|/", name)]
    if not foreign and not files and ("--no-deps" in arguments or "--no-index" in arguments):
        return ""
    if not names and not files:
        return ""
    return f"`pip install {' '.join(_shown_url(name) for name in names[:3]) or '-r ...'}` compares no hashes"


def _asked_of_pip(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the packages that a command asks pip for, with the version where it is one."""
    arguments = _pip_arguments(words)
    for name in _pip_names(arguments)[0] if arguments is not None else ():
        try:
            asked = Requirement(name)
        except InvalidRequirement:
            continue
        exact = [one.version for one in asked.specifier if one.operator in ("==", "===") and "*" not in one.version]
        yield canonicalize_name(asked.name), exact[0] if len(exact) == 1 else None


def _is_shell(words: Sequence[str]) -> bool:
    return words[0].rsplit("/", 1)[-1] in ("sh", "bash", "dash", "zsh", "python", "python3")


def _fetches(command: Command) -> bool:
    return any(word.rsplit("/", 1)[-1] in ("curl", "wget") for word in command.words[:2])


def _made_private(tool: str, words: Sequence[str]) -> str | None:
    """Return a folder that a command closes to others, None for none."""
    text = " ".join(words)
    mode = re.search(r"(?:^|\s|-m\s*|--mode=)0?7[0-7]0\b" if tool == "chmod" else r"(?:-m\s*|--mode=)0?7[0-7]0\b", text)
    closes = mode is not None or (tool == "chmod" and re.search(r"\s(?:go|o|og)[-=](?:\s|rwx|rx)", text) is not None)
    paths = [word for word in words[1:] if word.startswith("/")]
    useful = [path for path in paths if re.match(r"/(opt|usr|srv|workspace|app|home|venv|conda)\b", path)]
    return useful[0] if closes and useful else None


# -- the image that comes of it -------------------------------------------------------------------------------------

# Official images that bring the user land of InfiniBand themselves.
_WITH_FABRIC = re.compile(r"^nvcr\.io/nvidia/(pytorch|nemo|tensorflow|jax|nemo-framework)|^rocm/")
_FABRIC_WORD = re.compile(r"^(libibverbs1?|ibverbs-providers|rdma-core|libibverbs-dev|libibverbs-utils)(=.*)?$")


def _judge_result(context: _Context, number: int, stage: _Stage) -> Iterator[Finding]:
    """Judge what the last stage becomes, with all stages that it starts from."""
    chain, at = [stage], stage.parent
    while at is not None:
        chain.append(context.stages[at])
        at = context.stages[at].parent
    where: dict[str, Any] = {"line": stage.line, "place": stage.name}
    if not stage.runs_as_caller:
        yield from _judge_user(context, chain, where)
    base = chain[-1].base
    if not _WITH_FABRIC.match(base) and not any(
        _installs_fabric(command) for one in chain for script in one.scripts for command in script.commands
    ):
        yield finding("no-fabric", context.origin, "no library for InfiniBand or RoCE is installed", **where)
    settings = context.settings(number)
    brings = "nvidia" in base or "pytorch/pytorch" in base
    if not brings and "NVIDIA_VISIBLE_DEVICES" not in settings and _wants_gpu(context, settings):
        yield finding("nvidia-variables", context.origin, "the variables for the NVIDIA tools are not set", **where)


def _judge_user(context: _Context, chain: Sequence[_Stage], where: Mapping[str, Any]) -> Iterator[Finding]:
    user = next((one.user for one in chain if one.user is not None), None)
    if user is None:
        yield finding("root-user", context.origin, "no USER is set: the image runs as root", **where)
    elif user[1].partition(":")[0] in ("root", "0", ""):
        yield finding("root-user", context.origin, f"USER is {user[1][:40]}", **{**where, "line": user[0]})


def _installs_fabric(command: Command) -> bool:
    words = _program(command, {})
    return len(words) > 1 and any(_FABRIC_WORD.match(word) for word in words[1:]) and "remove" not in words


def _wants_gpu(context: _Context, settings: Mapping[str, str]) -> bool:
    """Say whether the recipe speaks of CUDA: a CPU image needs no such variables."""
    if any(name.startswith("CUDA") for name in settings):
        return True
    words = (
        word
        for stage in context.stages
        for script in stage.scripts
        for command in script.commands
        for word in command.words
    )
    return any(re.search(r"\+cu\d{2,3}\b|/cu\d{3}\b|^nvidia-|^cuda-|cudatoolkit", word) for word in words)
