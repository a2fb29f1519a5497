"""Ascending numbers, as columns and as slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def progressions(numbers: Sequence[int]) -> list[range]:
    """Split ascending numbers into as few slices as a look ahead of one finds: `0, 1, 2, 6, 8` is `0..2`, `6, 8`."""
    return [rows for rows, _ in paired_progressions(numbers, numbers)]


def paired_progressions(rows: Sequence[int], places: Sequence[int]) -> list[tuple[range, range]]:
    """Split pairs of a row and a place into as few pairs of slices as a look ahead of one finds.

    Args:
        rows: ascending; one may stand twice (a row that is exported under two keys), and no slice holds it twice.
        places: one for each row, in any order; no slice goes down.
    """
    pairs: list[tuple[range, range]] = []
    start, count = 0, len(rows)
    while start < count:
        last, row_step, place_step = start, 1, 1
        if start + 1 < count:
            steps = rows[start + 1] - rows[start], places[start + 1] - places[start]
            if min(steps) > 0:
                last, (row_step, place_step) = start + 1, steps
        while (
            start < last < count - 1
            and rows[last + 1] - rows[last] == row_step
            and places[last + 1] - places[last] == place_step
        ):
            last += 1
        pairs.append((range(rows[start], rows[last] + 1, row_step), range(places[start], places[last] + 1, place_step)))
        start = last + 1
    return pairs
