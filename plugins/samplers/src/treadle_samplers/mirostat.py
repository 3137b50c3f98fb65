"""Mirostat: a steady surprise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from treadle_plugin_api import Field, Knob, Logits, SamplingContext, Select, keep, top_ids
from treadle_plugin_api.logits import Ids

from treadle_samplers.cutoff import ids_within
from treadle_samplers.weights import log_total

_NUM_FITTED = 100  # the m of the paper: the most likely tokens that Zipf's exponent is fitted to


@dataclass(slots=True)
class MirostatState:
    """What a choice remembers.

    Attributes:
        mu: the surprise that is allowed, in bits.
        drawn: the token of the last draw and its surprise in bits; None once it was accepted.
    """

    mu: float
    drawn: tuple[int, float] | None = None


class Mirostat(Select):
    """Draw so that the surprise of the tokens stays near a target.

    Formula (Basu et al.: Mirostat, 2020; as in llama.cpp): mu starts at 2 tau. Version 2 keeps the tokens with -log2 p
    <= mu. Version 1 fits Zipf's exponent s to the 100 most likely tokens, s = sum t b / sum t^2 with t_i = ln((i + 1) /
    i) and b_i = ln(p_i / p_{i+1}), and keeps the k most likely, k = ((e 2^mu) / (1 - V^-e))^(1 / s), e = s - 1, V the
    vocabulary's size. Both draw among the kept (inverse CDF in ascending id order, one uniform), and when the token is
    accepted, mu -= eta * (surprise - tau), with surprise = -log2 p, p renormalised over the kept.

    Edges: one token at least is kept, the most likely (lowest id among equals). Filters before it narrow what it sees
    (llama.cpp turns them off). A token that was not drawn here, such as one of the prompt, moves nothing, so a text
    that is sent back as prompt starts again at mu = 2 tau. Temperature 0 is greedy instead.
    """

    name = "mirostat"
    api_version = 1

    mirostat: Annotated[int, Knob(off=(0,))] = Field(default=2, ge=1, le=2, description="version 1 or 2")
    mirostat_tau: Annotated[float, Knob()] = Field(
        default=5.0, ge=0, le=100, description="target surprise of a token, in bits"
    )
    mirostat_eta: Annotated[float, Knob()] = Field(
        default=0.1, ge=0, le=1, description="how fast the allowed surprise follows"
    )

    def start(self, context: SamplingContext) -> MirostatState:
        """Twice the target."""
        return MirostatState(mu=2 * self.mirostat_tau)

    def accept(self, state: MirostatState, token_id: int) -> None:
        """Move mu by how much the token surprised."""
        if state.drawn is not None and state.drawn[0] == token_id:
            state.mu -= self.mirostat_eta * (state.drawn[1] - self.mirostat_tau)
        state.drawn = None

    def clone(self, state: MirostatState) -> MirostatState:
        """A copy that moves by itself."""
        return MirostatState(state.mu, state.drawn)

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> int:
        """Id of the drawn token; notes its surprise."""
        ids = np.sort(self._kept(logits, state.mu))
        index, probability = context.draw(logits[ids])
        token_id = int(ids[index])
        state.drawn = (token_id, -math.log2(probability))
        return token_id

    def distribution(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The kept tokens."""
        return keep(logits, self._kept(logits, state.mu), context.empty())

    def _kept(self, logits: Logits, mu: float) -> Ids:
        if self.mirostat == 2:
            return ids_within(logits, log_total(logits) - mu * math.log(2))
        best = top_ids(logits, _NUM_FITTED)
        num_kept = _num_kept(logits[best].astype(np.float64), mu, len(logits))
        return top_ids(logits, num_kept, ordered=False)


def _num_kept(best: np.ndarray[Any, np.dtype[np.float64]], mu: float, vocab_size: int) -> int:
    """Version 1's k, from 1 to `vocab_size`, by the largest logits `best` [m], largest first."""
    if len(best) < 2:
        return 1
    ranks = np.arange(1, len(best))
    t = np.log((ranks + 1) / ranks)
    exponent = float(t.dot(best[:-1] - best[1:]) / t.dot(t))
    if exponent < 1e-9:  # equal logits: the limit, all or one
        return vocab_size if mu * math.log(2) >= math.log(vocab_size - 1) else 1
    log_k = (_log_share(exponent - 1, math.log(vocab_size)) + mu * math.log(2)) / exponent
    return max(int(min(math.exp(min(log_k, 700.0)), vocab_size)), 1)


def _log_share(e: float, log_size: float) -> float:
    """ln(e / (1 - V^-e)), which tends to -ln ln V as e tends to 0; V^-e would overflow for a large vocabulary."""
    if abs(e) < 1e-9:
        return -math.log(log_size)
    if e > 0:
        return math.log(e) - math.log(-math.expm1(-e * log_size))
    return math.log(-e) + e * log_size - math.log(-math.expm1(e * log_size))
