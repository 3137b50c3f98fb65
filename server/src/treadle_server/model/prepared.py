"""What a decoder is made of at run time: every array in the dtype that is computed in, fused where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from treadle_plugin_api.backend import Array, Weight
from treadle_plugin_api.decoder_config import DecoderConfig, MoeConfig

from treadle_server.model.alibi import Alibi
from treadle_server.model.attention import Scoring
from treadle_server.model.params import check_params
from treadle_server.model.rotary import Rotary

# Makes what a backend multiplies with, in an array's place: it has at least a shape, a length, and rows by number.
ReadMatrix = Callable[[Sequence[Weight]], Array]


@dataclass(frozen=True, slots=True)
class Linear:
    """weight `[out, in]`, bias `[out]` or None; parts: whose rows lie where, by canonical name without `.weight`."""

    weight: Array
    bias: Array | None
    parts: Mapping[str, slice] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Norm:
    """weight `[dim]` and bias `[dim]`, each None where the model has none; `[heads, head_dim]` for norms of heads.

    parts: where the canonical norms lie, by name without `.weight`.
    """

    weight: Array | None
    bias: Array | None
    parts: Mapping[str, slice | int]


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward; `up` stacks gate and up when it is gated."""

    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of feed-forwards, and the one that sees every token."""

    config: MoeConfig
    router: Linear
    each: tuple[Mlp, ...]
    shared: Mlp | None
    shared_gate: Linear | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Norms that stand nowhere in the model are None; `qkv` stacks q, k, v."""

    attention_norm: Norm | None
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    rotary_id: int | None  # which of the decoder's rotaries; None for a layer without
    scoring: Scoring
    out: Linear
    attention_output_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    mlp_output_norm: Norm | None


@dataclass(frozen=True, slots=True)
class PreparedDecoder:
    """A decoder ready to run."""

    config: DecoderConfig
    embedding: Array  # [vocab, width]
    embedding_in: Linear | None
    embedding_norm: Norm | None
    positions: Array | None  # [offset + context, dim], learned positions
    rotaries: tuple[Rotary, ...]  # the different ones of all layers
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    embedding_out: Linear | None
    head: Linear  # a tied head's weight is `embedding` itself


def prepare_decoder(
    config: DecoderConfig,
    params: Mapping[str, Weight],
    dtype: np.dtype[np.generic],
    read_matrix: ReadMatrix | None = None,
) -> PreparedDecoder:
    """Read every weight once, straight into the buffer it is used from, widened to the dtype.

    A backend that multiplies with stored formats gives `read_matrix`: what it makes of matrices `[rows, in]` that are
    used one below the other stands where the prepared decoder has their array.
    """
    check_params(config, params)
    reader = _Reader(config, params, dtype, read_matrix)
    embedding = reader.matrix("embedding")
    rotaries = _distinct_rotaries(config)
    return PreparedDecoder(
        config=config,
        embedding=embedding,
        embedding_in=reader.optional_linear("embedding_in"),
        embedding_norm=reader.norm("embedding_norm") if config.embedding_norm else None,
        positions=reader.matrix("positions") if config.positions.kind == "learned" else None,
        rotaries=rotaries,
        layers=tuple(_read_layer(reader, config, rotaries, index) for index in range(config.num_layers)),
        final_norm=reader.norm("final_norm") if config.has_final_norm else None,
        embedding_out=reader.optional_linear("embedding_out"),
        head=Linear(
            embedding if config.tied_head else reader.matrix("head"), reader.vector("head.bias"), {"head": slice(None)}
        ),
    )


def _distinct_rotaries(config: DecoderConfig) -> tuple[Rotary, ...]:
    configs = dict.fromkeys(config.positions.rotary_of(layer) for layer in range(config.num_layers))
    return tuple(Rotary.of(one, config.attention.head_dim) for one in configs if one is not None)


def _read_layer(reader: _Reader, config: DecoderConfig, rotaries: Sequence[Rotary], index: int) -> Layer:
    prefix = f"layers.{index}."
    before, behind = config.norm.place != "output", config.norm.behind
    own_mlp_norm = before and config.residual != "parallel_shared"
    rotary, moe = config.positions.rotary_of(index), config.moe_of(index)
    return Layer(
        attention_norm=reader.norm(f"{prefix}attention_norm") if before else None,
        qkv=reader.linear(f"{prefix}attention.", "q", "k", "v"),
        q_norm=reader.head_norm(f"{prefix}attention.q_norm", config.attention.num_heads),
        k_norm=reader.head_norm(f"{prefix}attention.k_norm", config.attention.num_kv_heads),
        rotary_id=next((i for i, one in enumerate(rotaries) if one.config == rotary), None),
        scoring=_scoring(config, index),
        out=reader.linear(f"{prefix}attention.", "o"),
        attention_output_norm=reader.norm(f"{prefix}attention_output_norm") if behind else None,
        mlp_norm=reader.norm(f"{prefix}mlp_norm") if own_mlp_norm else None,
        mlp=reader.mlp(f"{prefix}mlp.") if moe is None else _read_experts(reader, moe, index),
        mlp_output_norm=reader.norm(f"{prefix}mlp_output_norm") if behind else None,
    )


