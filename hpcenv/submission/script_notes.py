"""Make notes about a script that starts ranks, or chooses the rendezvous endpoint, in a different way than hpcenv.

Runs on: LOGIN NODE. Pure. This module reads only the script itself, not the modules that the script imports. No script
is refused, because the lines in question may be in a branch that the job does not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcenv.records.manifest import WITHOUT_RANKS, Launcher


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """How the script will be started. This decides which notes apply."""

    launcher: Launcher
    nodes: int
    nproc_per_node: int


# If a script has none of these words, its syntax tree is not searched. Most scripts have none of them.
_WORDS = re.compile(
    rb"\bDataParallel\b|\bspawn\b|\bstart_processes\b|\bMASTER_(?:ADDR|PORT)\b|tcp://|\bTCPStore\b|--local[_-]rank\b"
)


def notes_on(script: str, content: bytes, tree: Any, shape: LaunchShape) -> list[str]:
    """Return a note for each part of the script that does not work if hpcenv starts the ranks, with the line number.

    Args:
        script: the name of the script, for the notes.
        content: the content of the script, as bytes.
        tree: the syntax tree, as `compile` returns it. The module `ast` is not used, because its import takes time.
        shape: how the script will be started. With `--launcher none` and `--launcher ray`, the program starts the ranks
            itself, so there are only notes about relative imports.
    """
    found = {text: line for line, text in _relative_imports(script, tree)}
    if shape.launcher in WITHOUT_RANKS or not _WORDS.search(content):
        return [f"`{script}`, line {line}: {text}" for text, line in found.items()]
    nodes = list(_walk(tree))
    for rule in (_data_parallel, _spawn, _own_address, _local_rank_argument):
        for line, text in rule(nodes, shape):
            found[text] = min(line, found.get(text, line))
    return [f"`{script}`, line {line}: {text}" for text, line in sorted(found.items(), key=lambda one: one[1])]


FoundLines = Iterator[tuple[int, str]]


def _relative_imports(script: str, tree: Any) -> FoundLines:
    """Find `from . import x` at the top of a file that is started by its path (PEP 366)."""
    statement = next((one for one in tree.body if _kind(one) == "ImportFrom" and one.level), None)
    if statement is not None and script.endswith(".py"):
        module = script.removesuffix(".py").removeprefix("./").replace("/", ".")
        how = f"-m {module}" if re.fullmatch(r"\w+(\.\w+)+", module) else "-m PACKAGE.MODULE, from the folder above it"
        yield (
            statement.lineno,
            f"`from .` fails in a file that is started by its path; the module is {how}",
        )


def _data_parallel(nodes: list[Any], shape: LaunchShape) -> FoundLines:
    """Find torch.nn.DataParallel. The documentation of torch 2.13 recommends DistributedDataParallel instead."""
    if shape.nproc_per_node * shape.nodes == 1:
        return
    for call in _calls(nodes, "DataParallel"):
        what = "each rank would use all GPUs of its node, and the gradients of the ranks would not be averaged"
        yield call.lineno, f"DataParallel is for one process: {what}; DistributedDataParallel is for ranks"


def _spawn(nodes: list[Any], shape: LaunchShape) -> FoundLines:
    """Find torch.multiprocessing.spawn (documentation of torch 2.13)."""
    for call in _calls(nodes, "spawn", "start_processes"):
        if _name(call.func).split(".")[0] in ("mp", "torch", "multiprocessing", "spawn", "start_processes"):
            what = f"the script starts processes itself ({_name(call.func)})"
            count = shape.nproc_per_node
            whose = "the rank of each node" if count == 1 else f"each of the {count} ranks of a node"
            ranks = f"{whose} would start processes again"
            yield call.lineno, f"{what}: {ranks}; --launcher none is for that"


def _own_address(nodes: list[Any], shape: LaunchShape) -> FoundLines:
    """Find fixed values of MASTER_ADDR, MASTER_PORT, tcp:// or TCPStore (documentation of torch.distributed 2.13)."""
    for line, name, value in _environment_values(nodes):
        if name in ("MASTER_ADDR", "MASTER_PORT"):
            yield line, f"{name} is set to {value!r}, although the launch sets it: {_harm(name, shape)}"
    for call in _calls(nodes, "init_process_group"):
        fixed = _argument(call, "init_method", 1)
        if fixed is not None and fixed.startswith("tcp://"):
            what = f"init_method is {fixed!r}, although the launch chooses host and port"
            yield call.lineno, f"{what}: {_harm('MASTER_PORT', shape)}; init_method='env://' uses them"
    for call in _calls(nodes, "TCPStore"):
        fixed = _argument(call, "port", 1)
        if fixed is not None and fixed != "0":
            yield call.lineno, f"TCPStore has the fixed port {fixed}: {_harm('MASTER_PORT', shape)}"


