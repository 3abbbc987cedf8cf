"""Rules about HPC and reproducibility for Dockerfiles and definition files. Pure.

Runs on: LOGIN NODE.

Both kinds of recipe are converted to one form (`RecipeStage`). The functions below check the rules of
`recipes/image_lint.py` in this form. Shell commands are read as text and never run. If a variable or a substitution
gets its value only during the build, the value is unknown here, and no rule reports it. hpcenv has no general rules for
Dockerfiles, because hadolint checks such rules.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from hpcenv.errors import SpecError
from hpcenv.image.convert import definition as definition_file
from hpcenv.recipes import dockerfile, exposed, mirrors
from hpcenv.recipes.combination import has_cuda
from hpcenv.recipes.image_lint import (
    ALLOW,
    RULES,
    URL_WITH_PASSWORD,
    KnownTrouble,
    LintFinding,
    accept,
    finding,
    secret_file,
    secret_name,
    secrets_in,
    sorted_findings,
    troubles_of,
)

# -- one form for both kinds of recipe ------------------------------------------------------------------------------


class ShellCommand(NamedTuple):
    """A simple command: the line where it begins, its words without quotes, and whether it reads from a pipe."""

    line: int
    argv: tuple[str, ...]
    piped: bool = False


class RecipeVariable(NamedTuple):
    """A variable that a recipe sets. `value` is None for an ARG without a default."""

    line: int
    kind: Literal["ENV", "ARG"]
    name: str
    value: str | None


class CopiedFiles(NamedTuple):
    """Files that COPY, ADD or %files copies. `fetched` means that ADD downloads URLs without a checksum."""

    line: int
    sources: tuple[str, ...]
    destination: str
    from_stage: bool
    fetched: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeStage:
    """A build stage of a recipe.

    Attributes:
        line: number of its FROM or `Bootstrap:` line.
        base: the image that the stage starts from; empty if the stage does not start from an image in a registry.
        base_known: whether the name of the base is known. It is unknown if it depends on a variable without a value.
        parent: index of the earlier stage that this stage starts from; None if it starts from an image.
        texts: (line, text) of everything that may contain a secret.
    """

    line: int
    name: str
    base: str
    base_known: bool
    parent: int | None
    commands: tuple[ShellCommand, ...]
    variables: tuple[RecipeVariable, ...]
    copies: tuple[CopiedFiles, ...]
    texts: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRecipe:
    """A recipe in the common form.

    Attributes:
        origin: the path of the recipe.
        lines: the file's lines, for comments that accept findings.
        blocks: line numbers of the instructions or sections, in order.
        troubles: packages with known trouble.
    """

    origin: str
    lines: tuple[str, ...]
    blocks: tuple[int, ...]
    stages: tuple[RecipeStage, ...]
    troubles: tuple[KnownTrouble, ...]

    def chain(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        """Yield a stage and the stages that it starts from."""
        yield stage
        while stage.parent is not None:
            stage = self.stages[stage.parent]
            yield stage

    def variables(self, stage: RecipeStage) -> dict[str, str]:
        """Return the variables of a stage, and of the stages that it starts from."""
        chain = reversed([*self.chain(stage)])
        return {one.name: one.value for each in chain for one in each.variables if one.value is not None}


def lint_dockerfile(text: str, *, origin: str, troubles: Sequence[KnownTrouble] = ()) -> tuple[LintFinding, ...]:
    """Check a Dockerfile.

    Args:
        text: the whole file.
        origin: the path of the file, for messages.
        troubles: packages with known trouble.

    Returns:
        Findings in the order of lines. If a comment accepts a finding, the finding has `allowed`.

    Raises:
        SpecError: the file cannot be parsed.
    """
    parsed = dockerfile.parse(text, origin=origin)
    stages = [_docker_stage(stage, parsed.global_arguments if not n else ()) for n, stage in enumerate(parsed.stages)]
    blocks = [one.line for stage in parsed.stages for one in stage.instructions]
    return _lint(text, origin, stages, blocks, troubles)


def lint_definition(text: str, *, origin: str, troubles: Sequence[KnownTrouble] = ()) -> tuple[LintFinding, ...]:
    """Check a definition file of Apptainer. Arguments and result are the same as for `lint_dockerfile`.

    Raises:
        SpecError: the file cannot be parsed.
    """
    parsed = definition_file.parse(text, origin=f"`{origin}`")
    for number, line in parsed.stray:
        raise SpecError(
            f"`{origin}`:{number}: {line.strip()[:60]!r} belongs to no section",
            why="a definition file begins with `Bootstrap:`, then come `NAME: VALUE` lines and sections, `%NAME`",
        )
    stages = [_definition_stage(stage, parsed.arguments) for stage in parsed.stages]
    blocks = [section.line for stage in parsed.stages for section in stage.sections]
    return _lint(text, origin, stages, blocks, troubles)


def _docker_stage(stage: dockerfile.BuildStage, before: Sequence[dockerfile.Instruction]) -> RecipeStage:
    commands: list[ShellCommand] = []
    variables: list[RecipeVariable] = []
    copies: list[CopiedFiles] = []
    texts: list[tuple[int, str]] = []
    for one in (*before, *stage.instructions):
        if one.name in ("ENV", "ARG"):
            kind: Literal["ENV", "ARG"] = "ENV" if one.name == "ENV" else "ARG"
            variables += [RecipeVariable(one.line, kind, *pair) for pair in dockerfile.assignments(one)]
            continue
        texts.append((one.line, one.arguments))
        if one.name == "RUN":
            commands += _run_commands(one)
            texts += [(document.line, document.text) for document in one.heredocs]
        elif one.name in ("COPY", "ADD"):
            copies.append(_docker_copy(one))
    return RecipeStage(
        line=stage.line,
        name=stage.name,
        base="" if stage.parent is not None or stage.base.lower() == "scratch" else stage.base or "?",
        base_known=stage.base_known and stage.base != "",
        parent=stage.parent,
        commands=tuple(commands),
        variables=tuple(variables),
        copies=tuple(copies),
        texts=tuple(texts),
    )


def _run_commands(run: dockerfile.Instruction) -> list[ShellCommand]:
    if run.argv is not None:
        is_shell = len(run.argv) >= 3 and _program(run.argv) in ("sh", "bash", "dash") and "c" in run.argv[1]
        return commands_in(run.argv[2], run.line) if is_shell else [ShellCommand(run.line, run.argv)]
    # `RUN <<EOF` and `RUN bash <<EOF` run the text of the here-document; other programs only read it.
    runs_heredoc = re.match(r"(?:(?:/usr)?/bin/)?(?:(?:ba|da)?sh\b[^<]*)?<<", run.arguments)
    if run.heredocs and runs_heredoc:
        return [command for document in run.heredocs for command in commands_in(document.text, document.line)]
    return commands_in(run.arguments.replace("\n", "\\\n"), run.arguments_line)


def _docker_copy(copy: dockerfile.Instruction) -> CopiedFiles:
    words = [word for word in copy.argv or copy.arguments.split() if not word.startswith("<<")]
    fetched = copy.name == "ADD" and copy.flag("checksum") is None
    return CopiedFiles(copy.line, tuple(words[:-1]), words[-1] if words else "", copy.flag("from") is not None, fetched)


def _definition_stage(stage: definition_file.DefinitionStage, arguments: Mapping[str, str]) -> RecipeStage:
    commands: list[ShellCommand] = []
    variables: list[RecipeVariable] = []
    copies: list[CopiedFiles] = []
    texts: list[tuple[int, str]] = []
    for section in stage.sections:
        if section.name == "environment":
            variables += _exports(section)
            continue
        lines = [(number, line.strip()) for number, line in section.lines if not line.strip().startswith("#")]
        texts += lines
        if section.name == "post":
            commands += commands_in(section.text, section.line + 1)
        elif section.name == "files":
            from_stage = section.arguments.lower().startswith("from ")
            words = ((number, line.split()) for number, line in lines if line)
            copies += [CopiedFiles(number, (pair[0],), pair[-1], from_stage) for number, pair in words]
    pulled = stage.header("bootstrap").lower() in ("docker", "library", "oras", "shub")
    base = definition_file.fill(stage.header("from"), arguments)
    return RecipeStage(
        line=stage.line,
        name=stage.header("stage"),
        base=base or "?" if pulled else "",
        base_known=base != "" and "{{" not in base,
        parent=None,
        commands=tuple(commands),
        variables=tuple(variables),
        copies=tuple(copies),
        texts=tuple(texts),
    )


def _exports(section: definition_file.Section) -> Iterator[RecipeVariable]:
    for command in commands_in(section.text, section.line + 1):
        for word in command.argv:
            if match := _ASSIGNMENT.fullmatch(word):
                yield RecipeVariable(command.line, "ENV", match[1], match[2])


# -- shell commands, read as text -----------------------------------------------------------------------------------

# The text between two operators. Operators inside quotes, redirections (2>&1) and comments do not end this text.
_PIECE = re.compile(
    r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|>&|&>|(?:(?<=\s)|(?<![\s\S]))\#[^\n]*|[^;|&\n'"\\])+""", re.DOTALL | re.VERBOSE
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# Words that may come before the program in a command.
_BEFORE_PROGRAM = frozenset(
    {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "(", "time", "exec", "sudo", "env", "nice"}
)