def _scoring(config: DecoderConfig, index: int) -> Scoring:
    attention, positions = config.attention, config.positions
    scale = attention.scale_of(index)
    alibi = None
    if positions.kind == "alibi":
        bias_scale = scale if positions.alibi_scaled else 1.0
        alibi = Alibi.of(attention.num_heads, scale=bias_scale, rounded=positions.alibi_rounded)
    return Scoring(scale, attention.window_of(index), attention.softcap, alibi)


def _read_experts(reader: _Reader, moe: MoeConfig, index: int) -> Experts:
    prefix = f"layers.{index}.mlp."
    return Experts(
        config=moe,
        router=reader.linear(prefix, "router"),
        each=tuple(reader.mlp(f"{prefix}experts.{expert}.") for expert in range(moe.num_experts)),
        shared=reader.mlp(f"{prefix}shared.") if moe.shared_dim else None,
        shared_gate=reader.linear(prefix, "shared_gate") if moe.shared_gate else None,
    )


class _Reader:
    """Reads canonical parameters into new arrays of one dtype."""

    def __init__(
        self,
        config: DecoderConfig,
        params: Mapping[str, Weight],
        dtype: np.dtype[np.generic],
        read_matrix: ReadMatrix | None,
    ) -> None:
        self._config = config
        self._params = params
        self._dtype = dtype
        self._read_matrix = read_matrix

    def matrix(self, *names: str) -> Array:
        """Return the named matrices' rows one after the other, `[rows, in]`."""
        if self._read_matrix is not None:
            return self._read_matrix([self._params[f"{name}.weight"] for name in names])
        return self._stack([f"{name}.weight" for name in names])

    def vector(self, name: str) -> Array | None:
        """Return a vector, or None if the model has none of that name."""
        return self._stack([name]) if name in self._params else None

    def linear(self, prefix: str, *names: str) -> Linear:
        """Return the named projections fused into one."""
        names = tuple(prefix + name for name in names)
        biases = [f"{name}.bias" for name in names]
        has_bias = biases[0] in self._params
        return Linear(self.matrix(*names), self._stack(biases) if has_bias else None, self._rows_of(names))

    def _rows_of(self, names: Sequence[str]) -> dict[str, slice]:
        """Return where each matrix lies when they are stacked."""
        stops = list(accumulate(self._params[f"{name}.weight"].shape[0] for name in names))
        return {name: slice(start, stop) for name, start, stop in zip(names, [0, *stops], stops, strict=False)}

    def optional_linear(self, name: str) -> Linear | None:
        """Return a projection, or None if the model has none of that name."""
        return self.linear("", name) if f"{name}.weight" in self._params else None

    def mlp(self, prefix: str) -> Mlp:
        """Return a feed-forward."""
        up = ("gate", "up") if self._config.mlp.gated else ("up",)
        return Mlp(self.linear(prefix, *up), self.linear(prefix, "down"))

    def norm(self, name: str) -> Norm:
        """Return a norm's scale and offset."""
        weight, bias = self.vector(f"{name}.weight"), self.vector(f"{name}.bias")
        return Norm(self._unit_offset(weight), bias, {name: slice(None)})

    def head_norm(self, name: str, num_heads: int) -> Norm | None:
        """Return the norm of queries or keys: `[heads, head_dim]` where each head has its own."""
        kind = self._config.attention.qk_norm
        if kind == "none":
            return None
        if kind != "each_head":
            return self.norm(name)
        has_bias = self._config.attention.qk_norm_bias
        weight, bias = (
            self._stack([f"{name}.{head}.{part}" for head in range(num_heads)]).reshape(num_heads, -1)
            if there
            else None
            for part, there in (("weight", True), ("bias", has_bias))
        )
        return Norm(self._unit_offset(weight), bias, {f"{name}.{head}": head for head in range(num_heads)})

    def _unit_offset(self, weight: Array | None) -> Array | None:
        if weight is not None and self._config.norm.unit_offset:
            weight += 1
        return weight

    def _stack(self, names: Sequence[str]) -> Array:
        weights = [self._params[name] for name in names]
        rows = sum(weight.shape[0] for weight in weights)
        stacked = np.empty((rows, *weights[0].shape[1:]), self._dtype)
        start = 0
        for weight in weights:
            weight.read_into(stacked[start : start + weight.shape[0]])
            start += weight.shape[0]
        return stacked
