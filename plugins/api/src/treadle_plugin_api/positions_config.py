"""How a decoder knows where a token stands, as data: rotary angles of every kind, learned tables, ALiBi, nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treadle_plugin_api.checks import require, require_positive

PositionKind = Literal["rotary", "learned", "sinusoidal", "alibi", "none"]
RotaryKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding (Su et al. 2021): pairs of a head's dimensions turn by an angle that grows with place.

    Attributes:
        kind: how the frequencies are changed for longer contexts: `linear` (Chen et al. 2023), `dynamic` (NTK-aware, by
            the length reached), `yarn` (Peng et al. 2023), `llama3`, `longrope` (Ding et al. 2024, by the length).
        theta: base of the geometric series of frequencies.
        dim: leading dimensions of a head that turn, an even number; None when all do.
        interleaved: dimension 2i turns with 2i + 1 (GPT-J), rather than i with i + dim / 2.
        factor: by how much positions are stretched.
        original_context_length: tokens the model was trained on before it was stretched.
        attention_factor: multiplies the turned queries and keys, each.
        low_freq_factor, high_freq_factor: bounds of llama3's blend, as context lengths per wavelength.
        beta_fast, beta_slow: bounds of yarn's blend, as turns within the original context.
        truncate: yarn's bounds are rounded to whole pairs.
        short_factors, long_factors: longrope's divisor of each pair's frequency, up to the original context length and
            past it.
    """

    kind: RotaryKind = "default"
    theta: float = 10000.0
    dim: int | None = None
    interleaved: bool = False
    factor: float = 1.0
    original_context_length: int = 8192
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_positive(theta=self.theta, factor=self.factor, original_context_length=self.original_context_length)
        require_positive(attention_factor=self.attention_factor, beta_slow=self.beta_slow)
        require(self.kind != "yarn" or self.theta > 1, "theta", "greater than 1 for yarn", self.theta)
        low, high = self.low_freq_factor, self.high_freq_factor
        require(0 < low < high, "low_freq_factor", f"over 0 and under high_freq_factor ({high})", low)
        require(self.beta_fast >= self.beta_slow, "beta_fast", f"beta_slow ({self.beta_slow}) or more", self.beta_fast)
        for factors in (self.short_factors, self.long_factors):
            require(all(factor > 0 for factor in factors), "longrope factor", "greater than 0", factors)

    @property
    def depends_on_length(self) -> bool:
        """True when the angles of one position differ with the length of the sequence."""
        return self.kind in ("dynamic", "longrope")

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError unless the angles fit heads of that width."""
        dim = head_dim if self.dim is None else self.dim
        require(dim % 2 == 0, "head_dim" if self.dim is None else "rotary dim", "even for rotary positions", dim)
        require(0 < dim <= head_dim, "rotary dim", f"between 2 and head_dim ({head_dim})", dim)
        require(self.kind != "dynamic" or dim > 2, "rotary dim", "over 2 for dynamic", dim)
        if self.kind == "longrope":
            for name, factors in (("short_factors", self.short_factors), ("long_factors", self.long_factors)):
                require(len(factors) == dim // 2, name, f"{dim // 2} numbers, one a pair", factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionsConfig:
    """How the model knows where a token stands.

    Attributes:
        kind: `rotary` turns queries and keys; `learned` and `sinusoidal` are added to the embedding; `alibi` takes from
            each score what grows with the distance (Press et al. 2022); `none` leaves it to the causal mask.
        rotary: the angles, given exactly when kind is `rotary`.
        layers: the angles of each layer, None for a layer without any; empty when every layer uses `rotary`.
        offset: rows of a learned table before the one of position 0 (OPT has two).
        alibi_scaled: the scores' scale multiplies ALiBi's biases as well (Falcon).
        alibi_rounded: ALiBi's slopes and biases are rounded to bfloat16 (Falcon).
    """

    kind: PositionKind
    rotary: RotaryConfig | None = None
    layers: tuple[RotaryConfig | None, ...] = ()
    offset: int = 0
    alibi_scaled: bool = False
    alibi_rounded: bool = False

    def __post_init__(self) -> None:
        given = self.rotary is not None
        require(given == (self.kind == "rotary"), "rotary", "given exactly for rotary positions", self.rotary)
        require(given or not self.layers, "layers", "given for rotary positions only", self.layers)
        require(self.offset >= 0, "offset", "0 or more", self.offset)

    @property
    def has_hard_limit(self) -> bool:
        """True when no position at or past the context length exists (a learned table has so many rows)."""
        return self.kind == "learned"

    @property
    def depends_on_length(self) -> bool:
        """True when the angles of one position differ with the length of the sequence."""
        return any(rotary is not None and rotary.depends_on_length for rotary in (self.rotary, *self.layers))

    def rotary_of(self, layer: int) -> RotaryConfig | None:
        """Return the angles of a layer, or None when its queries and keys do not turn."""
        return self.layers[layer] if self.layers else self.rotary

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError unless every layer's angles fit heads of that width."""
        for rotary in {self.rotary, *self.layers}:
            if rotary is not None:
                rotary.check_head_dim(head_dim)
