"""How close two numbers are."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.reproduction.closeness import Tolerance, interval, same_bits, ulps


@pytest.mark.parametrize(
    ("first", "second", "dtype", "distance"),
    [
        (1.0, 1.0 - 2**-24, "float32", 1),
        (1.0, 1.0 + 2**-23, "float32", 1),
        (1.0, 1.0 + 2**-52, "float64", 1),
        (1.0, 1.0078125, "bfloat16", 1),
        (-2.0, -1.9921875, "bfloat16", 1),
        (1.0, 1.0009765625, "float16", 1),
        (0.0, -0.0, "float32", 0),
        (-(2**-149), 2**-149, "float32", 2),
        (0.1, 0.2, "float32", None),  # no float32 is 0.1
        (1.0 + 2**-10, 1.0, "bfloat16", None),
        (math.nan, 1.0, "float32", None),
        (math.inf, 3.4e38, "float32", None),
        (1.0, 2.0, "printed", None),
    ],
)
def test_units_in_the_last_place(first, second, dtype, distance):
    assert ulps(first, second, dtype) == ulps(second, first, dtype) == distance


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 1000))
def test_the_distance_counts_neighbours(value, count):
    bits = struct.unpack("<i", struct.pack("<f", abs(value)))[0] + count
    if bits >= 0x7F800000:
        return
    other = struct.unpack("<f", struct.pack("<i", bits))[0]
    assert ulps(abs(value), other, "float32") == count
    assert ulps(-abs(value), -other, "float32") == count


def test_equal_bits_see_the_sign_of_zero_and_take_nan_for_nan():
    assert same_bits(math.nan, -math.nan) and same_bits(-0.0, -0.0)
    assert not same_bits(0.0, -0.0) and not same_bits(math.nan, 0.0) and not same_bits(1.0, 1.0 + 2**-52)


def test_the_tolerance_is_that_of_assert_close():
    torch = pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        kind = getattr(torch, dtype)
        for reference, value in (
            (1.0, 1.0000001),
            (1.0, 1.001),
            (1.0, 1.02),
            (0.0, 9e-6),
            (-3.0, -3.00001),
            (1e-7, 2e-7),
        ):
            first, second = (torch.tensor(number, dtype=kind) for number in (value, reference))
            try:
                torch.testing.assert_close(first, second)
                expected = True
            except AssertionError:
                expected = False
            assert Tolerance().holds(second.item(), first.item(), dtype) is expected, (dtype, reference, value)


def test_a_value_that_is_not_finite_is_close_to_itself_only():
    assert Tolerance().holds(math.inf, math.inf, "float32")
    assert not Tolerance(rtol=1.0).holds(math.inf, 1.0, "float32") and not Tolerance().holds(math.nan, 1.0, "float32")


def test_own_tolerances():
    assert Tolerance(rtol=0.1).holds(1.0, 1.09, "float32") and not Tolerance(rtol=0.1).holds(1.0, 1.2, "float32")
    assert Tolerance(ulp=1).holds(1.0, 1.0 + 2**-23, "float32")
    assert not Tolerance(ulp=1).holds(1.0, 1.0 + 2**-22, "float32")
    assert "assert_close" in Tolerance().in_words("float32") and "2 ULP" in Tolerance(ulp=2).in_words("float32")


def test_the_interval_over_seeds():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found is not None and found.mean == 3.0
    # s = 1.5811, t(4) = 2.776, half = 1.963
    assert found.low == pytest.approx(3 - 1.963, abs=1e-3) and found.high == pytest.approx(3 + 1.963, abs=1e-3)
    assert interval([1.0, 2.0]) is None and interval([1.0, 2.0, math.nan]) is None
