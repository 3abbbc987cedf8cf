"""The seeds of a rank.

Each rank gets base seed + 1,000,003 x global rank, modulo 2^32. So rank 0 has the base seed itself. The ranks have
different seeds, as they have in a script without seeds. If two runs have neighbouring base seeds (for example 1 and 2),
no seed occurs in both runs. NumPy accepts seeds below 2^32 (numpy.random.seed).

Workers of a torch DataLoader need no seed here. torch draws one number from the rank's generator, and seeds each worker
with this number plus the number of the worker (torch 1.9 to 2.13, utils/data/_utils/worker.py).
"""

from typing import Any

_BETWEEN_RANKS = 1000003
_BELOW = 1 << 32


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed of one rank. Pure."""
    return (seed + _BETWEEN_RANKS * rank) % _BELOW


def seed_python(seed: int) -> None:
    import random

    random.seed(seed)


def seed_numpy(numpy: Any, seed: int) -> None:
    numpy.random.seed(seed)


def seed_torch(torch: Any, seed: int) -> None:
    """Seed torch's generator of the CPU now, and the generators of the GPUs when CUDA starts."""
    torch.manual_seed(seed)
