"""Measure how close numbers are: by equal bits, units in the last place, tolerance, or an interval over seeds. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

# rtol and atol of `torch.testing.assert_close` (torch 2.13, testing/_comparison.py, read 2026-11-22). Values that were
# printed with few digits are compared as float32, because a training rarely computes its loss in float64.
ASSERT_CLOSE = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "printed": (1.3e-6, 1e-5),
}
# The types from the most exact to the coarsest. If two values have different types, the coarser type is used.
_COARSER = ("float64", "float32", "printed", "float16", "bfloat16")

# For each type: the format of a number, the format of its bits (both for struct), and how many low bits are cut off.
# A bfloat16 is the upper half of a float32.
_BITS = {
    "float64": ("<d", "<q", 0),
    "float32": ("<f", "<i", 0),
    "float16": ("<e", "<h", 0),
    "bfloat16": ("<f", "<i", 16),
}

# Two-sided 95 % quantiles of Student's t, by degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
FEWEST_SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What counts as close: `|value - reference| <= atol + rtol * |reference|`, or at most `ulp` ULP apart.

    Attributes:
        rtol, atol: the tolerance. If `rtol` and `atol` are None, `assert_close`'s tolerance for the type of the values
            is used.
        ulp: largest distance in units in the last place; None if rtol and atol are used.
    """

    rtol: float | None = None
    atol: float | None = None
    ulp: int | None = None

    def of(self, dtype: str) -> tuple[float, float]:
        """Return rtol and atol for values of a type."""
        rtol, atol = ASSERT_CLOSE.get(dtype, ASSERT_CLOSE["float64"])
        if self.rtol is None and self.atol is None:
            return rtol, atol
        return self.rtol or 0.0, self.atol or 0.0

    def holds(self, reference: float, value: float, dtype: str) -> bool:
        """Return whether a value is close to its reference."""
        if same_bits(reference, value):
            return True
        if not (math.isfinite(reference) and math.isfinite(value)):
            return False
        if self.ulp is not None:
            distance = ulps(reference, value, dtype)
            return distance is not None and distance <= self.ulp
        rtol, atol = self.of(dtype)
        return abs(value - reference) <= atol + rtol * abs(reference)

    def in_words(self, dtype: str) -> str:
        """Return the rule as text."""
        if self.ulp is not None:
            return f"at most {self.ulp} ULP of {dtype}"
        rtol, atol = self.of(dtype)
        origin = " (torch.testing.assert_close)" if self.rtol is None and self.atol is None else ""
        return f"rtol {rtol:g}, atol {atol:g}{origin}"


def coarser(first: str, second: str) -> str:
    """Return the coarser of two types of numbers."""
    known = [dtype for dtype in (first, second) if dtype in _COARSER]
    return max(known, key=_COARSER.index) if known else "float64"


def same_bits(first: float, second: float) -> bool:
    """Return whether two numbers have the same bits. All NaN count as equal; 0.0 and -0.0 count as different."""
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return first == second and math.copysign(1.0, first) == math.copysign(1.0, second)


def ulps(first: float, second: float, dtype: str) -> int | None:
    """Return the distance between two numbers in units in the last place of a type. The distance of 0.0 and -0.0 is 0.

    Returns:
        The distance; None for NaN, infinity, an unknown type, or a number that the type cannot represent.
    """
    if dtype not in _BITS or not (math.isfinite(first) and math.isfinite(second)):
        return None
    try:
        return abs(_ordered(first, dtype) - _ordered(second, dtype))
    except (OverflowError, ValueError):
        return None


def _ordered(value: float, dtype: str) -> int:
    """Return the bits of a number as an integer. A larger number has a larger integer."""
    number, bits, cut = _BITS[dtype]
    packed = struct.pack(number, value)
    raw: int = struct.unpack(bits, packed)[0]
    if struct.unpack(number, packed)[0] != value or raw & ((1 << cut) - 1):
        raise ValueError("not a number of this type")
    sign = 1 << (8 * struct.calcsize(bits) - 1)
    return raw >> cut if raw >= 0 else -((raw + sign) >> cut)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its two-sided 95 % confidence interval (Student's t)."""

    count: int
    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval | None:
    """Return the confidence interval of a mean; None if there are too few values, or a value is not finite."""
    count = len(values)
    if count < FEWEST_SEEDS or not all(math.isfinite(value) for value in values):
        return None
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    # With more than 30 degrees of freedom, the quantile for 30 is used, so the interval is a little too wide.
    half = _T95[min(count - 2, len(_T95) - 1)] * math.sqrt(variance / count)
    return Interval(count=count, mean=mean, low=mean - half, high=mean + half)