def commands_in(script: str, line: int) -> list[ShellCommand]:
    """Split a shell script at its operators, which is enough to see what the script installs.

    Args:
        script: the text.
        line: number of its first line.

    Returns:
        The commands. A word such as `if` or `sudo` before the program is left out. Assignments before the program stay.
    """
    commands, end = [], 0
    for piece in _PIECE.finditer(script):
        words = dockerfile.split_words(piece[0].replace("\\\n", " "))
        words = words[: next((n for n, word in enumerate(words) if word.startswith("#")), len(words))]
        while words and words[0] in _BEFORE_PROGRAM:
            words = words[1:]
        if not words:
            continue
        begin = piece.start() + len(piece[0]) - len(piece[0].lstrip(" \t\\\n"))
        piped = script[end : piece.start()].strip() in ("|", "|&")
        commands.append(ShellCommand(line + script.count("\n", 0, begin), tuple(words), piped))
        end = piece.end()
    return commands


def _program(argv: Sequence[str]) -> str:
    """Return the name of the program, without its folder and without assignments before it."""
    return next((word for word in argv if not _ASSIGNMENT.fullmatch(word)), "").rsplit("/", 1)[-1]


def _pip_arguments(argv: Sequence[str]) -> tuple[str, ...] | None:
    """Return the arguments of `pip install`, `python -m pip install` or `uv pip install`; None for other commands."""
    is_pip = re.compile(r"pip(\d(\.\d+)?)?")
    program = _program(argv)
    runs_pip = re.fullmatch(r"uv|python(\d(\.\d+)?)?|\$\{?\w*PYTHON\w*\}?", program, re.IGNORECASE) and "pip" in argv
    if "install" not in argv or not (runs_pip or is_pip.fullmatch(program)):
        return None
    return tuple(argv[argv.index("install") + 1 :])


