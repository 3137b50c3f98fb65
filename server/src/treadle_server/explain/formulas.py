"""The formula of each intermediate of a pass, and beside it the very computation that it states.

A formula is read, its computation is not: a test runs it on the intermediates of every family, so that no formula says
what the numbers contradict. Formulas use the symbols of what they read, so a layer is told without knowing its family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from treadle_plugin_api.backend import Array
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.model.activations import ACTIVATIONS

# What the first formulas of a layer read.
STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Values:
    """What a computation reads: intermediates and parameters, each by the name after its layer's prefix.

    Attributes:
        traced: the layer's intermediates; "stream" is what enters the layer.
        params: the layer's parameters, widened.
    """

    traced: Mapping[str, Array]
    params: Mapping[str, Array]

    def linear(self, x: Array, name: str) -> Array:
        """Return x `[rows, in]` times a weight, plus its bias if it has one."""
        product: Array = x @ self.params[f"{name}.weight"].T
        return product + self.params[f"{name}.bias"] if f"{name}.bias" in self.params else product


@dataclass(frozen=True, slots=True)
class Rule:
    """How an intermediate is called and computed.

    Attributes:
        symbol: what it is called.
        formula: how it is computed; empty if only the sentence beside it says so.
        compute: what the formula states, of the whole intermediate; None without a formula.
    """

    symbol: str
    formula: str = ""
    compute: Callable[[Values], Array] | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """An intermediate that a formula reads."""

    symbol: str
    name: str

    @property
    def factor(self) -> str:
        """The symbol as it stands in a product."""
        return f"({self.symbol})" if " " in self.symbol else self.symbol

    def of(self, values: Values) -> Array:
        """Return its numbers."""
        return values.traced[self.name]


# ---- before and after the layers ------------------------------------------------------------------------------------


def embedding_rules(config: DecoderConfig) -> dict[str, Rule]:
    """Return the rules up to the first layer; "ids" are the tokens."""
    scale = "" if config.embedding_scale == 1 else f"{config.embedding_scale:.4g} · "
    width = "" if config.embedding_dim is None else " · W_in"

    def embed(values: Values) -> Array:
        x = config.embedding_scale * values.params["embedding.weight"][values.traced["ids"]]
        return x if config.embedding_dim is None else values.linear(x, "embedding_in")

    rules = {"embedding": Rule("X", f"X = {scale}table[id]{width}", embed)}
    x = Term("X", "embedding")
    if config.embedding_norm:
        rules["embedding_norm"] = _norm(config, "X normed", x, "embedding_norm")
        x = Term("X normed", "embedding_norm")
    rules["positions"] = Rule("PE")
    rules["embedding_with_positions"] = Rule(
        "X with PE", f"X with PE = {x.symbol} + PE", lambda values: x.of(values) + values.traced["positions"]
    )
    return rules


def final_rules(config: DecoderConfig) -> dict[str, Rule]:
    """Return the rules behind the last layer; "stream" is what leaves it."""
    rules: dict[str, Rule] = {}
    x = Term("X", STREAM)
    if config.has_final_norm:
        rules["final_norm"] = _norm(config, "X normed", x, "final_norm")
        x = Term("X normed", "final_norm")
    if config.embedding_dim is not None:
        rules["embedding_out"] = _linear("X narrowed", x, "W_out", "embedding_out", bias=False)
        x = Term("X narrowed", "embedding_out")
    rules["logits"] = _logits(config, x)
    return rules


def _logits(config: DecoderConfig, x: Term) -> Rule:
    scale, cap = config.logit_scale, config.logit_softcap
    formula = f"{x.factor} · W_head" + (" + b_head" if config.head_bias else "")
    if scale != 1:
        formula = f"{scale:.4g} · ({formula})"
    if cap is not None:
        formula = f"{cap:g} · tanh(({formula}) / {cap:g})"

    def logits(values: Values) -> Array:
        weight = values.params["embedding.weight" if config.tied_head else "head.weight"]
        bias = values.params["head.bias"] if config.head_bias else 0
        scaled = scale * (x.of(values) @ weight.T + bias)
        return scaled if cap is None else cap * np.tanh(scaled / cap)

    return Rule("logits", f"logits = {formula}", logits)


# ---- a layer --------------------------------------------------------------------------------------------------------


def layer_rules(config: DecoderConfig, layer: int) -> dict[str, Rule]:
    """Return the rule of each intermediate of a layer by its name in a trace, after the layer's prefix."""
    x = read = Term("X", STREAM)
    rules: dict[str, Rule] = {}
    if config.norm.before:
        rules["attention_norm"] = _norm(config, "N", x, "attention_norm")
        read = Term("N", "attention_norm")
    rules |= _head_rules(config, layer, read)
    rules["attention.heads"] = Rule("Z", "Z = [A · V of every head, side by side]", lambda v: _mixed(config, v))
    rules["attention.projection"] = _linear(
        "O", Term("Z", "attention.heads"), "W_o", "attention.o", bias=config.attention.out_bias
    )
    base = read if config.residual_from_norm else x
    rules |= _residual_rules(config, "attention", base, Term("O", "attention.projection"), "Y")
    y = Term("Y normed", "attention_norm") if config.norm.place == "post" else Term("Y", "attention_residual")
    if config.residual == "parallel_shared":
        entered = read
    else:
        entered = x if config.residual == "parallel" else y
        if config.norm.before:
            rules["mlp_norm"] = _norm(config, "M", entered, "mlp_norm")
            entered = Term("M", "mlp_norm")
    rules |= _mlp_rules(config, entered) if config.moe_of(layer) is None else _moe_rules(config, layer, entered)
    base = entered if config.residual_from_norm else y
    return rules | _residual_rules(config, "mlp", base, Term("D", "mlp.down"), "X next")


