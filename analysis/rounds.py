"""Samples by round: a series indexed by (round, save) as arrays, one a round."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.statistics import Array


def by_round(samples: pd.Series[float]) -> dict[int, Array]:
    """Return the samples of each round, both in order. (pandas' groupby takes a hundred times as long.)"""
    ordered = samples.sort_index()
    numbers = ordered.index.get_level_values("round").to_numpy()
    edges = np.flatnonzero(np.diff(numbers)) + 1
    parts = np.split(np.asarray(ordered, dtype=np.float64), edges)
    return {int(numbers[start]): part for start, part in zip([0, *edges], parts, strict=True)} if len(numbers) else {}
