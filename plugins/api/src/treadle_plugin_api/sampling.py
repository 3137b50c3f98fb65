"""The sampler contract: one class a stage, on one of two bases, its fields the parameters.

class Sharpen(Stage):
\"\"\"Multiply every logit by `strength`.\"\"\"

name = "sharpen"
kind = "transform"
api_version = 1
argmax_invariant = True

strength: float = Field(default=2.0, gt=0, description="factor on every logit")

def apply(self, logits, context, state=None):
return np.multiply(logits, self.strength, out=context.empty())
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from treadle_plugin_api.context import ModelInfo, SamplingContext
from treadle_plugin_api.logits import Ids, Logits

API_VERSION = 1

Kind = Literal["mask", "penalty", "transform", "filter", "select"]


@dataclass(frozen=True, slots=True)
class Knob:
    """Marks a field as a plain knob of the request, of the same name: `Annotated[int, Knob(off=(0, -1))]`.

    Only the built-in stages have plain knobs; everyone's stages can be named in `stages`.

    Attributes:
        off: values that leave the stage out, the default first; empty for a knob that only adjusts its stage. An empty
            list or mapping is written `()` or `{}`.
    """

    off: tuple[object, ...] = ()


class _StageBase(BaseModel):
    """What both bases share. A subclass's fields are its parameters: give each a range, a default and a description.

    Class attributes:
        name: what a request calls the stage; lower-case letters, digits and underscores.
        kind: where the stage stands by default: mask, penalty, transform, filter or select.
        api_version: the version of this contract the class was written for; 1 when left out, for ever.
        argmax_invariant: True promises that the stage never changes which token is largest (lowest id among equals), so
            that greedy decoding may skip it.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )

    name: ClassVar[str]
    kind: ClassVar[Kind]
    api_version: ClassVar[int] = 1
    argmax_invariant: ClassVar[bool] = False

    def check(self, model_info: ModelInfo) -> None:
        """Refuse parameters that do not fit the model by raising ValueError; runs once, at admission.

        Slow preparation belongs here too, off the engine thread; keep its result in a `PrivateAttr`.
        """

    def start(self, context: SamplingContext) -> Any:
        """State of one choice of one request, made before its first token; None when the stage needs none."""
        return None

    def accept(self, state: Any, token_id: int) -> None:
        """Advance `state` by the token that was chosen, in place. Nothing else may advance it."""

    def clone(self, state: Any) -> Any:
        """A copy of `state` that advances on its own."""
        return copy.deepcopy(state)


class Stage(_StageBase):
    """Turns a row of logits into another: a mask, a penalty, a transform or a filter."""

    @abstractmethod
    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """Logits [vocab] float32 after this stage, from read-only `logits` [vocab] float32, valid during the call.

        Pure but for notes in `state`, which a second call may overwrite: the engine may call it twice for a token.
        A masked token (-inf) stays masked, at least one stays finite, and no NaN or +inf appears.
        """

    @classmethod
    def apply_batch(
        cls, stages: Sequence[Self], logits: Logits, contexts: Sequence[SamplingContext], states: Sequence[Any]
    ) -> Logits:
        """Rows [n, vocab] float32 after this stage, each bitwise what `apply` gives; override it if that is faster.

        The rows belong to different requests: row i has the parameters of `stages[i]`. If it raises, the engine
        runs `apply` row by row instead.
        """
        rows = zip(stages, logits, contexts, states, strict=True)
        return np.stack([stage.apply(row, context, state) for stage, row, context, state in rows])


class Select(_StageBase):
    """Chooses the token: the last stage of every chain, and the only one of its kind in it."""

    kind = "select"

    @abstractmethod
    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> int:
        """Id of the chosen token, whose logit in read-only `logits` [vocab] float32 is finite. Pure, as in `Stage`."""

    def distribution(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """Logits [vocab] float32 that `apply` draws from; override it if `apply` reshapes its input."""
        return logits

    @classmethod
    def apply_batch(
        cls, stages: Sequence[Self], logits: Logits, contexts: Sequence[SamplingContext], states: Sequence[Any]
    ) -> Ids:
        """Chosen ids [n] int64 of the rows of `logits` [n, vocab] float32, each what `apply` gives."""
        rows = zip(stages, logits, contexts, states, strict=True)
        chosen = [stage.apply(row, context, state) for stage, row, context, state in rows]
        return np.array(chosen, dtype=np.int64)