def _residual_rules(config: DecoderConfig, part: str, base: Term, made: Term, symbol: str) -> dict[str, Rule]:
    """Return how a sublayer's output is added, with the norm that stands behind it or behind the sum."""
    rules: dict[str, Rule] = {}
    if config.norm.behind:
        normed = Term(f"{made.symbol} normed", f"{part}_output_norm")
        rules[normed.name] = _norm(config, normed.symbol, made, normed.name)
        made = normed
    scale = config.residual_scale
    factor = "" if scale == 1 else f"{scale:.4g} · "
    added = made.symbol if scale == 1 else made.factor
    rules[f"{part}_residual"] = Rule(
        symbol, f"{symbol} = {base.symbol} + {factor}{added}", lambda v: base.of(v) + scale * made.of(v)
    )
    if config.norm.place == "post":
        total = Term(symbol, f"{part}_residual")
        rules[f"{part}_norm"] = _norm(config, f"{symbol} normed", total, f"{part}_norm")
    return rules


def _linear(symbol: str, x: Term, weight: str, name: str, *, bias: bool) -> Rule:
    added = f" + {weight.replace('W', 'b', 1)}" if bias else ""
    return Rule(symbol, f"{symbol} = {x.factor} · {weight}{added}", lambda v: v.linear(x.of(v), name))


# ---- norms ----------------------------------------------------------------------------------------------------------


def _norm(config: DecoderConfig, symbol: str, x: Term, name: str) -> Rule:
    norm = config.norm
    formula = _norm_formula(config, x.symbol, scale=norm.scale, bias=norm.bias)

    def normalise(values: Values) -> Array:
        return _normalised(config, x.of(values), values.params.get(f"{name}.weight"), values.params.get(f"{name}.bias"))

    return Rule(symbol, f"{symbol} = {formula}", normalise)


def _norm_formula(config: DecoderConfig, x: str, *, scale: bool, bias: bool) -> str:
    eps = f"{config.norm.eps:g}"
    if config.norm.kind == "rms":
        formula = f"{x} / √(mean({x}²) + {eps})"
    else:
        formula = f"({x} - mean({x})) / √(variance({x}) + {eps})"
    factor = (" · (1 + w)" if config.norm.unit_offset else " · w") if scale else ""
    return f"{formula}{factor}{' + b' if bias else ''}, row by row"


def _normalised(config: DecoderConfig, x: Array, weight: Array | None, bias: Array | None) -> Array:
    if config.norm.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm.eps)
    if weight is not None:
        normed = normed * (weight + 1 if config.norm.unit_offset else weight)
    return normed if bias is None else normed + bias


