"""The document's matrices by its formulas, in float64, through the operations that treadle's own models run on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from treadle_plugin_api.backend import Array

from treadle_server.engine.logprobs import token_logprob
from treadle_server.explain import document
from treadle_server.explain.document import HeadWeights
from treadle_server.language_model.preview import preview_logits
from treadle_server.language_model.spec import PreviewSpec, SamplingPreview
from treadle_server.model.ops import linear_forward, sinusoidal_positions, softmax_forward
from treadle_server.plugins.manager import PluginManager
from treadle_server.plugins.registry import StageRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSteps:
    """One attention head of three words without a mask; all float64."""

    q: Array  # [seq, head_dim]
    k: Array  # [seq, head_dim]
    v: Array  # [seq, head_dim]
    scores: Array  # [seq, seq]
    scaled: Array  # [seq, seq]
    weights: Array  # [seq, seq]
    output: Array  # [seq, head_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSteps:
    """Everything the document computes, in its order; float64."""

    embedding: Array  # [seq, dim], chapter 1
    positions: Array  # [seq, dim]
    x: Array  # [seq, dim], their sum
    head: HeadSteps  # chapters 2 to 5
    heads: tuple[HeadSteps, ...]  # chapter 6
    concatenated: Array  # [seq, dim]
    output: Array  # [seq, dim]
    logits: Array  # [seq, vocab], chapter 7, given
    probabilities: Array  # [seq, vocab]
    tempered: Mapping[float, Array]  # temperature -> [vocab] of position 0, chapter 8
    top_k: Array  # [vocab] of position 0, chapter 9
    top_p: Array  # [vocab] of position 0, chapter 10
    losses: Array  # [seq], chapter 12

    @property
    def loss(self) -> float:
        """The mean of the positions' losses."""
        return float(self.losses.mean())


def work_document() -> DocumentSteps:
    """Compute the whole document."""
    registry = PluginManager.load().registry
    embedding = np.array(document.EMBEDDING)[list(document.SENTENCE_IDS)]  # [seq, dim]
    positions = sinusoidal_positions(np.arange(len(embedding)), document.DIM, np.float64)
    x = embedding + positions
    heads = tuple(attend(x, weights) for weights in document.TWO_HEADS)
    concatenated = concatenate(*(head.output for head in heads))
    logits = np.array(document.LOGITS)
    return DocumentSteps(
        embedding=embedding,
        positions=positions,
        x=x,
        head=attend(x, document.SINGLE_HEAD),
        heads=heads,
        concatenated=concatenated,
        output=project(concatenated, np.array(document.W_O)),
        logits=logits,
        probabilities=softmax_forward(logits),
        tempered={t: softmax_forward(logits[0] / t) for t in document.TEMPERATURES},
        top_k=preview(registry, logits[0], top_k=document.TOP_K).stages[0].probabilities,
        top_p=preview(registry, logits[0], top_p=document.TOP_P).stages[0].probabilities,
        losses=cross_entropy(logits, document.TARGET_IDS),
    )


def project(x: Array, weight: Array) -> Array:
    """Return x `[rows, in]` times a weight as the document writes it, `[in, out]`."""
    return linear_forward(x, weight.T)


def attend(x: Array, weights: HeadWeights) -> HeadSteps:
    """Return the steps of one head over x `[seq, dim]`, where every word sees every other."""
    q, k, v = (project(x, np.array(weight)) for weight in weights)  # each [seq, head_dim]
    scores = linear_forward(q, k)  # q times k transposed, [seq, seq]
    scaled = scores / math.sqrt(q.shape[1])
    attention = softmax_forward(scaled)
    output = project(attention, v)
    return HeadSteps(q=q, k=k, v=v, scores=scores, scaled=scaled, weights=attention, output=output)


def concatenate(*outputs: Array) -> Array:
    """Return the heads' outputs side by side, `[seq, heads * head_dim]`."""
    return np.concatenate(outputs, axis=1)


def cross_entropy(logits: Array, target_ids: tuple[int, ...]) -> Array:
    """Return -log of the probability that each row of logits `[seq, vocab]` gives its target, `[seq] float64`."""
    scored = (token_logprob(row, target) for row, target in zip(logits, target_ids, strict=True))
    return np.array([-(one.logprob if one.logprob is not None else -math.inf) for one in scored])


def preview(registry: StageRegistry, logits: Array, **knobs: object) -> SamplingPreview:
    """Run the sampling chain that some knobs make over logits `[vocab]`."""
    return preview_logits(PreviewSpec(logits=logits, knobs=knobs, seed=0), registry)
