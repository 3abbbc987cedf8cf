"""The hash over all trained parameters. The hash is needed because equal losses do not prove equal weights."""

import hashlib
from typing import Any, Dict, Iterator, List

from .tensor_bytes import add_bytes


def hash_parameters(optimizers: List[Any]) -> Dict[str, Any]:
    """Return sha256 over the bytes of all parameters in order, with the number of tensors and bytes.

    The parameters are hashed in the order of the optimizers' first steps, then of the groups in an optimizer, then of
    the parameters in a group. Only the rank's own part of a sharded parameter (DTensor) is hashed. The values are not
    normalised: 0.0 and -0.0 differ.

    Args:
        optimizers: the `param_groups` of each optimizer.

    Raises:
        RuntimeError: a parameter has no memory now.
    """
    digest, tensors, size = hashlib.sha256(), 0, 0
    for parameter in _parameters(optimizers):
        size += add_bytes(digest, parameter)
        tensors += 1
    return {"value": digest.hexdigest(), "tensors": tensors, "bytes": size}


def _parameters(optimizers: List[Any]) -> Iterator[Any]:
    seen = set()
    for groups in optimizers:
        for group in groups:
            for parameter in group["params"]:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter
