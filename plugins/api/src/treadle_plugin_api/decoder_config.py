"""What a decoder-only transformer is, as data: one `DecoderConfig` describes every family treadle can run.

A family (see `family.py`) fills it from a folder's config.json; a compute backend reads it and nothing else. Every
value that changes the arithmetic is a field here. A setting that no field can say is refused by the family, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "layer"]
NormPlace = Literal["pre", "post"]
PositionKind = Literal["rotary", "learned", "sinusoidal"]
RotaryKind = Literal["default", "linear", "llama3"]
Activation = Literal["silu", "gelu_tanh", "relu"]

# Far above any model; keeps a broken file from asking for a table of a billion names.
MAX_LAYERS = 10_000


def _require(ok: bool, field: str, expected: str, received: object) -> None:
    if not ok:
        raise ValueError(f"{field} must be {expected}, but is {received!r}")


def _require_positive(**values: float) -> None:
    for field, value in values.items():
        _require(value > 0, field, "greater than 0", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """The normalisation of every sublayer.

    Attributes:
        kind: `rms` (Zhang and Sennrich 2019) or `layer` (Ba et al. 2016).
        eps: added to the variance, or to the mean square, before the root.
        bias: a learned offset is added after the learned scale.
        place: `pre` normalises what a sublayer reads and once more after the last layer; `post` normalises the
            residual stream after each addition, as the original transformer does, and has no final norm.
    """

    kind: NormKind
    eps: float
    bias: bool = False
    place: NormPlace = "pre"

    def __post_init__(self) -> None:
        _require(self.eps >= 0, "norm.eps", "0 or more", self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding (Su et al. 2021), half-split pairs: dimension i turns with i + head_dim / 2.

    Attributes:
        kind: how the inverse frequencies are changed for longer contexts.
        theta: base of the geometric series of frequencies.
        factor: by how much `linear` and `llama3` stretch positions.
        low_freq_factor, high_freq_factor: bounds of llama3's blend, as context lengths per wavelength.
        original_context_length: tokens the model was trained on before `llama3` stretched it.
    """

    kind: RotaryKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192

    def __post_init__(self) -> None:
        _require_positive(theta=self.theta, factor=self.factor, original_context_length=self.original_context_length)
        low, high = self.low_freq_factor, self.high_freq_factor
        _require(0 < low < high, "low_freq_factor", f"over 0 and under high_freq_factor ({high})", low)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionsConfig:
    """How the model knows where a token stands.

    Attributes:
        kind: `rotary` turns queries and keys; `learned` and `sinusoidal` are added to the embedding.
        rotary: the angles, given exactly when kind is `rotary`.
    """

    kind: PositionKind
    rotary: RotaryConfig | None = None

    def __post_init__(self) -> None:
        given = self.rotary is not None
        _require(given == (self.kind == "rotary"), "rotary", "given exactly for rotary positions", self.rotary)

    @property
    def has_hard_limit(self) -> bool:
        """True when no position at or past the context length exists (a learned table has so many rows)."""
        return self.kind == "learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Causal self-attention; grouped queries (Ainslie et al. 2023) when num_kv_heads < num_heads.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; query head h reads number h // (num_heads // num_kv_heads).
        head_dim: width of a head; need not be dim / num_heads.
        scale: multiplies the scores before the softmax.
        qkv_bias: biases on the q, k and v projections.
        out_bias: a bias on the output projection.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        _require_positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        divides = self.num_heads % self.num_kv_heads == 0
        _require(divides, "num_kv_heads", f"a divisor of num_heads ({self.num_heads})", self.num_kv_heads)

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """The feed-forward sublayer.

    Attributes:
        hidden_dim: width between the projections.
        activation: `silu`, `gelu_tanh` (the tanh form of GPT-2) or `relu`.
        gated: down(activation(gate(x)) * up(x)) (Shazeer 2020) when true, else down(activation(up(x))).
        bias: biases on all its projections.
    """

    hidden_dim: int
    activation: Activation
    gated: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        _require_positive(hidden_dim=self.hidden_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A whole decoder: token embedding, `num_layers` of attention and feed-forward, output head.

    Attributes:
        model_type: name of the family that made it.
        vocab_size: rows of the embedding and of the head; may exceed the tokenizer's vocabulary.
        dim: width of the residual stream.
        context_length: positions the model was made for.
        tied_head: the head is the embedding matrix.
        head_bias: a bias is added to the logits.
        embedding_scale: multiplies the token embedding.
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
    tied_head: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(
            vocab_size=self.vocab_size, dim=self.dim, num_layers=self.num_layers, context_length=self.context_length
        )
        _require(self.num_layers <= MAX_LAYERS, "num_layers", f"{MAX_LAYERS} or less", self.num_layers)
        if self.positions.kind == "rotary":
            even = self.attention.head_dim % 2 == 0
            _require(even, "head_dim", "even for rotary positions", self.attention.head_dim)

    @property
    def has_final_norm(self) -> bool:
        """True when a norm stands between the last layer and the head."""
        return self.norm.place == "pre"