def _environment_values(nodes: list[Any]) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the name and the fixed value for each `os.environ[...] = ...` and `os.environ.update(...)`."""
    for node in nodes:
        pairs: list[tuple[str | None, Any]] = []
        if _kind(node) == "Assign":
            pairs = [(_environ_key(target), node.value) for target in node.targets]
        elif _kind(node) == "Call" and f".{_name(node.func)}".endswith(".environ.update"):
            pairs = [(word.arg, word.value) for word in node.keywords]
            for given in node.args:
                if _kind(given) == "Dict":
                    # `{**other}` has a value without a key.
                    keys = [None if key is None else _text(key) for key in given.keys]
                    pairs += zip(keys, given.values, strict=True)
        for name, value in pairs:
            text = _text(value)
            if name is not None and text is not None:
                yield node.lineno, name, text


def _argument(call: Any, name: str, position: int) -> str | None:
    """Return the text of an argument, found by name or position; None if the argument is not a literal text."""
    named = [word.value for word in call.keywords if word.arg == name]
    given = named or call.args[position : position + 1]
    return _text(given[0]) if given else None


def _harm(name: str, shape: LaunchShape) -> str:
    if name == "MASTER_ADDR" and shape.nodes > 1:
        return "the nodes may not find each other"
    if name == "MASTER_PORT":
        return "another job on the node may have that port"
    return "the ranks may not find each other"


def _local_rank_argument(nodes: list[Any], shape: LaunchShape) -> FoundLines:
    """Find an option --local-rank of the script.

    torch.distributed.launch passed this option to the script, but torchrun does not ("Migrating to torchrun", torch
    2.13).
    """
    reads = any(_text(node) == "LOCAL_RANK" for node in nodes)
    for call in _calls(nodes, "add_argument"):
        words = [_text(word) for word in call.args]
        named = next((word for word in words if word in ("--local_rank", "--local-rank")), None)
        if named is not None and not reads and shape.nproc_per_node > 1:
            what = f"the ranks do not get {named}, so all would take its default"
            yield call.lineno, f"{what}: read int(os.environ['LOCAL_RANK'])"


# -- the tree -----------------------------------------------------------------------------


def _walk(tree: Any) -> Iterator[Any]:
    """Yield all nodes of the syntax tree, as ast.walk does."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                todo.extend(one for one in value if hasattr(one, "_fields"))
            elif hasattr(value, "_fields"):
                todo.append(value)


def _kind(node: Any) -> str:
    return type(node).__name__


def _calls(nodes: list[Any], *names: str) -> Iterator[Any]:
    return (node for node in nodes if _kind(node) == "Call" and _name(node.func).rpartition(".")[2] in names)


def _name(node: Any) -> str:
    """Return the name of an expression like `a.b.c`; empty for any other expression."""
    if _kind(node) == "Name":
        return str(node.id)
    if _kind(node) == "Attribute":
        before = _name(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _text(node: Any) -> str | None:
    """Return the text of a literal, or of a literal in `str(...)`; None for any other expression."""
    if _kind(node) == "Call" and _name(node.func) == "str" and len(node.args) == 1:
        node = node.args[0]
    if _kind(node) != "Constant" or not isinstance(node.value, (str, int)) or isinstance(node.value, bool):
        return None
    return str(node.value)


def _environ_key(node: Any) -> str | None:
    """Return NAME if the expression is `os.environ["NAME"]`; None for any other expression."""
    if _kind(node) != "Subscript" or _name(node.value).rpartition(".")[2] != "environ":
        return None
    return _text(node.slice)