# Options of pip and uv that have no value. After every other option, the next word is its value.
_PIP_FLAGS = {
    "-I", "-U", "-q", "-qq", "-v", "--break-system-packages", "--compile", "--compile-bytecode",
    "--disable-pip-version-check", "--dry-run", "--exact", "--force-reinstall", "--ignore-installed", "--isolated",
    "--no-build-isolation", "--no-cache", "--no-cache-dir", "--no-clean", "--no-compile", "--no-deps", "--no-index",
    "--no-input", "--no-warn-script-location", "--pre", "--prefer-binary", "--quiet", "--reinstall",
    "--require-hashes", "--strict", "--system", "--upgrade", "--use-pep517", "--user", "--verbose",
}  # fmt: skip


def _pip_names(arguments: Sequence[str]) -> list[str]:
    """Return the packages, paths and URLs that are given to `pip install`."""
    names, is_value = [], False
    for word in arguments:
        is_option = word.startswith("-")
        if not is_option and not is_value and not re.match(r"\d?>|<", word):
            names.append(word)
        is_value = is_option and "=" not in word and word not in _PIP_FLAGS
    return names


# -- rules ----------------------------------------------------------------------------------------------------------

Hit = tuple[str, int, str]
"""The id of a rule, a line number, and what was found."""


def _base(_recipe: ParsedRecipe, stage: RecipeStage) -> Iterator[Hit]:
    if not stage.base:
        return
    if not stage.base_known:
        yield "base-unknown", stage.line, "the name of the base is unknown"
        return
    base = stage.base.partition("://")[2] or stage.base
    name, _, digest = base.partition("@")
    if re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        return
    tag = name.rsplit("/", 1)[-1].partition(":")[2]
    if not tag or tag in ("latest", "stable", "main", "master", "nightly", "edge", "rolling"):
        yield "base-floating", stage.line, f"the base `{base[:200]}` has " + (f"the tag `{tag}`" if tag else "no tag")
    else:
        yield "base-no-digest", stage.line, f"the base `{base[:200]}` has no digest"


