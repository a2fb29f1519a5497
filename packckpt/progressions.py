"""Ascending numbers as slices."""

from __future__ import annotations

from collections.abc import Sequence


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
    start = 0
    while start < len(rows):
        stop = start + 1
        row_step, place_step = _step(rows, start), _step(places, start)
        while stop < len(rows) and 0 < row_step == _step(rows, stop - 1) and 0 < place_step == _step(places, stop - 1):
            stop += 1
        last = stop - 1
        pairs.append(
            (
                range(rows[start], rows[last] + 1, max(1, row_step)),
                range(places[start], places[last] + 1, max(1, place_step)),
            )
        )
        start = stop
    return pairs


def _step(numbers: Sequence[int], at: int) -> int:
    return numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
