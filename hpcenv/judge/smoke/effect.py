"""Compare settings with the actions of NCCL, according to its log and to the libraries that a rank has loaded. Pure.

Runs on: COMPUTE NODE (the batch node). Standard library only. Some settings can be read back without NCCL.
judge/network/effect.py compares these settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hpcenv.judge.network.effect import selected
from hpcenv.records.smoke import SmokeRank

# A setting with its value, what the setting requests, and what NCCL did.
Ignored = tuple[str, str, str]


def _least(value: str, rank: SmokeRank) -> tuple[str, str] | None:
    return _channels(rank, value, lambda found, wanted: found >= wanted, "at least")


def _most(value: str, rank: SmokeRank) -> tuple[str, str] | None:
    return _channels(rank, value, lambda found, wanted: found <= wanted, "at most")


def _channels(rank: SmokeRank, value: str, fits: Callable[[int, int], bool], words: str) -> tuple[str, str] | None:
    found = 0 if rank.transport is None else rank.transport.channels
    if not found or not value.isdecimal() or fits(found, int(value)):
        return None
    return f"{words} {value} channels", f"{found} channels"


def _adapters(value: str, rank: SmokeRank) -> tuple[str, str] | None:
    """Compare NCCL_IB_HCA with the adapters of InfiniBand and RoCE in NCCL's log, such as `mlx5_0:1/IB`."""
    used = [name for name in (() if rank.transport is None else rank.transport.adapters) if "/" in name]
    other = [name for name in used if not selected(value, [name.partition("/")[0]], parts=":")]
    return (f"adapters {value}", ", ".join(other)) if other else None


def _plugin(value: str, rank: SmokeRank) -> tuple[str, str] | None:
    """Compare NCCL_NET_PLUGIN with the loaded libraries.

    The value of NCCL_NET_PLUGIN is a path, a file name, or the VALUE in libnccl-net-VALUE.so (env.rst, NCCL 2.30).
    """
    wanted = value.split(",", maxsplit=1)[0]
    if wanted in ("", "none") or not rank.libraries:
        return None
    name = wanted if ".so" in wanted else f"libnccl-net-{wanted}.so"
    if any(path == name or path.endswith(f"/{name.rpartition('/')[2]}") for path in rank.libraries):
        return None
    loaded = [path for path in rank.libraries if "-net" in path.rpartition("/")[2]]
    return f"plugin {name}", ", ".join(loaded) or "no plugin is loaded"


READ: dict[str, Callable[[str, SmokeRank], tuple[str, str] | None]] = {
    "NCCL_IB_HCA": _adapters,
    "NCCL_MAX_CTAS": _most,
    "NCCL_MAX_NCHANNELS": _most,
    "NCCL_MIN_CTAS": _least,
    "NCCL_MIN_NCHANNELS": _least,
    "NCCL_NET_PLUGIN": _plugin,
}


def ignored(settings: Mapping[str, str], rank: SmokeRank) -> Iterator[Ignored]:
    """Yield the settings of a rank that had no effect. Settings that cannot be read back are left out."""
    for name, read in READ.items():
        value = settings.get(name, "")
        found = read(value, rank) if value else None
        if found is not None:
            yield (f"{name}={value}", *found)