def _secrets(_recipe: ParsedRecipe, stage: RecipeStage) -> Iterator[Hit]:
    for line, kind, name, value in stage.variables:
        if value is not None and exposed.index_variable(name, value):
            yield "index-credentials", line, f"{kind} {name[:60]} contains the login of a package index"
        elif value is not None and (secret_name(name, value) or secrets_in(value)):
            yield "secret-in-environment", line, f"{kind} {name[:60]} contains a secret"
        elif value is None and secret_name(name, "value"):
            yield "secret-as-argument", line, f"ARG {name[:60]} asks for a secret"
    for copy in stage.copies:
        for source in () if copy.from_stage else copy.sources:
            contains = secret_file(source) or secret_file(copy.destination)
            if contains:
                yield "secret-in-file", copy.line, f"{source[:100]} contains {contains}"
    for line, text in stage.texts:
        of_index = exposed.index_credentials(text)
        if of_index:
            yield "index-credentials", line, "the text contains the login of a package index"
        for kind_of_secret in secrets_in(text):
            if not (of_index and kind_of_secret == URL_WITH_PASSWORD):
                yield "secret-in-file", line, f"the text contains {kind_of_secret}"


def _servers(_recipe: ParsedRecipe, stage: RecipeStage) -> Iterator[Hit]:
    for line, text in stage.texts:
        if exposed.open_notebook(text):
            yield "open-notebook", line, "Jupyter is started or configured with an empty token"
    for line, _, name, value in stage.variables:
        if name == "JUPYTER_TOKEN" and value == "":
            yield "open-notebook", line, "JUPYTER_TOKEN is empty"
    for command in stage.commands:
        if exposed.installs_sshd(_program(command.argv), command.argv):
            yield "sshd", command.line, f"`{' '.join(command.argv)[:60]}`"


_UPGRADE = re.compile(
    r"(apt(-get)?|apk)\b.* (upgrade|dist-upgrade|full-upgrade)\b|(dnf|yum|microdnf)( -\S+)* (update|upgrade)( -\S+)*$"
)


