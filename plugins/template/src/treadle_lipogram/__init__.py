"""A sampler stage that writes without the letters it is given, as Perec wrote La Disparition without an e."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from treadle_plugin_api import Field, Logits, ModelInfo, PrivateAttr, SamplingContext, Select, Stage, hookimpl


class Lipogram(Stage):
    """Ban every token that holds one of the given letters, small or capital."""

    name = "lipogram"  # what requests call it
    kind = "mask"  # where it stands in the chain: mask, penalty, transform, filter
    api_version = 1  # the version of the plugin API it was written for
    argmax_invariant = False  # it can ban the most likely token, so greedy decoding must not skip it

    # The fields are the parameters. Range, default and description are checked and shown to users.
    letters: str = Field(default="e", min_length=1, max_length=64, description="letters that must not occur")

    # What `check` prepares for `apply`; not a parameter, because of the underscore.
    _banned: np.ndarray[Any, np.dtype[np.int64]] = PrivateAttr(default_factory=lambda: np.empty(0, dtype=np.int64))

    def check(self, model_info: ModelInfo) -> None:
        """Find the banned tokens, once a request; a ValueError here is the client's mistake and is told to it."""
        if any(letter.isspace() for letter in self.letters):
            raise ValueError(f"letters must not hold spaces; received {self.letters!r}")
        banned = {form.encode() for letter in self.letters for form in (letter.lower(), letter.upper())}
        texts = ((token_id, model_info.token_bytes(token_id)) for token_id in range(model_info.vocab_size))
        self._banned = np.array(
            [
                token_id
                for token_id, text in texts
                if token_id not in model_info.eos_ids and any(letter in text for letter in banned)
            ],
            dtype=np.int64,
        )

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """`logits` [vocab] float32 with -inf for every banned token; once a token, so it should be quick."""
        out = context.empty()  # a buffer to fill: the input is read-only
        np.copyto(out, logits)
        out[self._banned] = -np.inf
        # Some token has to stay possible; where all that is left is banned, nothing is.
        return out if out.max() > -np.inf else logits


@hookimpl
def treadle_register_stages(register: Callable[[type[Stage | Select]], None]) -> None:
    """Called once when the server starts."""
    register(Lipogram)
