"""Floats as text, without a loss of bits."""


def exact(value: float) -> str:
    """Return `float.hex()`, or `nan`, `inf`, `-inf`. Pure."""
    if value != value:
        return "nan"
    if value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return value.hex()