def _downloads(recipe: ParsedRecipe, stage: RecipeStage) -> Iterator[Hit]:
    """Find downloads that can give different bytes tomorrow. hadolint 2.15 has no rule about such downloads."""
    for copy in stage.copies:
        for source in copy.sources if copy.fetched else ():
            if re.match(r"(?i)(https?|ftp)://", source):
                yield "add-url", copy.line, f"ADD downloads {_without_secrets(source)}"
    environment, previous = recipe.variables(stage), ""
    for command in stage.commands:
        program = _program(command.argv)
        if command.piped and previous in ("curl", "wget") and re.fullmatch(r"(ba|da|z)?sh|python3?", program):
            yield "pipe-to-shell", command.line, f"`{previous} ... | {program}` runs what a server sends"
        previous = program
        if upgrade := _UPGRADE.match(" ".join((program, *command.argv[1:]))):
            yield "unpinned-upgrade", command.line, f"`{upgrade[0][:60]}`"
        words = command.argv[1:] if program == "export" else command.argv
        environment |= {match[1]: match[2] for word in words if (match := _ASSIGNMENT.fullmatch(word))}
        arguments = _pip_arguments(command.argv)
        if arguments is not None and not _compares_hashes(arguments, environment):
            named = " ".join(map(_without_secrets, _pip_names(arguments)[:3])) or "-r ..."
            yield "pip-no-hashes", command.line, f"`pip install {named}` compares no hashes"


