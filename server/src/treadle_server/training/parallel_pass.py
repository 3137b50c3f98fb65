"""A batch on several cores: its rows in parts, each through the model and back on a thread of its own.

A matrix product alone uses many cores; what stands between the products does not, and in a small model that is half of
the time. So every part has a thread, and products the cores that are left, mostly one. The gradients of the parts are
added in their order: the bits depend on the number of threads, on nothing else.
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
from treadle_server.training.loss_pass import LossPass
from treadle_server.training.threads import BlasThreads

# Tokens that are worth a thread.
MIN_TOKENS = 256
# Each part but the first has gradients of its own; all together take no more than this.
MAX_GRADIENT_BYTES = 640 << 20


class ParallelPass:
    """A `LossPass` in parts; see there for its attributes."""

    def __init__(
        self,
        decoder: TrainableDecoder,
        batch: TrainingBatch,
        loss: ChosenLoss,
        wanted: Collection[str] | None,
        threads: BlasThreads,
    ) -> None:
        num_parts = _num_parts(decoder, batch, wanted, threads.number)
        self._threads = threads
        self._parts = [LossPass(decoder, part, loss, wanted) for part in batch.split(num_parts)]
        self.total_weight = math.fsum(batch.targets.weights)
        self.total_loss = 0.0
        self.logprobs: NDArray[np.float64] = np.zeros(0)

    def forward(self, *, saving: bool) -> None:
        """Work out the loss, and when saving what `backward` needs."""
        self._threads.shared(lambda part: part.forward(saving=saving), self._parts)
        self.total_loss = math.fsum(part.total_loss for part in self._parts)
        self.logprobs = np.concatenate([part.logprobs for part in self._parts])

    def backward(self) -> dict[str, Array]:
        """Return the wanted gradients of the summed loss."""
        grads, *others = self._threads.shared(LossPass.backward, self._parts)

        def add(name: str) -> None:
            for other in others:
                grads[name] += other[name]

        if others:
            self._threads.each(add, list(grads))
        return grads


def _num_parts(
    decoder: TrainableDecoder, batch: TrainingBatch, wanted: Collection[str] | None, num_threads: int
) -> int:
    """Return how many parts are worth their threads and their gradients."""
    parameters = decoder.parameters
    num_bytes = sum(array.nbytes for name, array in parameters.items() if wanted is None or name in wanted)
    by_memory = 1 + MAX_GRADIENT_BYTES // max(1, num_bytes)
    return max(1, min(num_threads, by_memory, batch.batch.num_tokens // MIN_TOKENS))
