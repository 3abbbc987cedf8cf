"""Build facts of torch that only its binaries contain.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.elf import Elf
from hpcenv.incontainer.probe.paths import open_regular
from hpcenv.incontainer.probe.table import Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import describe_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterator

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts, Value

SEARCH_PIECE = 1 << 20
SEARCH_BYTES = 64 << 20  # libtorch_python has 5 MiB of constants


def probe_torch_binary(env: ProbedEnvironment) -> Facts:
    """Return the GPU architectures for which torch has kernels, and the C++ ABI with which torch was built."""
    fields = ("torch.arch-list", "torch.cxx11-abi")
    if env.values.get("torch.version") == "absent":
        return dict.fromkeys(fields, "absent")
    if env.torch is None:
        return dict.fromkeys(fields, Unknown("torch's folder was not found"))
    facts: Facts = {}
    questions: tuple[tuple[str, Callable[[ProbedEnvironment], Value]], ...] = (
        ("torch.arch-list", _arch_list),
        ("torch.cxx11-abi", _cxx11_abi),
    )
    for field, question in questions:
        try:
            facts[field] = question(env)
        except (OSError, ValueError) as error:
            facts[field] = Unknown(describe_error(error))
    return facts


def _arch_list(env: ProbedEnvironment) -> Value:
    """Return the list in the C string that torch.cuda.get_arch_list() splits: 'sm_80 sm_90' in libtorch_python."""
    import re

    if env.values.get("torch.cuda") == "none":
        return "none"
    pattern = re.compile(rb"\0((?:sm|compute)_[0-9]+[a-z]?(?: (?:sm|compute)_[0-9]+[a-z]?)*)\0")
    texts = set(_strings(env, str(env.torch) + "/lib/libtorch_python.so", (b"\0sm_", b"\0compute_"), pattern))
    if len(texts) != 1:
        return Unknown(f"{len(texts)} strings in libtorch_python.so could be the list of architectures")
    return texts.pop().decode("ascii").split(" ")


def _strings(
    env: ProbedEnvironment, path: str, starts: tuple[bytes, ...], pattern: re.Pattern[bytes]
) -> Iterator[bytes]:
    """Yield the matches in the constants of a library (its segments that are not writable and not executable)."""
    overlap = 4096
    descriptor, _ = open_regular(path, env.inside)
    try:
        elf = Elf(descriptor)
        for start, size in elf.constants:
            for offset in range(start, start + min(size, SEARCH_BYTES), SEARCH_PIECE):
                # The byte before the piece is read too, because a string begins after a NUL or at the segment's start.
                piece = os.pread(descriptor, 1 + SEARCH_PIECE + overlap, offset - 1) if offset > start else b""
                piece = piece or b"\0" + os.pread(descriptor, SEARCH_PIECE + overlap, offset)
                for word in starts:
                    at = piece.find(word)
                    while at >= 0:
                        match = pattern.match(piece, at)
                        if match:
                            yield match.group(1)
                        at = piece.find(word, at + 1)
    finally:
        os.close(descriptor)


def _cxx11_abi(env: ProbedEnvironment) -> Value:
    """Return whether libc10 uses the new C++ ABI. The type of std::string in torchCheckFail's symbol shows this."""
    path = str(env.torch) + "/lib/libc10.so"
    descriptor, _ = open_regular(path, env.inside)
    try:
        symbols = Elf(descriptor).symbol_names(descriptor)
    finally:
        os.close(descriptor)
    name = b"_ZN3c106detail14torchCheckFailEPKcS2_jRK"
    if name + b"NSt7__cxx1112basic_string" in symbols:
        return "true"
    return "false" if name + b"Ss\0" in symbols else Unknown("libc10.so does not define torchCheckFail")


PROBES: tuple[Probe, ...] = (Probe("torch-binary", ("torch.arch-list", "torch.cxx11-abi"), probe_torch_binary),)
