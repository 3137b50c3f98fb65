"""What one backward pass works on: which gradients are wanted, and the backward halves of what has parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
from treadle_plugin_api.backend import Array

from treadle_server.model import ops_backward
from treadle_server.model.adapters import Delta, RowAdapters, lora_arrays, low_rank_backward, low_rank_forward
from treadle_server.model.fused import cut, parameter_views
from treadle_server.model.prepared import Linear, Norm, PreparedDecoder
from treadle_server.model.primitives import Primitives

# What lies behind the hidden states is `head_backward`'s.
HEAD_PARAMETERS = frozenset({"embedding_out.weight", "head.weight", "head.bias"})


class BackwardState:
    """One backward pass.

    Attributes:
        primitives: what it is made of.
        saved: what the forward pass kept.
        adapters: the adapter of each row, None when nobody has one.
    """

    def __init__(
        self,
        primitives: Primitives,
        prepared: PreparedDecoder,
        saved: Mapping[str, Array],
        wanted: Collection[str] | None,
    ) -> None:
        self.primitives = primitives
        self.prepared = prepared
        self.config = prepared.config
        self.saved = saved
        self.adapters = RowAdapters.of(saved["adapters"].tolist() if "adapters" in saved else None, saved["starts"])
        self._learned = parameter_views(prepared)
        for adapter in () if self.adapters is None else self.adapters.adapters:
            self._learned |= lora_arrays(adapter)
        if wanted is not None and not self._learned.keys() >= set(wanted):
            raise ValueError(f"no parameter is named {min(set(wanted) - self._learned.keys())}")
        self._wanted = frozenset(self._learned if wanted is None else wanted) - HEAD_PARAMETERS
        self._grads: dict[str, Array] = {}

    def wants(self, name: str) -> bool:
        """Say whether a parameter's gradient is wanted."""
        return name in self._wanted

    def first_layer(self) -> int:
        """Return the layer at which the pass can stop; -1 when it has to reach the embedding."""
        before_end = (name for name in self._wanted if not name.startswith("final_norm."))
        layers = (int(name.split(".")[1]) if name.startswith("layers.") else -1 for name in before_end)
        return min(layers, default=len(self.prepared.layers))

    def add(self, named: Iterable[tuple[str, Array]]) -> None:
        """Add to the wanted ones; what is asked for twice belongs to a norm that two sublayers read through."""
        for name, gradient in named:
            if name in self._wanted:
                self._grads[name] = self._grads[name] + gradient if name in self._grads else gradient

    def gradients(self) -> dict[str, Array]:
        """Return every wanted gradient, zeros for what no token passed through."""
        return {
            name: self._grads[name] if name in self._grads else np.zeros_like(array)
            for name, array in self._learned.items()
            if name in self._wanted
        }

    # ---- linear -----------------------------------------------------------------------------------------------------

    def linear_forward(self, linear: Linear, x: Array, adapters: RowAdapters | None) -> Array:
        """Return what the forward pass made of x `[rows, in]`, `[rows, out]`."""
        out = self.primitives.linear(x, linear, np.empty((len(x), len(linear.weight)), x.dtype))
        for delta in () if adapters is None else adapters.deltas(linear):
            out[delta.rows, delta.columns] += low_rank_forward(x[delta.rows], delta.low_rank)
        return out

    def linear(
        self, linear: Linear, x: Array, dy: Array, adapters: RowAdapters | None, share: Array | None = None
    ) -> Array:
        """Return dx `[rows, in]` of dy `[rows, out]`; the parameters' gradients take share `[rows, 1]` of each row."""
        dx = self.primitives.linear_backward(linear, dy)
        for delta in () if adapters is None else adapters.deltas(linear):
            self._low_rank(delta, x, dy, share, dx)
        wanted = [name for name in linear.parts if self.wants(f"{name}.weight") or self.wants(f"{name}.bias")]
        if wanted:
            self._linear_parameters(linear, x, dy if share is None else dy * share)
        return dx

    def _linear_parameters(self, linear: Linear, x: Array, dy: Array) -> None:
        """Make the gradients of a matrix and its bias in one product, or of the wanted parts alone."""
        parts = linear.parts
        if all(self.wants(f"{name}.weight") for name in parts):
            self.add(cut(parts, self.primitives.weight_backward(x, dy), None))
        else:
            for name, columns in parts.items():
                if self.wants(f"{name}.weight"):
                    self.add([(f"{name}.weight", self.primitives.weight_backward(x, dy[:, columns]))])
        if linear.bias is not None:
            self.add(cut(parts, None, ops_backward.linear_bias_backward(dy)))

    def _low_rank(self, delta: Delta, x: Array, dy: Array, share: Array | None, dx: Array) -> None:
        """Add to dx what came through an adapter, and make the gradients of the adapter."""
        rows = delta.rows
        share = None if share is None else share[rows]
        from_delta, da, db = low_rank_backward(x[rows], delta.low_rank, dy[rows, delta.columns], share)
        dx[rows] += from_delta
        self.add([(f"{delta.name}.lora_A", da), (f"{delta.name}.lora_B", db)])

    # ---- norms ------------------------------------------------------------------------------------------------------

    def norm(self, norm: Norm, x: Array, dy: Array) -> Array:
        """Return dx `[..., dim]` of dy `[..., dim]`."""
        dx, dweight, dbias = self.primitives.norm_backward(self.config, x, norm, dy)
        self.add(cut(norm.parts, dweight, dbias))
        return dx

    def normed(self, norm: Norm | None, x: Array) -> Array:
        """Work out again what a sublayer read."""
        if norm is None or not self.config.norm.before:
            return x
        return self.primitives.norm(self.config, x, norm, np.empty_like(x))
