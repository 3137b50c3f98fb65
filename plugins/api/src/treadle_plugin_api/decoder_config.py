"""What a decoder-only transformer is, as data: one `DecoderConfig` describes every family treadle can run.

A family (see `family.py`) fills it from a folder's config.json; a compute backend reads it and nothing else. Every
value that changes the arithmetic is a field here. A setting that no field can say is refused by the family, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treadle_plugin_api.checks import require, require_positive
from treadle_plugin_api.positions_config import PositionKind, PositionsConfig, RotaryConfig, RotaryKind

__all__ = [
    "MAX_LAYERS",
    "Activation",
    "AttentionConfig",
    "DecoderConfig",
    "MlpConfig",
    "MoeConfig",
    "NormConfig",
    "NormKind",
    "NormPlace",
    "PositionKind",
    "PositionsConfig",
    "QkNorm",
    "Residual",
    "RotaryConfig",
    "RotaryKind",
]

NormKind = Literal["rms", "layer"]
NormPlace = Literal["pre", "post", "sandwich", "output"]
Residual = Literal["serial", "parallel", "parallel_shared"]
QkNorm = Literal["none", "head", "each_head", "whole"]
Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu_squared"]

# Far above any model: layers, and experts and normalised heads of all layers together. They keep a broken file from
# asking for a table of a billion names.
MAX_LAYERS = 10_000
MAX_PARTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """The normalisation of every sublayer, of the embedding and of queries and keys.

    Attributes:
        kind: `rms` (Zhang and Sennrich 2019) or `layer` (Ba et al. 2016).
        eps: added to the variance, or to the mean square, before the root.
        bias: a learned offset is added after the learned scale.
        place: `pre` normalises what a sublayer reads; `output` what it makes, before that is added to the residual
            stream (OLMo 2); `sandwich` both (Gemma 2). Each normalises once more after the last layer. `post`
            normalises the residual stream after each addition, as the original transformer does, and not at the end.
        scale: there is a learned scale (OLMo has none).
        unit_offset: the learned scale is stored minus one (Gemma).
    """

    kind: NormKind
    eps: float
    bias: bool = False
    place: NormPlace = "pre"
    scale: bool = True
    unit_offset: bool = False

    def __post_init__(self) -> None:
        require(self.eps >= 0, "norm.eps", "0 or more", self.eps)
        require(self.scale or not (self.bias or self.unit_offset), "norm.scale", "true with bias or offset", self.scale)

    @property
    def before(self) -> bool:
        """True when what a sublayer reads is normalised."""
        return self.place in ("pre", "sandwich")

    @property
    def behind(self) -> bool:
        """True when what a sublayer makes is normalised before it is added."""
        return self.place in ("output", "sandwich")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Causal self-attention; grouped queries (Ainslie et al. 2023) when num_kv_heads < num_heads.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; query head h reads number h // (num_heads // num_kv_heads).
        head_dim: width of a head; need not be dim / num_heads.
        scale: multiplies the scores before the softmax.
        inverse_layer_scale: the scale of layer i is divided by i + 1 as well.
        qkv_bias: biases on the q, k and v projections.
        out_bias: a bias on the output projection.
        clip_qkv: projected queries, keys and values are clipped to plus or minus this.
        qk_norm: projected queries and keys are normalised, as `norm` says, before they turn: each `head` by itself
            with scales that all heads share, `each_head` with scales of its own, or all heads as one vector (`whole`).
        qk_norm_bias: the scales of qk_norm come with offsets.
        softcap: scaled scores s become softcap * tanh(s / softcap) (Gemma 2).
        windows: for each layer how many of the last tokens a token sees, itself included; None sees all. Empty when no
            layer has a window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    inverse_layer_scale: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    clip_qkv: float | None = None
    qk_norm: QkNorm = "none"
    qk_norm_bias: bool = False
    softcap: float | None = None
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        require_positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        divides = self.num_heads % self.num_kv_heads == 0
        require(divides, "num_kv_heads", f"a divisor of num_heads ({self.num_heads})", self.num_kv_heads)
        require(self.clip_qkv is None or self.clip_qkv > 0, "clip_qkv", "greater than 0", self.clip_qkv)
        require(self.softcap is None or self.softcap > 0, "attention softcap", "greater than 0", self.softcap)
        require(all(window is None or window > 0 for window in self.windows), "window", "greater than 0", self.windows)

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    def scale_of(self, layer: int) -> float:
        """Return what multiplies the scores of a layer."""
        return self.scale / (layer + 1) if self.inverse_layer_scale else self.scale

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token of this layer sees, or None when it sees all."""
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """The feed-forward sublayer.

    Attributes:
        hidden_dim: width between the projections.
        activation: `silu`, `gelu`, `gelu_tanh` (the tanh form of GPT-2), `gelu_quick` (x sigmoid(1.702 x)), `relu` or
            `relu_squared`.
        gated: down(activation(gate(x)) * up(x)) (Shazeer 2020) when true, else down(activation(up(x))).
        bias: biases on all its projections.
    """

    hidden_dim: int
    activation: Activation
    gated: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        require_positive(hidden_dim=self.hidden_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """A mixture of experts in place of the feed-forward sublayer (Shazeer et al. 2017; Mixtral's routing).

    A token goes to the `top_k` experts that a softmax over the router's scores likes best; their outputs are added up
    with those probabilities. Experts have the activation and the gate of `MlpConfig`, and no biases.

    Attributes:
        num_experts: experts to choose from.
        top_k: experts that see a token.
        hidden_dim: width of an expert.
        normalized: the chosen experts' probabilities are divided by their sum.
        shared_dim: width of an expert that sees every token, its output added to the others'; 0 when there is none.
        shared_gate: the shared expert's output is multiplied by the sigmoid of a learned projection.
        layers: for each layer whether it has experts; the others have a plain feed-forward. Empty: all do.
    """

    num_experts: int
    top_k: int
    hidden_dim: int
    normalized: bool = True
    shared_dim: int = 0
    shared_gate: bool = False
    layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        require_positive(num_experts=self.num_experts, hidden_dim=self.hidden_dim)
        require(1 <= self.top_k <= self.num_experts, "top_k experts", f"1 to {self.num_experts}", self.top_k)
        require(self.shared_dim >= 0, "shared_dim", "0 or more", self.shared_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A whole decoder: token embedding, `num_layers` of attention and feed-forward, output head.

    Attributes:
        model_type: name of the family that made it.
        vocab_size: rows of the embedding and of the head; may exceed the tokenizer's vocabulary.
        dim: width of the residual stream.
        context_length: positions the model was made for.
        moe: experts, in all layers or some.
        residual: `serial`: the feed-forward reads what attention has added to. `parallel`: both read the same stream,
            each through a norm of its own (GPT-NeoX); `parallel_shared`: through one norm (GPT-J).
        residual_scale: multiplies what a sublayer makes before it is added (Granite).
        residual_from_norm: a sublayer's output is added to what it read, the normalised stream (a BLOOM option).
        final_norm: a norm stands between the last layer and the head; never with norms of place `post`.
        embedding_dim: width of embedding and head when it is not `dim`; two projections lead in and out (OPT-350m).
        embedding_norm: the embedding is normalised (BLOOM).
        embedding_scale: multiplies the token embedding.
        tied_head: the head is the embedding matrix.
        head_bias: a bias is added to the logits.
        logit_scale: multiplies the logits.
        logit_softcap: logits x become logit_softcap * tanh(x / logit_softcap), after the scale.
    """

    model_type: str
    vocab_size: int
    dim: int
    num_layers: int
    context_length: int
    norm: NormConfig
    positions: PositionsConfig
    attention: AttentionConfig
    mlp: MlpConfig
    moe: MoeConfig | None = None
    residual: Residual = "serial"
    residual_scale: float = 1.0
    residual_from_norm: bool = False
    final_norm: bool = True
    embedding_dim: int | None = None
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    tied_head: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        require_positive(
            vocab_size=self.vocab_size, dim=self.dim, num_layers=self.num_layers, context_length=self.context_length
        )
        require_positive(embedding_dim=self.embedding_width)
        require(self.num_layers <= MAX_LAYERS, "num_layers", f"{MAX_LAYERS} or less", self.num_layers)
        require(self.logit_softcap is None or self.logit_softcap > 0, "logit_softcap", "over 0", self.logit_softcap)
        pre = self.norm.place == "pre"
        require(pre or self.residual == "serial", "residual", "serial unless norms have the place pre", self.residual)
        alone = pre and self.residual == "serial"
        expected = "false unless norms have the place pre and the residual is serial"
        require(alone or not self.residual_from_norm, "residual_from_norm", expected, True)
        self.positions.check_head_dim(self.attention.head_dim)
        parts = self.num_layers * (self.moe.num_experts if self.moe else 1)
        require(parts <= MAX_PARTS, "num_experts", f"so few that all layers have {MAX_PARTS} or less", parts)
        heads = self.num_layers * self.attention.num_heads
        few = heads <= MAX_PARTS or self.attention.qk_norm != "each_head"
        require(few, "num_heads", f"so few that all layers have {MAX_PARTS} or less", heads)
        self._check_layers("windows", self.attention.windows)
        self._check_layers("rotary layers", self.positions.layers)
        self._check_layers("expert layers", self.moe.layers if self.moe else ())

    def _check_layers(self, name: str, values: tuple[object, ...]) -> None:
        expected = f"given for all {self.num_layers} layers or for none"
        require(len(values) in (0, self.num_layers), name, expected, values)

    @property
    def has_final_norm(self) -> bool:
        """True when a norm stands between the last layer and the head."""
        return self.final_norm and self.norm.place != "post"

    @property
    def embedding_width(self) -> int:
        """Columns of the embedding and of the head."""
        return self.dim if self.embedding_dim is None else self.embedding_dim

    def moe_of(self, layer: int) -> MoeConfig | None:
        """Return the experts of a layer, or None when it has a plain feed-forward."""
        moe = self.moe
        return moe if moe and (not moe.layers or moe.layers[layer]) else None
