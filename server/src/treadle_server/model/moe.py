"""Mixture of experts: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array
from treadle_plugin_api.decoder_config import MoeConfig

from treadle_server.model.ops import softmax_forward


def route_forward(scores: Array, moe: MoeConfig) -> tuple[NDArray[np.int64], Array]:
    """Return ids and weights, both `[rows, top_k]`, of the experts that router scores `[rows, experts]` choose.

    The best comes first; of experts with equal scores the one with the lower id.
    """
    probabilities = softmax_forward(scores)
    ids = np.argsort(-probabilities, axis=1, kind="stable")[:, : moe.top_k]
    weights = np.take_along_axis(probabilities, ids, axis=1)
    if moe.normalized:
        weights /= np.add.reduce(weights, axis=1, keepdims=True)
    return ids, weights


def rows_by_expert(ids: NDArray[np.int64], weights: Array) -> Iterator[tuple[int, NDArray[np.int64] | slice, Array]]:
    """Yield each chosen expert, ascending, with the rows that go to it and their weights `[rows of it, 1]`."""
    if len(ids) == 1:
        for slot in np.argsort(ids[0], kind="stable"):
            yield int(ids[0, slot]), slice(0, 1), weights[:, slot : slot + 1]
        return
    for expert in np.unique(ids).tolist():
        rows, slots = np.nonzero(ids == expert)
        yield expert, rows, weights[rows, slots, None]