def _compares_hashes(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether pip compares hashes, or installs nothing from an index."""
    if {"--require-hashes", "--no-index"} & {*arguments}:
        return True
    if environment.get("PIP_REQUIRE_HASHES") in ("1", "true", "on", "yes"):
        return True
    # No hash can be given for a path, a wheel that was just built, or a repository. A requirements file may have
    # hashes. Then pip compares them without an option, and refuses package names beside the file.
    return all(_NO_HASH.search(name) for name in _pip_names(arguments))


# Words that are paths, wheels, variables or parts of a quotation. They are not package names, so they need no hash.
_NO_HASH = re.compile(r"^[^A-Za-z0-9]|/|\.whl$|\*")


def _without_secrets(url: str) -> str:
    return re.sub(r"://[^/@]*@", "://***@", url.partition("?")[0])[:150]


def _known_trouble(recipe: ParsedRecipe, stage: RecipeStage) -> Iterator[Hit | LintFinding]:
    for command in stage.commands:
        for name, version in _requested_packages(command.argv):
            for _, trouble in troubles_of(recipe.troubles, {name: version}):
                yield finding(
                    "known-trouble",
                    recipe.origin,
                    f"{name}{f' {version}' if version else ''} has known trouble",
                    line=command.line,
                    place=stage.name,
                    why=f"{trouble.why} ({trouble.source})",
                    advice=trouble.hint,
                )


def _requested_packages(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the packages that a `pip install` names, each with its version if it is pinned."""
    for name in _pip_names(_pip_arguments(argv) or ()):
        try:
            requirement = Requirement(name)
        except InvalidRequirement:
            continue
        exact = [
            one.version for one in requirement.specifier if one.operator in ("==", "===") and "*" not in one.version
        ]
        yield canonicalize_name(requirement.name), exact[0] if len(exact) == 1 else None


_PRIVATE_MODE = re.compile(
    r"chmod\b.* (0?7[0-7]0\b|(go|o|og)[-=]( |rwx|rx))|(install|mkdir)\b.* (-m ?|--mode=)0?7[0-7]0\b"
)
_SHARED_FOLDER = re.compile(r"/(opt|usr|srv|workspace|app|home|venv|conda)\b")


def _private_folder(recipe: ParsedRecipe, stage: RecipeStage) -> Iterator[Hit]:
    is_kept = stage in recipe.chain(recipe.stages[-1])
    for line, argv, _ in stage.commands:
        program = _program(argv)
        if "--user" in (_pip_arguments(argv) or ()):
            yield "private-folder", line, "`pip install --user` installs into the home folder of the user who builds"
        closed = next((word for word in argv if _SHARED_FOLDER.match(word)), None)
        if closed and _PRIVATE_MODE.match(" ".join((program, *argv[1:]))):
            yield "private-folder", line, f"only the owner can read `{closed[:80]}`"
        prefix = next((word for word in argv if re.search(r"(^|=)/root/[\w./-]*(conda|mamba|venv|env)", word)), None)
        if prefix and is_kept and program not in ("rm", "echo", "export"):
            yield "private-folder", line, f"`{prefix[:80]}` is below /root, which only root can read"


# Images that are known to have no library for InfiniBand: the images of distributions, and two images with CUDA. The
# images of distributions do not set the variables for NVIDIA's tools either. Nothing is known about other images.
_DISTRIBUTION = re.compile(
    r"(docker\.io/)?(library/)?(ubuntu|debian|python|fedora|almalinux|centos|rockylinux(/rockylinux)?|mambaorg/micromamba"
    r"|condaforge/miniforge3|continuumio/miniconda3)(:|@|$)"
)
_BARE_CUDA = re.compile(r"(docker\.io/|nvcr\.io/)?(nvidia/cuda|pytorch/pytorch)(:|@|$)")
_FABRIC = re.compile(r"ibverbs|rdma-?core|rdmacm|efa_installer|(?i:mlnx_?ofed|doca-)")
_CUDA_WORD = re.compile(r"\+cu\d{2,3}\b|/cu\d{3}\b|^nvidia-|^cuda-|cudatoolkit")


def _network_and_gpu(recipe: ParsedRecipe, stage: RecipeStage) -> Iterator[Hit]:
    """Check the content of the last stage, including all stages that it starts from."""
    if stage is not recipe.stages[-1]:
        return
    chain = [*recipe.chain(stage)]
    base, commands = chain[-1].base, [command for one in chain for command in one.commands]
    words = [word for command in commands if "remove" not in command.argv for word in command.argv]
    variables = recipe.variables(stage)
    line = next((command.line for command in commands if _installs_cuda_torch(command.argv)), None)
    uses_cuda = any(name.startswith("CUDA") for name in variables) or any(map(_CUDA_WORD.search, words))
    bare = _DISTRIBUTION.match(base) is not None
    trains = line is not None or "pytorch/pytorch" in base
    if trains and (bare or _BARE_CUDA.match(base)) and not any(map(_FABRIC.search, words)):
        yield "no-fabric", stage.line, "no library for InfiniBand or RoCE is installed"
    if (uses_cuda or line is not None) and bare and "NVIDIA_VISIBLE_DEVICES" not in variables:
        yield "nvidia-variables", stage.line, "the variables for the NVIDIA container tools are not set"
    if has_cuda(base) and line is not None:
        yield "second-cuda", line, f"the base `{base[:100]}` has CUDA, and torch's wheels contain CUDA too"


# The first pattern is for images that have no Python. The other patterns are for copied paths, and for words of
# commands, that put a Python into a stage. A copied virtual environment is not enough, because it only links to its
# Python.
_NO_PYTHON = re.compile(r"(docker\.io/|nvcr\.io/)?((library/)?(ubuntu|debian)|nvidia/cuda)(:|@|$)")
_HAS_PYTHON = re.compile(r"/(usr(/local|/bin)?|opt|opt/[\w.-]*(conda|python|mamba)[\w.-]*)?/?|.*/bin/python[\d.]*")
_PYTHON_WORD = re.compile(r"(?i)(.*/)?(pip|python)[\d.]*(-\w+)*(=.*)?$|.*(conda|mamba|pyenv|pixi)|uv$")
_RUNS_PYTHON = re.compile(r"(?i)(pip|python)[\d.]*$")


def _without_python(recipe: ParsedRecipe, stage: RecipeStage) -> Iterator[Hit]:
    """Check whether the last stage has a Python, if an earlier stage installs Python packages."""
    chain = [*recipe.chain(stage)]
    if stage is not recipe.stages[-1] or not _NO_PYTHON.match(chain[-1].base):
        return
    if not any(_pip_arguments(command.argv) for one in recipe.stages if one not in chain for command in one.commands):
        return
    commands = [command.argv for one in chain for command in one.commands]
    runs_script = any(word.endswith(".sh") or word == "make" for argv in commands for word in argv)
    # A command that runs Python does not install Python. But a script that runs earlier may install Python.
    words = [word for argv in commands if runs_script or not _RUNS_PYTHON.match(_program(argv)) for word in argv]
    copied = [path for one in chain for copy in one.copies if copy.from_stage for path in copy.sources]
    if not (any(map(_PYTHON_WORD.match, words)) or any(map(_HAS_PYTHON.fullmatch, copied))):
        yield "no-python", stage.line, f"nothing puts Python into the last stage, and `{chain[-1].base[:100]}` has none"


def _mirror(recipe: ParsedRecipe, stage: RecipeStage) -> Iterator[Hit]:
    """Find mirrors and indexes of packages that stay in the image."""
    if stage not in recipe.chain(recipe.stages[-1]):
        return
    for setting in mirrors.left(stage.commands, recipe.lines):
        yield "mirror-left", setting.line, setting.what
    final = recipe.variables(recipe.stages[-1])
    for line, kind, name, value in stage.variables:
        if kind == "ENV" and value and final.get(name) == value and mirrors.VARIABLE.fullmatch(name):
            yield "mirror-left", line, f"ENV {name} stays in the image"
    for copy in stage.copies:
        for file in filter(None, (mirrors.copied(source, copy.destination) for source in copy.sources)):
            setting = mirrors.LeftSetting(copy.line, f"{file[:80]} stays in the image", file)
            if not mirrors.removed(setting, stage.commands):
                yield "mirror-left", setting.line, setting.what


def _installs_cuda_torch(argv: Sequence[str]) -> bool:
    """Return whether a `pip install` names CUDA's wheels or torch. Builds for the CPU, ROCm or XPU do not count."""
    arguments = _pip_arguments(argv) or ()
    if any(re.search(r"[/+](cpu|rocm|xpu)", word) for word in arguments):
        return False
    return any(re.match(r"(torch|nvidia-[a-z-]+)([=<>!~\[ ]|$)", name) for name in _pip_names(arguments))


_RULES: tuple[Callable[[ParsedRecipe, RecipeStage], Iterator[Hit | LintFinding]], ...] = (
    _base,
    _secrets,
    _servers,
    _downloads,
    _known_trouble,
    _private_folder,
    _network_and_gpu,
    _without_python,
    _mirror,
)


def _lint(
    text: str, origin: str, stages: Sequence[RecipeStage], blocks: Sequence[int], troubles: Sequence[KnownTrouble]
) -> tuple[LintFinding, ...]:
    lines = tuple(text.replace("\r\n", "\n").split("\n"))
    recipe = ParsedRecipe(
        origin=origin, lines=lines, blocks=tuple(blocks), stages=tuple(stages), troubles=tuple(troubles)
    )
    findings = [*_unjustified(lines, origin)]
    for stage in stages:
        for hit in (hit for rule in _RULES for hit in rule(recipe, stage)):
            one = hit if isinstance(hit, LintFinding) else _finding(hit, origin, stage)
            line = one.line or stage.line
            block = blocks[bisect_right(blocks, line) - 1] if blocks and blocks[0] <= line else line
            findings.append(accept(one, lines, (line, block, stage.line)))
    return sorted_findings(findings)


def _finding(hit: Hit, origin: str, stage: RecipeStage) -> LintFinding:
    rule, line, what = hit
    return finding(rule, origin, what, line=line, place=stage.name)


def _unjustified(lines: Sequence[str], origin: str) -> Iterator[LintFinding]:
    """Find comments that accept an unknown rule, or give no reason."""
    for number, line in enumerate(lines, 1):
        match = ALLOW.fullmatch(line)
        if match and match[1] not in RULES:
            yield finding("allow-without-reason", origin, f"there is no rule `{match[1]}`", line=number)
        elif match and not match[2].strip():
            yield finding("allow-without-reason", origin, f"`{match[1]}` is allowed without a reason", line=number)
