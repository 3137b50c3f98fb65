"""Rotary settings of a GGUF file in Hugging Face's words: `rope_theta`, `rope_scaling`, `partial_rotary_factor`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from treadle_server.checkpoints.gguf_settings import Settings
from treadle_server.checkpoints.gguf_tensors import to_float32

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_FREQS, _LONG, _SHORT = ROPE_TENSORS
# What Meta's Llama 3.1, 3.2 and 3.3 use; GGUF stores only the resulting factors, and the largest of them is `factor`.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
_DEFAULT_THETA = 10000.0
_YARN_BETAS = ("beta_fast", "beta_slow")


def rope_config(settings: Settings, rotary_dim: int) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling`; raises UnsupportedModelError for what they cannot say."""
    theta = settings.optional_number("rope.freq_base") or _DEFAULT_THETA
    settings.skip("rope.scaling.finetuned")
    return {"rope_theta": theta, "rope_scaling": _scaling(settings, theta, rotary_dim)}


def rotary_dim(settings: Settings, head_dim: int) -> int:
    """How many of a head's dimensions turn."""
    dim = settings.optional_integer("rope.dimension_count")
    if dim is None:
        return head_dim
    if not 0 < dim <= head_dim or dim % 2:
        raise settings.unsupported(
            f"{settings.architecture}.rope.dimension_count = {dim} must be even and at most the head size {head_dim}"
        )
    return dim


def _scaling(settings: Settings, theta: float, dim: int) -> dict[str, Any] | None:
    kind = settings.text("rope.scaling.type")
    old_factor = settings.optional_number("rope.scale_linear")  # how files before the `scaling` keys said it
    if _LONG in settings.file.tensors:
        return _longrope(settings, kind)
    if kind is None and old_factor not in (None, 1.0):
        kind = "linear"
    if _FREQS in settings.file.tensors:
        if kind not in (None, "none"):
            raise settings.unsupported(f"rope scaling of the kind {kind!r} and {_FREQS} together are not supported")
        return _llama3(settings, theta, dim)
    if kind == "linear":
        factor = settings.optional_number("rope.scaling.factor")
        return {"rope_type": "linear", "factor": factor or old_factor or 1.0}
    if kind == "yarn":
        return _yarn(settings)
    if kind in (None, "none"):
        settings.skip("rope.scaling.original_context_length", "rope.scaling.factor")
        return None
    raise settings.unsupported(
        f"{settings.architecture}.rope.scaling.type = {kind!r} is not supported; "
        "supported are none, linear, yarn and longrope"
    )


def _yarn(settings: Settings) -> dict[str, Any]:
    settings.require("rope.scaling.yarn_ext_factor", 1.0)
    # `yarn_attn_factor` is left unread, so refused: converters write the whole factor, llama.cpp takes it as a part.
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": settings.number("rope.scaling.factor")}
    original = settings.optional_integer("rope.scaling.original_context_length")
    given = {beta: settings.optional_number(f"rope.scaling.yarn_{beta}") for beta in _YARN_BETAS}
    scaling |= {name: value for name, value in given.items() if value is not None}
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _longrope(settings: Settings, kind: str | None) -> dict[str, Any]:
    if kind not in (None, "longrope", "none") or _SHORT not in settings.file.tensors:
        raise settings.unsupported(f"{_LONG} with rope scaling of the kind {kind!r}, or without {_SHORT}")
    settings.skip("rope.scaling.factor")
    original = settings.integer("rope.scaling.original_context_length")
    if original <= 1:
        raise settings.unsupported(f"rope.scaling.original_context_length = {original} must be over 1")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": _decimals(settings, _LONG),
        "short_factor": _decimals(settings, _SHORT),
        "original_max_position_embeddings": original,
    }
    attention = settings.optional_number("rope.scaling.attn_factor")
    derived = _longrope_attention(settings.integer("context_length") / original, original)
    if attention is None or math.isclose(attention, derived, rel_tol=1e-6):
        return scaling
    return scaling | {"attention_factor": attention}


def _longrope_attention(scale: float, original: int) -> float:
    """What Hugging Face works out when `attention_factor` is not given."""
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def _decimals(settings: Settings, name: str) -> list[float]:
    return [float(str(factor)) for factor in to_float32(settings.file.tensors[name])]


def _llama3(settings: Settings, theta: float, dim: int) -> dict[str, Any]:
    """Name the llama3 scaling whose factors the file stores; raises UnsupportedModelError for others."""
    stored = to_float32(settings.file.tensors[_FREQS])
    factor = float(stored.max())
    original = settings.optional_integer("rope.scaling.original_context_length") or _LLAMA3_ORIGINAL
    expected = _llama3_factors(theta, dim, factor, original)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise settings.unsupported(f"the factors in {_FREQS} are not those of llama3 scaling by {factor}")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": original,
    }


def _llama3_factors(theta: float, dim: int, factor: float, original: int) -> np.ndarray:
    """float64 [dim / 2], by what each frequency is divided (modeling_rope_utils of transformers)."""
    with np.errstate(all="ignore"):  # nonsense gives NaN, which equals nothing
        wavelengths = 2 * math.pi * np.power(theta, np.arange(0, dim, 2) / dim)
        smooth = np.clip((original / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
        return np.asarray(1 / ((1 - smooth) / factor + smooth))
