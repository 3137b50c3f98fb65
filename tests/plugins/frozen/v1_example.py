"""A plugin of version 1 of the contract, as it was when the version was published. It is never changed.

It uses everything that the version gives to authors. Each later treadle must run it, with the same results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import field_validator
from treadle_plugin_api import (
    API_VERSION,
    MASS_SLACK,
    Field,
    Logits,
    MissingExtraError,
    ModelInfo,
    PrivateAttr,
    RequestInfo,
    RequestResult,
    SamplingContext,
    Select,
    Stage,
    finite,
    hookimpl,
    keep,
    softmax64,
    top_ids,
)

try:
    import json
except ImportError as error:
    raise MissingExtraError("it needs json") from error

SEEN: list[tuple[str, object]] = []


class FrozenMask(Stage):
    """Ban tokens by the bytes they begin with, but never the last one left."""

    name = "frozen_mask"
    kind = "mask"
    api_version = 1

    prefixes: list[str] = Field(default=["q"], min_length=1, max_length=8, description="beginnings of banned tokens")

    _banned: list[int] = PrivateAttr(default_factory=list)

    @field_validator("prefixes")
    @classmethod
    def _not_empty(cls, prefixes: list[str]) -> list[str]:
        if not all(prefixes):
            raise ValueError("a prefix must not be empty")
        return prefixes

    def check(self, model_info: ModelInfo) -> None:
        """Find the banned tokens."""
        if model_info.context_length < 2 or not model_info.name:
            raise ValueError("needs a model with a name and a context")
        model_info.encode("text")
        kept = {*model_info.eos_ids, *model_info.special_ids}
        texts = model_info.once("frozen.texts", lambda: list(map(model_info.token_bytes, range(model_info.vocab_size))))
        first = tuple(prefix.encode() for prefix in self.prefixes)
        self._banned = [i for i, text in enumerate(texts) if i not in kept and text.startswith(first)]

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits without the banned tokens."""
        out = context.empty()
        np.copyto(out, logits)
        out[self._banned] = -np.inf
        return out if len(finite(out)) else logits


class FrozenPenalty(Stage):
    """Push down the tokens of the output, by how often they came."""

    name = "frozen_penalty"
    kind = "penalty"
    api_version = 1

    weight: float = Field(default=0.5, ge=0, le=10, description="taken from a logit for each time its token came")

    def start(self, context: SamplingContext) -> dict[int, int]:
        """No token came yet."""
        return {}

    def accept(self, state: dict[int, int], token_id: int) -> None:
        """Count a token."""
        state[token_id] = state.get(token_id, 0) + 1

    def clone(self, state: dict[int, int]) -> dict[int, int]:
        """The same counts."""
        return dict(state)

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits less what their tokens deserve."""
        out = logits.copy()
        for token_id, count in state.items():
            if token_id < len(out):
                out[token_id] -= np.float32(self.weight) * np.float32(count)
        return out


class FrozenNoise(Stage):
    """Add noise that depends on the seed and the place, and on nothing else."""

    name = "frozen_noise"
    kind = "transform"
    api_version = 1

    scale: float = Field(default=1.0, ge=0, le=10, description="width of the noise")

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits with noise on every one."""
        shift = context.uniform() - 0.5
        noise = context.uniform(len(logits)) - 0.5
        return np.add(logits, np.float32(self.scale) * (noise + shift).astype(np.float32), out=context.empty())


class FrozenFilter(Stage):
    """Keep the largest tokens up to a mass, at most so many."""

    name = "frozen_filter"
    kind = "filter"
    api_version = 1
    argmax_invariant = True

    mass: float = Field(default=0.9, gt=0, le=1, description="probability to keep")
    most: int = Field(default=20, ge=1, description="number of tokens to keep")

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits of the kept tokens."""
        ids = top_ids(logits, self.most)
        sums = np.cumsum(softmax64(logits)[ids])
        return keep(logits, ids[: 1 + int(np.searchsorted(sums, self.mass - MASS_SLACK))], context.empty())

    @classmethod
    def apply_batch(cls, stages: Any, logits: Logits, contexts: Any, states: Any) -> Logits:
        """The same, for many rows."""
        rows = zip(stages, logits, contexts, strict=True)
        return np.stack([stage.apply(row, context) for stage, row, context in rows])


class FrozenSelect(Select):
    """Draw a token from the logits at twice their temperature."""

    name = "frozen_select"
    api_version = 1

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> int:
        """The drawn token."""
        ids = finite(logits)
        sums = np.cumsum(softmax64(self.distribution(logits, context, state)[ids]))
        return int(ids[min(int(np.searchsorted(sums, context.uniform() * sums[-1])), len(ids) - 1)])

    def distribution(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """What is drawn from."""
        assert len(context.prompt_ids) + len(context.output_ids) == context.position
        assert len(context.output_ids) == context.num_outputs
        assert isinstance(context.eos_ids | context.stop_ids, frozenset)
        assert isinstance(context.token_bytes(context.vocab_size - 1), bytes)
        return (logits - logits.max()) * np.float32(0.5)


@hookimpl
def treadle_register_stages(register: Any) -> None:
    """Register the stages."""
    assert API_VERSION >= 1
    for cls in (FrozenMask, FrozenPenalty, FrozenNoise, FrozenFilter, FrozenSelect):
        register(cls)


@hookimpl
def treadle_request_started(request: RequestInfo) -> None:
    """See a request start."""
    SEEN.append(("started", (request.request_id, request.model, request.chain, request.num_prompt_tokens)))


@hookimpl
def treadle_request_finished(result: RequestResult) -> None:
    """See a request end."""
    SEEN.append(("finished", (result.request_id, result.reasons, json.dumps(result.num_generated_tokens))))
