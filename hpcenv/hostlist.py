"""Lists of nodes as Slurm writes them: `n[1-3,07],gpu1`. Pure.

Runs on: ANY NODE. Standard library only.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

# Slurm allows at most 64K nodes (MAX_SLURM_NODES, 24.11). A name in DNS has at most 255 characters.
_MOST_NODES = 65536
_LONGEST_NAME = 255


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expand Slurm's host list expression, for example `n[1-3,07],gpu1`.

    `scontrol show hostnames` is not used, because scontrol may be missing on this node. Invalid text is refused,
    because a wrong result could make the nodes use different rendezvous endpoints.

    Raises:
        ValueError: unbalanced brackets, an invalid range, or a node named twice.
    """
    names: list[str] = []
    for item in _split_outside_brackets(text):
        names += _expand_item(item)
        if len(names) > _MOST_NODES:
            raise ValueError(f"not a host list: more than {_MOST_NODES} nodes")
    if not names or not all(names):
        raise ValueError(f"not a host list: {text!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"a node is named twice in {text!r}")
    return tuple(names)


def fold_hostlist(names: Iterable[str]) -> str:
    """Return names as a host list expression, for example `n[1-3,7],gpu1`. `expand_hostlist` does the reverse.

    Names that differ only in their last number become one item. This item is at the position of the first such name.
    """
    parts = [re.fullmatch(r"(.*?)([0-9]{0,9})([^0-9]*)", name, re.DOTALL) for name in dict.fromkeys(names)]
    split = [part.groups() for part in parts if part is not None]
    # n08 and n10 have numbers of a fixed width, n8 and n10 do not.
    padded = {(prefix, suffix, len(digits)) for prefix, digits, suffix in split if digits[:1] == "0" and digits != "0"}
    groups: dict[tuple[str, str, int], list[int]] = {}
    for prefix, digits, suffix in split:
        key = (prefix, suffix, len(digits))
        numbers = groups.setdefault(key if key in padded else (prefix, suffix, 0), [])
        numbers += [int(digits)] if digits else []
    return ",".join(_folded(*key, sorted(numbers)) for key, numbers in groups.items())


def _folded(prefix: str, suffix: str, width: int, numbers: list[int]) -> str:
    if not numbers:
        return prefix + suffix
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    parts = [
        str(low).zfill(width) if low == high else f"{str(low).zfill(width)}-{str(high).zfill(width)}"
        for low, high in ranges
    ]
    return f"{prefix}{parts[0]}{suffix}" if len(numbers) == 1 else f"{prefix}[{','.join(parts)}]{suffix}"


def _split_outside_brackets(text: str) -> list[str]:
    items, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"unbalanced brackets in host list {text!r}")
        if character == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError(f"unbalanced brackets in host list {text!r}")
    return [*items, text[start:]]


def _expand_item(item: str) -> list[str]:
    """Expand one item. If the item has several bracket groups (`r[1-2]n[1-2]`), the last group changes fastest."""
    pieces = re.split(r"\[([^\[\]]*)\]", item)
    texts = pieces[0::2]
    if sum(map(len, texts)) > _LONGEST_NAME or len(texts) > _LONGEST_NAME:
        raise ValueError("not a host list: a name is longer than a host name can be")
    groups: list[list[str]] = []
    for piece in pieces[1::2]:
        groups.append(_expand_group(piece))
        # This check is inside the loop, because the loop could use gigabytes of memory before a check after it.
        if math.prod(map(len, groups)) > _MOST_NODES:
            raise ValueError(f"not a host list: more than {_MOST_NODES} nodes")
    numbered = itertools.product(*groups)
    return ["".join(itertools.chain(*zip(texts, (*numbers, ""), strict=True))) for numbers in numbered]


def _expand_group(group: str) -> list[str]:
    numbers: list[str] = []
    for part in group.split(","):
        numbers += _expand_range(part)
        if len(numbers) > _MOST_NODES:
            raise ValueError(f"not a host list: more than {_MOST_NODES} nodes")
    return numbers


def _expand_range(part: str) -> list[str]:
    low, dash, high = part.partition("-")
    if re.fullmatch(r"[0-9]+(-[0-9]+)?", part) is None:
        raise ValueError(f"not a range: {part!r}")
    if not dash:
        return [low]
    if len(part) > 40 or not int(low) <= int(high) < int(low) + _MOST_NODES:
        raise ValueError(f"not a range: {part!r}")
    # Leading zeros are part of the name: n[08-10] is n08, n09, n10.
    return [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
