"""The compute backend: NumPy's forward pass with compiled products, and all layers in one call where they fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import QUANTISED_BITS, Adapter, Array, Batch, CacheView, Observer, Weight
from treadle_plugin_api.decoder_config import DecoderConfig
from treadle_plugin_api.drawing import draw
from treadle_server.model.pass_state import rotary_tables
from treadle_server.model.prepared import Linear, PreparedDecoder, prepare_decoder
from treadle_server.model.reproducible_backend import ReproducibleNumpyBackend

from treadle_kernels import drawing, products
from treadle_kernels.attention import make_attend
from treadle_kernels.fused_forward import Compiled, FusedDecoder, KernelDecoder
from treadle_kernels.panels import Layout
from treadle_kernels.quantised_products import make_quantised_kernels
from treadle_kernels.quantised_tiles import PANEL_ROWS
from treadle_kernels.stored import StoredMatrix
from treadle_kernels.team import Team, Work

# Rows of weights in a chunk of a product by itself: 32 to 512, so that there are some dozen for each thread.
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS, CHUNKS_A_THREAD = 32, 512, 16
MAX_ROWS = 8192  # of x at once: a head of a million rows then has 350,000 chunks
# Kernels by the dtype that stored numbers come in.
FORMS = MappingProxyType({"uint16": "bfloat16", "float32": "float32"})
ROUNDED_FORMS = MappingProxyType({"uint16": "bfloat16_rounded"})
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class KernelBackend(ReproducibleNumpyBackend):
    """float32 arithmetic on weights as stored; of int8 and int4 the activations are rounded to int8.

    With `rounded`, activations are rounded to bfloat16 before they meet a matrix in bfloat16. Where activations are
    rounded, so are keys and values that all layers in one call read. Always reproducible: a sum has one order.
    """

    name = "kernels"

    def __init__(self, num_threads: int, *, rounded: bool = False) -> None:
        super().__init__(np.float32)
        self._team = Team(num_threads)
        forms = FORMS | ROUNDED_FORMS if rounded else FORMS
        self._compiled = {stored: products.make_kernels(form) for stored, form in forms.items()}
        self._compiled |= {stored: make_quantised_kernels(bits) for stored, bits in QUANTISED_BITS.items()}
        self._kernels = {stored: _addresses(*compiled) for stored, compiled in self._compiled.items()}
        self._kept = {stored: BFLOAT16 if _rounds(stored, rounded) else self.dtype for stored in self._kernels}
        self._attends = {kept: make_attend(kept) for kept in {one.name for one in self._kept.values()}}

    def prepare(self, config: DecoderConfig, params: Mapping[str, Weight]) -> KernelDecoder:
        """Map matrices that kernels read as they are stored, lay out quantised ones, and read the rest widened."""
        attends = {kept: int(function.address) for kept, function in self._attends.items()}
        compiled = Compiled(self._kernels, self._kept, attends)
        prepared = prepare_decoder(config, params, self.dtype, Layout().read)
        return KernelDecoder.of(prepared, compiled, self._team.num_threads)

    def cache_dtype(self, prepared: PreparedDecoder) -> np.dtype[Any]:
        """Return bfloat16 where activations are rounded and all layers run in one call, else float32."""
        fused = prepared.fused if isinstance(prepared, KernelDecoder) else None
        return self.dtype if fused is None else fused.kept

    def forward(
        self, prepared: PreparedDecoder, batch: Batch, caches: Sequence[CacheView], observe: Observer | None = None
    ) -> Array:
        """Run the layers and return `hidden [tokens, dim]`; in one call what has no adapter, where that fits."""
        fused = prepared.fused if isinstance(prepared, KernelDecoder) and observe is None else None
        if fused is None:
            return super().forward(prepared, batch, caches, observe)
        if batch.adapters is None:
            return self._forward_fused(fused, prepared, batch, caches)
        hidden = np.empty((batch.num_tokens, prepared.config.dim), self.dtype)
        for chosen in _by_adapter(batch.adapters):
            part, rows = _part(batch, chosen)
            own = [caches[number] for number in chosen]
            bare = part.adapters is None
            hidden[rows] = (
                self._forward_fused(fused, prepared, part, own) if bare else super().forward(prepared, part, own)
            )
        return hidden

    def _forward_fused(
        self, fused: FusedDecoder, prepared: PreparedDecoder, batch: Batch, caches: Sequence[CacheView]
    ) -> Array:
        positions = batch.positions()
        x = self._embed(prepared, batch, positions, None, None)
        tables = rotary_tables(prepared, batch, positions, self.dtype)
        fused.forward(self._team, prepared, batch, positions, caches, x, tables)
        return x

    def faster(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled draw for the draw, or the function itself."""
        return drawing.draw if function is draw else function

    def linear(self, x: Array, linear: Linear, out: Array) -> Array:
        """Fill out `[rows, out]` with x `[rows, in]` @ weight.T + bias; an adapter's arrays are NumPy's."""
        matrix = linear.weight
        if not isinstance(matrix, StoredMatrix):
            return super().linear(x, linear, out)
        if len(x) > MAX_ROWS:
            for start in range(0, len(x), MAX_ROWS):
                self.linear(x[start : start + MAX_ROWS], linear, out[start : start + MAX_ROWS])
            return out
        x, target = np.require(x, requirements=["C", "W"]), np.require(out, requirements=["C"])
        kernels, team, num_pieces = self._kernels[matrix.stored], self._team, self._team.num_threads * CHUNKS_A_THREAD
        chunk_rows = min(max(MIN_CHUNK_ROWS, len(matrix) // num_pieces // PANEL_ROWS * PANEL_ROWS), MAX_CHUNK_ROWS)
        scratch = team.scratch(products.BLOCK_ROWS * (products.packed_floats(x.shape[1]) + chunk_rows))

        def make(operation: int) -> Work:
            call = products.linear
            at = (kernels, matrix.segments, x, target, chunk_rows, team.control, operation)
            return Work(lambda thread: call(*at, scratch[thread]), matrix)

        team.run(1, make)
        if target is not out:
            out[...] = target
        if linear.bias is not None:
            out += linear.bias
        return out


def _rounds(stored: str, rounded: bool) -> bool:
    """Whether activations are rounded before they meet a matrix that is stored so."""
    return stored in QUANTISED_BITS or (rounded and stored in ROUNDED_FORMS)


def _addresses(pack: Any, multiply: Any) -> products.Kernels:
    return products.Kernels(int(pack.address), int(multiply.address))


def _by_adapter(adapters: Sequence[Adapter | None]) -> list[list[int]]:
    """Return the numbers of the sequences without an adapter, and of those with one, where there are any."""
    bare = [number for number, adapter in enumerate(adapters) if adapter is None]
    changed = [number for number, adapter in enumerate(adapters) if adapter is not None]
    return [chosen for chosen in (bare, changed) if chosen]


def _part(batch: Batch, chosen: Sequence[int]) -> tuple[Batch, NDArray[np.int64]]:
    """Return some sequences of a batch as one, and where their rows lie in it."""
    spans = [np.arange(batch.starts[number], batch.starts[number + 1]) for number in chosen]
    rows = np.concatenate(spans)
    prompts = batch.prompt_lengths
    adapters = [None if batch.adapters is None else batch.adapters[number] for number in chosen]
    part = Batch.of(
        [batch.token_ids[span] for span in spans],
        batch.prefix_lengths[list(chosen)].tolist(),
        None if prompts is None else prompts[list(chosen)].tolist(),
        adapters,
    )
    return part, rows
