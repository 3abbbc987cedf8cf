"""The bytes of a tensor in order, for a hash. torch.hash_tensor is an XOR, so it ignores the order."""

import ctypes
from typing import Any


def add_bytes(digest: Any, tensor: Any) -> int:
    """Give all bytes of a tensor to a hash, in the order of its elements; return their number.

    The values are not normalised: 0.0 and -0.0 differ, and NaNs with different bits differ. Only the rank's own part of
    a DTensor is hashed. A tensor on a GPU is copied. The copy waits for the GPU.

    Args:
        digest: hash object of hashlib.
        tensor: the tensor.

    Raises:
        RuntimeError: the tensor has no memory now, or its bytes cannot be copied (for example, a FakeTensor).
    """
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    count = tensor.numel() * tensor.element_size()
    if count and not tensor.data_ptr():
        raise RuntimeError("a tensor has no memory now")
    if count:
        # NumPy is not used, because an image with torch may lack it.
        digest.update((ctypes.c_char * count).from_address(tensor.data_ptr()))
    return int(count)
