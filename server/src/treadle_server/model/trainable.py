"""A decoder whose parameters change: what a trainer works on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from treadle_plugin_api.backend import Array, Batch, DifferentiableBackend, Weight
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.model.decoder import Decoder, DTypeName
from treadle_server.model.numpy_backend import NumpyBackend


class TrainableDecoder(Decoder):
    """A decoder with a backward pass. Its parameters are the very arrays that it computes with, never a second copy.

    Attributes:
        parameters: the canonical parameters, to be written to; call `refresh` afterwards.
        recompute: keep no more for the backward pass than what enters each layer, and run the layers again: the same
            gradients for less memory and about a third more time.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Mapping[str, Weight],
        *,
        dtype: DTypeName = "float32",
        backend: DifferentiableBackend[Any] | None = None,
        recompute: bool = False,
    ) -> None:
        self.recompute = recompute
        self._differentiable = backend or NumpyBackend(dtype)
        super().__init__(config, params, backend=self._differentiable, dtype=dtype)
        self._views = self._differentiable.parameters(self._prepared)
        self.parameters: dict[str, Array] = dict(self._views)
        for name in self._views:
            if config.norm.unit_offset and _is_scale(name):  # adding one rounds: the stored number is kept beside it
                self.parameters[name] = np.empty_like(self._views[name])
                params[name].read_into(self.parameters[name])

    def refresh(self) -> None:
        """Take over what was written to `parameters`."""
        for name, view in self._views.items():
            if self.parameters[name] is not view:
                np.add(self.parameters[name], 1, out=view)

    def forward_saving(self, batch: Batch, saved: dict[str, Array]) -> Array:
        """Return `hidden [tokens, dim]` of whole sequences and keep in `saved` what `backward` needs.

        Of the sequences that have an adapter all have the same one.
        """
        self._check(batch, None)
        if len(set(batch.adapters or ()) - {None}) > 1:
            raise ValueError("the sequences of a batch that is trained on must share one adapter")
        return self._differentiable.forward_saving(self._prepared, batch, saved, self.recompute)

    def backward(
        self, saved: dict[str, Array], dhidden: Array, wanted: Collection[str] | None = None
    ) -> dict[str, Array]:
        """Return the wanted gradients given `dhidden [tokens, dim]`, and leave `saved` empty.

        `wanted` names canonical parameters, and matrices of the batch's adapter as `layers.0.attention.q.lora_A` and
        `.lora_B`; None stands for all of them. What is not wanted costs nothing. A head's own gradients are
        `head_backward`'s.
        """
        return self._differentiable.backward(self._prepared, saved, dhidden, wanted)

    def head_backward(self, hidden: Array, dlogits: Array, grads: dict[str, Array]) -> Array:
        """Return `dhidden [rows, dim]` given `dlogits [rows, vocab]`, and add the head's gradients to grads in place.

        grads has an array for each of `head_parameters` whose gradient is wanted.
        """
        return self._differentiable.head_backward(self._prepared, hidden, dlogits, grads)

    def faster(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what the backend has in the place of a loss or an optimizer of the server, or the function itself."""
        return self._differentiable.faster(function)

    def head_parameters(self) -> tuple[str, ...]:
        """Return the names of what lies behind the hidden states."""
        matrix = "embedding.weight" if self.config.tied_head else "head.weight"
        return tuple(name for name in (matrix, "head.bias", "embedding_out.weight") if name in self.parameters)


def _is_scale(name: str) -> bool:
    return "norm." in name and name.endswith(".weight")