# ---- a head ---------------------------------------------------------------------------------------------------------


def _head_rules(config: DecoderConfig, layer: int, read: Term) -> dict[str, Rule]:
    rules = {f"attention.{name}": _projection(config, name, read) for name in "qkv"}
    last = {name: Term(name.upper(), f"attention.{name}") for name in "qk"}
    turned = config.positions.rotary_of(layer) is not None
    for name, symbol in (("q", "Q"), ("k", "K")):
        if config.attention.qk_norm != "none":
            rules[f"attention.{name}_normed"] = _head_norm(config, name)
            last[name] = Term(f"{symbol} normed", f"attention.{name}_normed")
        if turned:
            rules[f"attention.{name}_rotated"] = Rule(f"{symbol} turned")
            last[name] = Term(f"{symbol} turned", f"attention.{name}_rotated")
    for name, rule in _score_rules(config, layer, last["q"], last["k"]):
        rules[f"attention.{name}"] = rule
    return rules


def _projection(config: DecoderConfig, name: str, read: Term) -> Rule:
    attention = config.attention
    rule = _linear(name.upper(), read, f"W_{name}", f"attention.{name}", bias=attention.qkv_bias)
    clip = attention.clip_qkv

    def project(values: Values) -> Array:
        rows = values.linear(read.of(values), f"attention.{name}")
        rows = rows if clip is None else np.clip(rows, -clip, clip)
        return rows.reshape(len(rows), -1, attention.head_dim).transpose(1, 0, 2)

    if clip is not None:
        symbol, formula = rule.formula.split(" = ")
        rule = replace(rule, formula=f"{symbol} = {formula}, cut off at {-clip:g} and {clip:g}")
    return replace(rule, compute=project)


def _head_norm(config: DecoderConfig, name: str) -> Rule:
    attention, symbol = config.attention, name.upper()
    formula = _norm_formula(config, symbol, scale=True, bias=attention.qk_norm_bias)
    if attention.qk_norm == "whole":
        formula += ", each row that of all heads together"

    def scales(values: Values, part: str, num_heads: int) -> Array | None:
        """Return scales or offsets `[heads or 1, 1, head_dim]`, or `[heads * head_dim]` of all heads as one."""
        key = f"attention.{name}_norm"
        if attention.qk_norm == "each_head":
            each = [values.params.get(f"{key}.{head}.{part}") for head in range(num_heads)]
            return None if each[0] is None else np.stack(each)[:, None]  # type: ignore[arg-type]
        return values.params.get(f"{key}.{part}")

    def normalise(values: Values) -> Array:
        heads = values.traced[f"attention.{name}"]
        weight, bias = (scales(values, part, len(heads)) for part in ("weight", "bias"))
        if attention.qk_norm != "whole":
            return _normalised(config, heads, weight, bias)
        rows = heads.transpose(1, 0, 2).reshape(heads.shape[1], -1)
        normed = _normalised(config, rows, weight, bias).reshape(len(rows), len(heads), -1)
        return normed.transpose(1, 0, 2)

    return Rule(f"{symbol} normed", f"{symbol} normed = {formula}", normalise)


def _score_rules(config: DecoderConfig, layer: int, q: Term, k: Term) -> Iterator[tuple[str, Rule]]:
    attention = config.attention
    scale, cap = attention.scale_of(layer), attention.softcap

    def products(values: Values) -> Array:
        keys = np.repeat(k.of(values), attention.group_size, axis=0)
        scores: Array = q.of(values) @ keys.transpose(0, 2, 1)
        return scores

    yield "scores", Rule("S", f"S = {q.factor} · {k.factor}ᵀ", products)
    yield "scaled_scores", _score_rule("S scaled", f"{scale:.4g} · S", "scores", lambda s: scale * s)
    last = Term("S scaled", "attention.scaled_scores")
    if cap is not None:
        formula = f"{cap:g} · tanh({last.factor} / {cap:g})"
        yield "capped_scores", _score_rule("S capped", formula, "scaled_scores", lambda s: cap * np.tanh(s / cap))
        last = Term("S capped", "attention.capped_scores")
    if config.positions.kind == "alibi":
        yield "biased_scores", Rule("S biased")
        last = Term("S biased", "attention.biased_scores")
    yield "masked_scores", _mask(attention.window_of(layer), last)
    masked = "attention.masked_scores"
    yield "weights", Rule("A", "A = softmax(S masked)", lambda v: _softmax(v.traced[masked]))


