"""The bars that targets are made of: each reads one number from a chapter's results.

A time is a median. Ratios of times are rounded to three digits, as the spread between two runs of
one kernel is some tenths of a per cent: "no slower" means a ratio of at most 1.00.
"""

from __future__ import annotations

from labkit.problem import Bar


def fraction(rung: str, at_least: float, *, dtype: str, **size: int) -> Bar:
    """The roofline's time over the rung's, at one size."""
    return Bar(
        f"{rung} reaches {at_least:.0%} of the ceiling at {_at(dtype, size)}",
        lambda results: results.fraction(rung, dtype=dtype, **size),
        at_least=at_least,
    )


def seconds(rung: str, at_most: float, *, dtype: str, **size: int) -> Bar:
    """The rung's time at one size."""
    return Bar(
        f"{rung} takes at most {at_most * 1e6:g} µs at {_at(dtype, size)}",
        lambda results: results.time(rung, dtype=dtype, **size),
        at_most=at_most,
    )


def ratio(rung: str, other: str, at_most: float, *, dtype: str, **size: int) -> Bar:
    """The rung's time over that of another rung or peer, at one size."""
    return Bar(
        f"{rung} takes at most {at_most:.2f} times as long as {other} at {_at(dtype, size)}",
        lambda results: three_digits(
            results.time(rung, dtype=dtype, **size) / results.time(other, dtype=dtype, **size)
        ),
        at_most=at_most,
    )


def best_peer(rung: str, problem: str, *, dtype: str) -> Bar:
    """The rung's time over the fastest peer's, at the swept size where that is largest."""

    def worst(results) -> float:
        ratios = [
            results.time(rung, dtype=dtype, **size)
            / results.best_peer(problem, dtype=dtype, **size)
            for size in results.sizes(rung, dtype)
        ]
        return three_digits(max(ratios))

    return Bar(
        f"{rung} is no slower than the best peer at any swept size, {dtype}", worst, at_most=1.0
    )


def three_digits(ratio: float) -> float:
    """A ratio of two times, to as many digits as they are good for."""
    return float(f"{ratio:.3g}")


def _at(dtype: str, size: dict[str, int]) -> str:
    return ", ".join(f"{k}={v:,}" for k, v in size.items()) + f", {dtype}"
