"""Count the samples that this rank takes from its loaders between two optimizer steps: its part of the global batch.

The iterators of torch's DataLoader are wrapped until the second step (torch 1.10 to 2.15). Batches without gradients
(for a validation) do not count. Loaders of other libraries are not seen. Without a DataLoader of torch, the number is
unknown.
"""

import functools
from typing import Any, Callable, Optional


class SampleCounter:
    """Counts the samples of the batches that the script takes."""

    def __init__(self, torch: Any, is_rank: Callable[[], bool]) -> None:
        self._torch = torch
        self._is_rank = is_rank
        self._samples = 0
        self._unknown = False
        self._undo = None  # type: Optional[Callable[[], None]]

    def install(self, dataloader: Any) -> None:
        """Wrap the iterators; `dataloader` is the module torch.utils.data.dataloader."""
        kind = dataloader._BaseDataLoaderIter
        original = kind.__next__

        @functools.wraps(original)
        def take(this: Any) -> Any:
            batch = original(this)
            if self._is_rank() and self._torch.is_grad_enabled():
                size = getattr(getattr(this, "_index_sampler", None), "batch_size", None)
                self._unknown = self._unknown or not isinstance(size, int)
                self._samples += size if isinstance(size, int) else 0
            return batch

        kind.__next__ = take
        self._undo = functools.partial(setattr, kind, "__next__", original)

    def remove(self) -> None:
        """Remove the wrapper from the iterators."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def taken(self) -> Optional[int]:
        """Return the number of samples since the last call; None for 0, or if a loader did not give the number."""
        found = self._samples
        self._samples = 0
        return None if self._unknown or not found else found
