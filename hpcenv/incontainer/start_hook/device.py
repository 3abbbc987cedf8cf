"""Record the device of a rank's first backward pass, because a script without a GPU may train on the CPU silently.

`torch.autograd.backward` is wrapped, and its first call is recorded (torch 1.10 to 2.15). This module does not see the
operations that DeepSpeed or Megatron's pipeline run below torch's Python functions.
"""

import functools
from typing import Any, Callable, Dict, List


def watch(torch: Any, found: Callable[[Dict[str, str]], None]) -> None:
    """Call `found` once, before the first backward pass, with the device of this pass and the identity of the GPU."""
    autograd = torch.autograd
    original = autograd.backward
    seen = []

    def look(tensors: Any) -> None:
        seen.append(True)
        try:
            found(_describe(torch, tensors if isinstance(tensors, torch.Tensor) else tensors[0]))
        except Exception as error:  # a problem with a record must not end a training
            found({"problem": "the device of the first backward pass: %s: %s" % (type(error).__name__, error)})

    look_outside = getattr(torch, "_disable_dynamo", lambda one: one)(look)  # type: Callable[[Any], None]

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not seen:
            look_outside(tensors)
        return original(tensors, *args, **kwargs)

    autograd.backward = backward


def _describe(torch: Any, tensor: Any) -> Dict[str, str]:
    device = {"device": str(tensor.device)}
    if not tensor.is_cuda:
        return device
    found = identity(torch.cuda.get_device_properties(tensor.device))
    return {**device, **{"gpu_" + name: value for name, value in found.items()}}


def identity(properties: Any) -> Dict[str, str]:
    """Return model, UUID and PCI address of a GPU. A value that this version of torch does not give is empty."""
    numbers = [getattr(properties, "pci_%s_id" % part, None) for part in ("domain", "bus", "device")]  # type: List[Any]
    uuid = str(getattr(properties, "uuid", ""))
    return {
        "model": str(properties.name),
        # NVML writes the vendor's prefix before the UUID, and torch leaves it out. A UUID of AMD has no prefix.
        "uuid": "GPU-" + uuid if "-" in uuid and uuid[:4] not in ("GPU-", "MIG-") else uuid,
        "bus": "" if None in numbers else "%04x:%02x:%02x.0" % tuple(numbers),
    }
