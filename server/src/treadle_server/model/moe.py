"""Mixture of experts: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array
from treadle_plugin_api.decoder_config import MoeConfig

from treadle_server.model.ops import softmax_forward
from treadle_server.model.ops_backward import softmax_backward


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


def route_backward(scores: Array, ids: NDArray[np.int64], moe: MoeConfig, weights: Array, dweights: Array) -> Array:
    """Return dscores `[rows, experts]` of the chosen experts' weights and dweights, both `[rows, top_k]`.

    The choice itself has no gradient: scores of experts that were not chosen count through the softmax alone.
    """
    probabilities = softmax_forward(scores)
    if moe.normalized:
        chosen = np.take_along_axis(probabilities, ids, axis=1)
        dweights = dweights - np.add.reduce(dweights * weights, axis=1, keepdims=True)
        dweights /= np.add.reduce(chosen, axis=1, keepdims=True)
    dprobabilities = np.zeros_like(probabilities)
    np.put_along_axis(dprobabilities, ids, dweights, axis=1)
    return softmax_backward(probabilities, dprobabilities)


def rows_by_expert(ids: NDArray[np.int64], weights: Array) -> Iterator[tuple[int, NDArray[np.int64] | slice, Array]]:
    """Yield each chosen expert, ascending, with the rows that go to it and their weights `[rows of it, 1]`."""
    if len(ids) == 1:
        for slot in np.argsort(ids[0], kind="stable"):
            yield int(ids[0, slot]), slice(0, 1), weights[:, slot : slot + 1]
        return
    for expert in np.unique(ids).tolist():
        rows, slots = np.nonzero(ids == expert)
        yield expert, rows, weights[rows, slots, None]
