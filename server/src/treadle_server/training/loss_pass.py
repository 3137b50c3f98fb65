"""One batch through the model: its loss, and from there back to every parameter.

Logits are made for a few rows at a time, and only of rows whose labels count: a large vocabulary never needs
`[tokens, vocab]` at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array

from treadle_server.errors import InvalidRequestError
from treadle_server.model.trainable import TrainableDecoder
from treadle_server.training.batches import TrainingBatch
from treadle_server.training.losses import LOSSES, RowLosses, Targets
from treadle_server.training.options import keyword_options

# Logits held at once: 64 MB in float32.
MAX_LOGITS = 1 << 24

_RANGES: Mapping[str, tuple[float, float]] = {"label_smoothing": (0, 1), "z_loss": (0, math.inf), "clip_range": (0, 1)}


def choose_loss(name: str, options: Mapping[str, float]) -> Callable[[Array, Targets], RowLosses]:
    """Return the named loss with its options. Raises InvalidRequestError."""
    if name not in LOSSES:
        raise InvalidRequestError.of("loss", f"must be one of {', '.join(LOSSES)}, but is {name!r}")
    function, known = LOSSES[name], keyword_options(LOSSES[name])
    for option, value in options.items():
        if option not in known:
            listing = ", ".join(known) or "none"
            raise InvalidRequestError.of(option, f"is no option of {name}; its options: {listing}")
        low, high = _RANGES.get(option, (-math.inf, math.inf))
        if not (low <= value <= high and math.isfinite(value)):
            raise InvalidRequestError.of(option, f"must be {low:g} to {high:g}, but is {value}")
    return lambda logits, targets: function(logits, targets, **options)


class LossPass:
    """`forward`, then the loss is known; then, if it was told to save, `backward`.

    Attributes:
        total_weight: the sum of the counted tokens' weights.
        total_loss: the weighted sum of their losses.
        logprobs: `[rows] float64` of the counted tokens.
    """

    def __init__(
        self, decoder: TrainableDecoder, batch: TrainingBatch, loss: Callable[[Array, Targets], RowLosses]
    ) -> None:
        self._decoder, self._batch, self._loss = decoder, batch, loss
        self._saved: dict[str, Array] = {}
        self._dhidden = np.zeros(0)
        self._head_grads: dict[str, Array] = {}
        self.total_weight = math.fsum(batch.targets.weights)
        self.total_loss = 0.0
        self.logprobs: NDArray[np.float64] = np.zeros(len(batch.predicting))

    def forward(self, *, saving: bool) -> None:
        """Work out the loss, and when saving the gradients of the hidden states and of the head."""
        decoder, batch = self._decoder, self._batch
        if saving:
            hidden = decoder.forward_saving(batch.batch, self._saved)
            self._dhidden = np.zeros_like(hidden)
            self._head_grads = {name: np.zeros_like(decoder.parameters[name]) for name in decoder.head_parameters()}
        else:
            hidden = decoder.forward(batch.batch)
        step = max(1, MAX_LOGITS // decoder.config.vocab_size)
        losses = [self._rows(hidden, slice(start, start + step)) for start in range(0, len(self.logprobs), step)]
        self.total_loss = float(np.concatenate(losses).sum())

    def _rows(self, hidden: Array, rows: slice) -> NDArray[np.float64]:
        """Return the losses of some of the counted rows."""
        places = self._batch.predicting[rows]
        read = hidden[places]
        result = self._loss(self._decoder.head(read), self._batch.targets.rows(rows))
        self.logprobs[rows] = result.logprobs
        if self._head_grads:
            self._dhidden[places] = self._decoder.head_backward(read, result.dlogits, self._head_grads)
        return result.losses

    def backward(self) -> dict[str, Array]:
        """Return the gradient of the summed loss by every canonical parameter."""
        grads = self._decoder.backward(self._saved, self._dhidden)
        for name, gradient in self._head_grads.items():
            grads[name] += gradient
        return grads
