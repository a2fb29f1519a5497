"""Ascending numbers as slices."""

from __future__ import annotations

from collections.abc import Sequence


def progressions(numbers: Sequence[int]) -> list[range]:
    """Split ascending numbers into as few slices as a look ahead of one finds: `0, 1, 2, 6, 8` is `0..2`, `6, 8`."""
    slices: list[range] = []
    start = 0
    while start < len(numbers):
        stop = start + 1
        # A number may stand twice (a row that is exported under two keys); no slice holds it twice.
        step = max(1, numbers[stop] - numbers[start]) if stop < len(numbers) else 1
        while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        slices.append(range(numbers[start], numbers[stop - 1] + 1, step))
        start = stop
    return slices
