"""Translate a Dockerfile to an Apptainer definition file, or say which lines cannot be. Reads names of the context.

Runs on: LOGIN NODE.

The order of a Dockerfile matters, and a definition file has none: its %files come before its %post. So files go to the
folder `STAGED`, and %post copies them to their places between the commands, as COPY says.

What is different in the result, and does not matter there:
  - USER: everything is built as root of a user namespace, and Apptainer runs everything as the caller. A command after
    USER gets that user's HOME, and everybody can read that folder at the end.
  - WORKDIR decides where the commands of the build run. Apptainer starts in the caller's folder.
  - EXPOSE, HEALTHCHECK, STOPSIGNAL, VOLUME and --chown have no meaning in a SIF.

Rules of Dockerfiles: Docker's reference, read 2026-11-23. `apptainer_build` says what is known of definition files.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpcenv.errors import SpecError
from hpcenv.recipes.build_context import BuildContext, ContextSource
from hpcenv.recipes.dockerfile import BuildStage, Dockerfile, Instruction, assignments, expand, split_words

STAGED = "/.hpcenv-copy"
"""Where files wait in a stage until %post copies them; removed at its end."""

_SAFE_PATH = re.compile(r"[A-Za-z0-9_./@+=,~-]+")
_NAME = re.compile(r"[A-Za-z_]\w*")
# Apptainer would read such a line as a section, a stage or a build argument, wherever it stands.
_READ_BY_APPTAINER = re.compile(r"^\s*%|^\s*bootstrap\s*:|\{\{\s*\w+\s*\}\}", re.IGNORECASE | re.MULTILINE)
_ARCHIVE = re.compile(r"\.(tar|tar\.(gz|bz2|xz|zst)|tgz|tbz2|txz)$")
_WITHOUT_MEANING = ("EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "VOLUME", "MAINTAINER", "ONBUILD")
_COPY_FLAGS = ("from", "chown", "chmod", "link")


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSettings:
    """What a base image says about itself in its configuration."""

    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    triggers: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, object]) -> BaseSettings:
        """Return the settings of an image configuration (OCI or Docker)."""
        found = config.get("config")
        given: Mapping[str, object] = found if isinstance(found, Mapping) else {}

        def words(key: str) -> tuple[str, ...]:
            value = given.get(key)
            return tuple(map(str, value)) if isinstance(value, list) else ()

        pairs = (entry.partition("=") for entry in words("Env"))
        return cls(
            environment={name: value for name, _, value in pairs if _NAME.fullmatch(name)},
            workdir=str(given.get("WorkingDir") or "/"),
            user=str(given.get("User") or ""),
            entrypoint=words("Entrypoint"),
            command=words("Cmd"),
            shell=words("Shell") or ("/bin/sh", "-c"),
            triggers=words("OnBuild"),
        )


FindBase = Callable[[str], BaseSettings]
"""Return the settings of a base image from its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A definition file, and what is different from a build with docker."""

    text: str
    notes: tuple[str, ...] = ()


class _Untranslatable(Exception):
    """This line cannot be translated; the text says why."""


def translate(
    parsed: Dockerfile,
    context: BuildContext,
    find_base: FindBase,
    *,
    origin: str,
    arguments: Mapping[str, str] | None = None,
    target: str | None = None,
    platform: str = "linux/amd64",
) -> Translation:
    """Return the definition file of a Dockerfile.

    Args:
        parsed: the Dockerfile, parsed with the same arguments.
        context: the folder that it copies from.
        find_base: asks for the settings of base images.
        origin: path of the Dockerfile, for messages.
        arguments: values for ARG.
        target: the stage to build; None for the last one.
        platform: of the image, `linux/amd64`.

    Raises:
        SpecError: lines cannot be translated; the error lists all of them.
    """
    last = _stage_number(parsed.stages, target) if target is not None else len(parsed.stages) - 1
    if last is None:
        names = ", ".join(stage.name for stage in parsed.stages if stage.name) or "none has a name"
        raise SpecError(f"`{origin}` has no stage `{target}`", why=f"its stages: {names}")
    work = _Work(parsed, context, find_base, dict(arguments or {}), platform)
    text = work.definition(last)
    if work.problems:
        found = [f"line {line}: {text}" for line, text in sorted(set(work.problems))]
        raise SpecError(
            f"`{origin}` cannot be translated to a definition file",
            why="\n".join(found[:20]),
            hint="install buildah or podman, which build every Dockerfile, or change these lines",
        )
    head = f"# Translated by `hpcenv image build` from {posixpath.basename(origin)}.\n\n"
    return Translation(text=head + text, notes=tuple(dict.fromkeys(work.notes)))


def _stage_number(stages: Sequence[BuildStage], name: str) -> int | None:
    names = {stage.name.lower(): number for number, stage in enumerate(stages) if stage.name}
    names |= {str(number): number for number in range(len(stages))}
    return names.get(name.lower())


class _Work:
    """The translation of all stages that the result needs."""

    def __init__(
        self,
        parsed: Dockerfile,
        context: BuildContext,
        find_base: FindBase,
        arguments: Mapping[str, str],
        platform: str,
    ) -> None:
        self.platform = platform
        self.parsed = parsed
        self.context = context
        self.arguments = arguments
        self.globals = _global_values(parsed, arguments)
        self.problems: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self._find_base = find_base
        self._done: dict[str, str] = {}

    def definition(self, last: int) -> str:
        """Return all stages, each after those that it copies from."""
        self.require(last)
        return "\n".join(self._done.values())

    def require(self, number: int) -> str:
        """Translate a stage and return its name in the definition file."""
        name = f"stage-{number}"
        if name not in self._done:
            stage = _Stage(self, number)
            text = stage.translate(name)
            self._done[name] = text
        return name

    def require_image(self, image: str) -> str:
        """Return the name of a stage that only is an image, for COPY --from=IMAGE."""
        name = "image-" + re.sub(r"[^a-z0-9]+", "-", image.lower())
        self._done.setdefault(name, f"Bootstrap: docker\nFrom: {image}\nStage: {name}\n")
        return name

    def base(self, stage: BuildStage) -> BaseSettings:
        """Return the settings of an image."""
        if not stage.base_known:
            raise _Untranslatable("the name of the base depends on an ARG without a value: --build-arg NAME=VALUE")
        if stage.base.lower() == "scratch":
            return BaseSettings()
        if stage.platform.strip("${}") not in ("", "BUILDPLATFORM", "TARGETPLATFORM", self.platform):
            raise _Untranslatable(f"--platform={stage.platform[:40]} is not {self.platform}")
        found = self._find_base(stage.base)
        if found.triggers:
            raise _Untranslatable(f"the base {stage.base} has ONBUILD instructions")
        return found


def _global_values(parsed: Dockerfile, arguments: Mapping[str, str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for instruction in parsed.global_arguments:
        for name, value in assignments(instruction):
            chosen = arguments.get(name, None if value is None else expand(value, values)[0])
            if chosen is not None:
                values[name] = chosen
    return values


@dataclass
class _Stage:
    """One stage while it is translated: its state, and the lines of its sections."""

    work: _Work
    number: int
    environment: dict[str, str] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    base: BaseSettings = field(default_factory=BaseSettings)
    files: list[str] = field(default_factory=list)
    from_stages: dict[str, list[str]] = field(default_factory=dict)
    post: list[str] = field(default_factory=list)
    homes: list[str] = field(default_factory=list)
    copies: int = 0

    def translate(self, name: str) -> str:
        """Return the sections of the stage, with those of the stages that it starts from."""
        chain = [self.work.parsed.stages[self.number]]
        while (parent := chain[0].parent) is not None:
            chain.insert(0, self.work.parsed.stages[parent])
        try:
            self._start(self.work.base(chain[0]))
        except _Untranslatable as problem:
            self.work.problems.append((chain[0].line, f"FROM: {problem}"))
        for stage in chain:
            self.arguments = {}
            for instruction in stage.instructions:
                try:
                    self._add(instruction)
                except _Untranslatable as problem:
                    self.work.problems.append((instruction.line, f"{instruction.name}: {problem}"))
        return self._text(name, chain[0])

    def _start(self, base: BaseSettings) -> None:
        self.base = base
        self.environment = dict(base.environment)
        self.workdir, self.user, self.shell = base.workdir, base.user, base.shell
        for key, value in base.environment.items():
            self._post(f"export {key}={shlex.quote(value)}")
        self._set_home()

    def _add(self, instruction: Instruction) -> None:
        if instruction.name in _WITHOUT_MEANING:
            if instruction.name != "MAINTAINER":
                self.work.notes.append(f"{instruction.name} has no meaning in a SIF")
            return
        method = _METHODS.get(instruction.name)
        if method is None:
            raise _Untranslatable("hpcenv does not know this instruction")
        method(self, instruction)

    # -- text ---------------------------------------------------------------------------------------------------------

    def _post(self, text: str) -> None:
        if _READ_BY_APPTAINER.search(text):
            raise _Untranslatable("it has a line with `%`, `Bootstrap:` or `{{ }}`, which Apptainer reads as its own")
        self.post.append(text)

    def _expand(self, text: str) -> str:
        return expand(text, {**self.arguments, **self.environment})[0]

    def _words(self, instruction: Instruction) -> list[str]:
        words = instruction.argv if instruction.argv is not None else split_words(instruction.arguments)
        return [self._expand(word) for word in words]

    def _path(self, text: str) -> str:
        """Return an absolute path in the image; a `/` at the end stays."""
        path = posixpath.normpath(posixpath.join(self.workdir, text))
        return path.rstrip("/") + "/" if text.endswith(("/", "/.")) or text == "." else path

    # -- settings -----------------------------------------------------------------------------------------------------

    def env(self, instruction: Instruction) -> None:
        """Set variables for the commands that follow, and for the image."""
        if re.search(r"'[^']*\$[^']*'|\\\$", instruction.arguments):
            raise _Untranslatable("a `$` that is not to be filled in")
        pairs = [(name, self._expand(value or "")) for name, value in assignments(instruction)]
        for name, value in pairs:
            if not _NAME.fullmatch(name):
                raise _Untranslatable(f"{name[:40]!r} is not a name that a shell can export")
            self.environment[name] = self.own[name] = value
            self._post(f"export {name}={shlex.quote(value)}")

    def arg(self, instruction: Instruction) -> None:
        """Set a variable for the commands that follow."""
        for name, default in assignments(instruction):
            value = self.work.arguments.get(name)
            if value is None and default is not None:
                value = self._expand(default)
            value = self.work.globals.get(name) if value is None else value
            if value is None:
                continue
            self.arguments[name] = value
            if name not in self.environment and _NAME.fullmatch(name):
                self._post(f"export {name}={shlex.quote(value)}")

    def label(self, instruction: Instruction) -> None:
        """Set labels of the image."""
        for name, value in assignments(instruction):
            text = self._expand(value or "")
            if not re.fullmatch(r"[\w.-]+", name) or "\n" in text or _READ_BY_APPTAINER.search(text):
                raise _Untranslatable(f"the label {name[:60]!r} or its value does not fit on a line")
            self.labels[name] = text

    def set_workdir(self, instruction: Instruction) -> None:
        """Change the folder of the commands that follow, and make it."""
        self.workdir = self._path(self._expand(instruction.arguments)).rstrip("/") or "/"
        self._post(f"mkdir -p {shlex.quote(self.workdir)}")

    def set_user(self, instruction: Instruction) -> None:
        """Change the HOME of the commands that follow; they run as root all the same."""
        self.user = self._expand(instruction.arguments)
        self.work.notes.append("USER: the commands run as root of the build; the SIF runs as its caller")
        self._set_home()

    def _set_home(self) -> None:
        name = self.user.partition(":")[0]
        if name in ("", "root", "0"):
            self._post("export HOME=/root")
            return
        home = f"$(getent passwd {shlex.quote(name)} | cut -d: -f6)"
        self._post(f'HOME="{home}"; export HOME="${{HOME:-/}}"')
        self.homes.append(name)

    def set_shell(self, instruction: Instruction) -> None:
        """Change the shell of RUN, CMD and ENTRYPOINT."""
        if not instruction.argv:
            raise _Untranslatable('it is no list: ["/bin/bash", "-c"]')
        self.shell = instruction.argv

    def set_entrypoint(self, instruction: Instruction) -> None:
        """Set what the SIF runs."""
        self.entrypoint = self._command(instruction)
        self.command = self.command or ()

    def set_command(self, instruction: Instruction) -> None:
        """Set what the SIF runs without arguments."""
        self.command = self._command(instruction)

    def _command(self, instruction: Instruction) -> tuple[str, ...]:
        if instruction.argv is not None:
            return instruction.argv
        text = instruction.arguments.replace("\n", "")
        return (*self.shell, text) if text else ()

    # -- commands -----------------------------------------------------------------------------------------------------

    def run(self, instruction: Instruction) -> None:
        """Run a command of the build, in a new process."""
        emptied = [*self._mounts(instruction)]
        if instruction.argv is not None:
            line = shlex.join(instruction.argv)
        else:
            line = shlex.join((*self.shell, _script(instruction)))
        self._post(f"# line {instruction.line}\ncd {shlex.quote(self.workdir)}\n{line}")
        for folder in emptied:
            self._post(f"if [ -d {folder} ]; then find {folder} -mindepth 1 -delete; fi")

    def _mounts(self, instruction: Instruction) -> Iterator[str]:
        """Yield the folders that are empty again after the command."""
        for name, value in instruction.flags:
            options = dict(part.partition("=")[::2] for part in value.split(","))
            kind = options.get("type", "bind") if name == "mount" else ""
            if kind not in ("cache", "tmpfs"):
                instead = "hpcenv image build --bind SRC:/mnt:ro FILE.def" if kind == "secret" else "COPY the files"
                raise _Untranslatable(f"--{name}={value[:60]} has no counterpart; {instead}")
            target = options.get("target") or options.get("dst") or options.get("destination") or ""
            if self._path(self._expand(target)) == "/" or not target:
                raise _Untranslatable(f"--{name}={value[:60]} has no target")
            yield shlex.quote(self._path(self._expand(target)).rstrip("/"))

    # -- files --------------------------------------------------------------------------------------------------------

    def copy(self, instruction: Instruction) -> None:
        """Copy files of the context, of another stage or of an image to their places."""
        unknown = [name for name, _ in instruction.flags if name not in _COPY_FLAGS]
        if unknown:
            raise _Untranslatable(f"--{unknown[0]} has no counterpart")
        if instruction.flag("chown") is not None:
            self.work.notes.append("--chown has no meaning in a SIF: its caller can read every file with mode 644")
        *sources, target = self._words(instruction) or [""]
        if instruction.heredocs:
            self._write(instruction, target)
            return
        if not sources:
            raise _Untranslatable("it names no source and target")
        source_stage = instruction.flag("from")
        staged = [
            place
            for source in sources
            for place in (
                self._stage_from(self._expand(source_stage), source)
                if source_stage is not None
                else self._stage_context(source)
            )
        ]
        folder = self._path(target)
        if len(staged) > 1 and not folder.endswith("/"):
            folder += "/"
        mode = instruction.flag("chmod")
        for place in staged:
            if mode is not None:
                self._post(f"chmod -R {shlex.quote(self._expand(mode))} {shlex.quote(place)}")
            self._post(f"hpcenv_copy {shlex.quote(place)} {shlex.quote(folder)}")

    def _place(self, name: str) -> str:
        self.copies += 1
        return f"{STAGED}/{self.copies}/{name}"

    def _stage_from(self, stage: str, source: str) -> list[str]:
        if not _SAFE_PATH.fullmatch(source):
            raise _Untranslatable(f"{source[:80]!r}: Apptainer takes one plain path of another stage")
        number = _stage_number(self.work.parsed.stages, stage)
        if number is not None and number >= self.number:
            raise _Untranslatable(f"--from={stage} is not an earlier stage")
        name = self.work.require(number) if number is not None else self.work.require_image(stage)
        path = posixpath.normpath("/" + source.lstrip("/"))
        place = self._place(posixpath.basename(path) or "root")
        self.from_stages.setdefault(name, []).append(f"{path} {place}")
        return [place]

    def _stage_context(self, source: str) -> list[str]:
        try:
            found = self.work.context.find(source)
        except ValueError as error:
            raise _Untranslatable(str(error)) from error
        if not found:
            raise _Untranslatable(f"{source} is not in the context, or .dockerignore leaves it out")
        return [self._stage_source(one) for one in found]

    def _stage_source(self, source: ContextSource) -> str:
        place = self._place(posixpath.basename(source.path) if source.path != "." else "context")
        if source.is_folder:
            self._post(f"mkdir -p {shlex.quote(place)}")
        for entry in source.entries:
            destination = posixpath.join(place, entry.inside) if entry.inside else place
            if entry.link is not None:
                parent = shlex.quote(posixpath.dirname(destination))
                self._post(f"mkdir -p {parent}; ln -s {shlex.quote(entry.link)} {shlex.quote(destination)}")
                continue
            if not _SAFE_PATH.fullmatch(entry.path):
                raise _Untranslatable(f"the name {entry.path[:80]!r} has characters that %files cannot have")
            self.files.append(f"{entry.path} {destination}")
        return place

    def _write(self, instruction: Instruction, target: str) -> None:
        """Write the here-documents of COPY."""
        if len(instruction.heredocs) != 1 or target.endswith("/"):
            raise _Untranslatable("only one here-document to one file can be translated")
        document = instruction.heredocs[0]
        if "$" in document.text and not re.search(r"<<-?[\"']", instruction.arguments):
            raise _Untranslatable("a here-document with variables: quote its name")
        path = shlex.quote(self._path(target))
        self._post(f'mkdir -p "$(dirname {path})"\nprintf %s {shlex.quote(document.text)} > {path}')
        mode = instruction.flag("chmod")
        if mode is not None:
            self._post(f"chmod {shlex.quote(self._expand(mode))} {path}")

    def add(self, instruction: Instruction) -> None:
        """Copy files, and unpack archives of the context."""
        sources = self._words(instruction)[:-1]
        if any(re.match(r"(?i)(https?|ftp|git)://|git@", source) for source in sources):
            raise _Untranslatable("it downloads; RUN curl and sha256sum say what is expected")
        if any(_ARCHIVE.search(source) for source in sources):
            self._unpack(sources, self._words(instruction)[-1])
            return
        self.copy(instruction)

    def _unpack(self, sources: Sequence[str], target: str) -> None:
        folder = shlex.quote(self._path(target))
        for place in [place for source in sources for place in self._stage_context(source)]:
            if not _ARCHIVE.search(place):
                raise _Untranslatable("archives and other files in one ADD")
            self._post(f"mkdir -p {folder}\ntar -xf {shlex.quote(place)} -C {folder}")

    # -- the sections -------------------------------------------------------------------------------------------------

    def _text(self, name: str, first: BuildStage) -> str:
        if first.base.lower() == "scratch":
            head = f"Bootstrap: scratch\nStage: {name}\n"
        else:
            head = f"Bootstrap: docker\nFrom: {first.base}\nStage: {name}\n"
        parts = [head]
        parts += [_section(f"files from {stage}", lines) for stage, lines in self.from_stages.items()]
        if self.files:
            parts.append(_section("files", self.files))
        # Not indented: lines inside quotes must stay as they are.
        parts.append("\n".join(("%post", _COPY, *self.post, *self._tidy(), "")))
        if self.own:
            parts.append(_section("environment", [f"export {k}={shlex.quote(v)}" for k, v in self.own.items()]))
        if self.labels:
            parts.append(_section("labels", [f"{key} {value}" for key, value in self.labels.items()]))
        parts += self._runscript()
        return "\n".join(parts)

    def _tidy(self) -> Iterator[str]:
        for name in dict.fromkeys(self.homes):
            home = f'"$(getent passwd {shlex.quote(name)} | cut -d: -f6)"'
            yield f"if [ -d {home} ]; then chmod -R a+rX {home}; fi"
        yield f"cd /\nrm -rf {STAGED}"

    def _runscript(self) -> Iterator[str]:
        """Yield %runscript where the Dockerfile says what to run; otherwise that of the base stays."""
        if self.entrypoint is None and self.command is None:
            return
        # ENTRYPOINT of a Dockerfile resets the CMD of its base.
        entrypoint = self.base.entrypoint if self.entrypoint is None else self.entrypoint
        lines = []
        if self.command:
            lines.append(f"if [ $# -eq 0 ]; then set -- {shlex.join(self.command)}; fi")
        elif not entrypoint:
            lines.append("if [ $# -eq 0 ]; then set -- /bin/sh; fi")
        lines.append(f'exec {shlex.join(entrypoint)} "$@"' if entrypoint else 'exec "$@"')
        if _READ_BY_APPTAINER.search("\n".join(lines)):
            line = self.work.parsed.stages[self.number].line
            self.work.problems.append(
                (line, "ENTRYPOINT or CMD of this stage has text that Apptainer reads as its own")
            )
        yield _section("runscript", lines)


_COPY = """# As COPY of docker: what is in a folder, or a file.
hpcenv_copy() {
    if [ -d "$1" ]; then mkdir -p "$2"; cp -a "$1/." "$2"; return; fi
    case "$2" in */) mkdir -p "$2" ;; *) mkdir -p "$(dirname "$2")" ;; esac
    cp -a "$1" "$2"
}"""

_METHODS: Mapping[str, Callable[[_Stage, Instruction], None]] = {
    "ADD": _Stage.add,
    "ARG": _Stage.arg,
    "CMD": _Stage.set_command,
    "COPY": _Stage.copy,
    "ENTRYPOINT": _Stage.set_entrypoint,
    "ENV": _Stage.env,
    "LABEL": _Stage.label,
    "RUN": _Stage.run,
    "SHELL": _Stage.set_shell,
    "USER": _Stage.set_user,
    "WORKDIR": _Stage.set_workdir,
}


def _script(instruction: Instruction) -> str:
    """Return the text that the shell of a RUN gets: continued lines joined, with its here-documents."""
    if not instruction.heredocs:
        return instruction.arguments.replace("\n", "")
    only = re.fullmatch(r"<<-?[\"']?[\w.-]+[\"']?", instruction.arguments.strip())
    if only:
        if instruction.heredocs[0].text.startswith("#!"):
            raise _Untranslatable("a here-document that names an interpreter")
        return instruction.heredocs[0].text
    documents = "".join(f"{document.text}{document.name}\n" for document in instruction.heredocs)
    return f"{instruction.arguments}\n{documents}"


def _section(name: str, lines: Sequence[str]) -> str:
    return f"%{name}\n" + "".join(f"    {line}\n" for line in lines)