def _score_rule(symbol: str, formula: str, source: str, function: Callable[[Array], Array]) -> Rule:
    return Rule(symbol, f"{symbol} = {formula}", lambda v: function(v.traced[f"attention.{source}"]))


def _mask(window: int | None, scores: Term) -> Rule:
    formula = f"S masked = {scores.symbol}, but -∞ in row i and column j for j > i"
    if window:
        formula += f", and for j ≤ i - {window}, out of this layer's window"

    def mask(values: Values) -> Array:
        table = scores.of(values)
        rows, columns = np.arange(table.shape[1])[:, None], np.arange(table.shape[2])
        hidden = (columns > rows) | (columns <= rows - (window or table.shape[2]))
        return np.where(hidden, -np.inf, table)

    return Rule("S masked", formula, mask)


def _softmax(scores: Array) -> Array:
    powers: Array = np.exp(scores - scores.max(-1, keepdims=True))
    shares: Array = powers / powers.sum(-1, keepdims=True)
    return shares


def _mixed(config: DecoderConfig, values: Values) -> Array:
    shares = values.traced["attention.weights"]
    heads = shares @ np.repeat(values.traced["attention.v"], config.attention.group_size, axis=0)
    mixed: Array = heads.transpose(1, 0, 2).reshape(shares.shape[1], -1)
    return mixed


# ---- the feed-forward network ---------------------------------------------------------------------------------------


def _mlp_rules(config: DecoderConfig, read: Term) -> dict[str, Rule]:
    mlp = config.mlp
    bend = mlp.activation.replace("_", " ")
    rules = {"mlp.up": _linear("U", read, "W_up", "mlp.up", bias=mlp.bias)}
    if mlp.gated:
        rules["mlp.gate"] = _linear("G", read, "W_gate", "mlp.gate", bias=mlp.bias)
        formula = f"H = {bend}(G) · U, number by number"
        rules["mlp.activated"] = Rule("H", formula, lambda v: _bent(config, v.traced["mlp.gate"], v.traced["mlp.up"]))
    else:
        rules["mlp.activated"] = Rule("H", f"H = {bend}(U)", lambda v: _bent(config, None, v.traced["mlp.up"]))
    rules["mlp.down"] = _linear("D", Term("H", "mlp.activated"), "W_down", "mlp.down", bias=mlp.bias)
    return rules


def _bent(config: DecoderConfig, gate: Array | None, up: Array) -> Array:
    function = ACTIVATIONS[config.mlp.activation]
    return function(up.copy(), None) if gate is None else function(gate.copy(), None) * up


def _moe_rules(config: DecoderConfig, layer: int, read: Term) -> dict[str, Rule]:
    moe = config.moe_of(layer)
    rules = {
        "mlp.router": _linear("R", read, "W_router", "mlp.router", bias=False),
        "mlp.expert_ids": Rule("chosen experts"),
        "mlp.expert_weights": Rule("their shares"),
    }
    formula = "D = the sum of share · expert's answer over the chosen experts"
    if moe is not None and moe.shared_dim:
        rules["mlp.shared"] = Rule("shared")
        formula += ", + shared"
    rules["mlp.down"] = Rule("D", formula, lambda v: _mixed_experts(config, v, read))
    return rules


def _mixed_experts(config: DecoderConfig, values: Values, read: Term) -> Array:
    rows = read.of(values)
    total = np.array(values.traced.get("mlp.shared", np.zeros_like(rows)))
    chosen = zip(values.traced["mlp.expert_ids"], values.traced["mlp.expert_weights"], strict=True)
    for row, (experts, shares) in enumerate(chosen):
        for expert, share in zip(experts, shares, strict=True):
            name = f"mlp.experts.{expert}."
            gate = values.linear(rows[row], f"{name}gate") if config.mlp.gated else None
            bent = _bent(config, gate, values.linear(rows[row], f"{name}up"))
            total[row] += share * values.linear(bent, f"{name}down")
    return total
