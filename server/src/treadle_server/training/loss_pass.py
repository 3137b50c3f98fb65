"""One batch through the model: its loss, and from there back to every parameter.

Logits are made for a few rows at a time, and only of rows whose labels count: a large vocabulary never needs
`[tokens, vocab]` at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array

from treadle_server.model.trainable import TrainableDecoder
from treadle_server.training.batches import TrainingBatch
from treadle_server.training.chosen_loss import ChosenLoss

# Logits held at once: 8 MB in float32, of the order of the last-level cache; of a large vocabulary as many rows as it
# takes for the head's gradient, which every part adds to, to cost little beside its product.
MAX_LOGITS = 1 << 21
MIN_ROWS = 256


class LossPass:
    """`forward`, then the loss is known; then, if it was told to save, `backward`.

    `wanted` names the gradients to work out, as `TrainableDecoder.backward` does; None stands for all.

    Attributes:
        total_weight: the sum of the counted tokens' weights.
        total_loss: the weighted sum of their losses.
        logprobs: `[rows] float64` of the counted tokens.
    """

    def __init__(
        self,
        decoder: TrainableDecoder,
        batch: TrainingBatch,
        loss: ChosenLoss,
        wanted: Collection[str] | None = None,
    ) -> None:
        self._decoder, self._batch, self._loss, self._wanted = decoder, batch, loss, wanted
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
            names = decoder.head_parameters()
            names = names if self._wanted is None else tuple(name for name in names if name in self._wanted)
            self._head_grads = {name: np.zeros_like(decoder.parameters[name]) for name in names}
        else:
            hidden = decoder.forward(batch.batch)
        step = max(MIN_ROWS, MAX_LOGITS // decoder.config.vocab_size)
        losses = [self._rows(hidden, slice(start, start + step)) for start in range(0, len(self.logprobs), step)]
        self.total_loss = float(np.concatenate([np.zeros(0), *losses]).sum())

    def _rows(self, hidden: Array, rows: slice) -> NDArray[np.float64]:
        """Return the losses of some of the counted rows."""
        places = self._batch.predicting[rows]
        read = hidden[places]
        result = self._loss(self._decoder.head(read), self._batch.targets.rows(rows))
        self.logprobs[rows] = result.logprobs
        if len(self._dhidden):
            self._dhidden[places] = self._decoder.head_backward(read, result.dlogits, self._head_grads)
        return result.losses

    def backward(self) -> dict[str, Array]:
        """Return the wanted gradients of the summed loss."""
        grads = self._decoder.backward(self._saved, self._dhidden, self._wanted)
        for name, gradient in self._head_grads.items():
            grads[name] = np.add(grads[name], gradient, out=gradient) if name in grads else gradient
        return grads
