"""What each intermediate of a layer is, in words: the sentence, the formula and the symbol beside its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Step:
    """One intermediate.

    Attributes:
        symbol: what it is called.
        formula: how it is computed; empty if the sentence says it.
        sentence: what it is and why it is computed.
    """

    symbol: str
    formula: str
    sentence: str


# By the name in a trace, after the layer's prefix, in the words of the walk.
HEAD_STEPS: Mapping[str, Step] = MappingProxyType(
    {
        "q": Step("Q", "Q = X · W_q", "The queries: what each token looks for."),
        "k": Step("K", "K = X · W_k", "The keys: what each token has to offer."),
        "v": Step("V", "V = X · W_v", "The values: what each token hands over to those that look at it."),
        "q_normed": Step("Q normed", "", "The queries are brought to a standard size."),
        "k_normed": Step("K normed", "", "So are the keys."),
        "q_rotated": Step(
            "Q turned",
            "pairs of numbers turn by an angle that grows with the position",
            "Queries learn where they stand: pairs of their numbers are turned like the hands of a clock, further with "
            "every position. Two tokens' scores then depend on how far apart they are.",
        ),
        "k_rotated": Step("K turned", "", "The keys are turned in the same way."),
        "scores": Step(
            "S",
            "S = Q · Kᵀ",
            "The scores: how well each token's query fits each token's key. Rows look, columns are seen.",
        ),
        "scaled_scores": Step(
            "S scaled",
            "S · {scale}",
            "The scores are made smaller, so that the softmax does not give everything to one.",
        ),
        "capped_scores": Step(
            "S capped", "S = cap · tanh(S / cap)", "Scores of any size are squeezed between minus and plus a cap."
        ),
        "biased_scores": Step(
            "S biased",
            "",
            "Tokens that are further away get something subtracted: that is how this model knows positions.",
        ),
        "masked_scores": Step(
            "S masked",
            "{mask}",
            "No token may look at those that come after it, as these are what the model is to guess: their scores "
            "become minus infinity, which the softmax turns into a share of 0.",
        ),
    }
)
WEIGHTS = Step(
    "A",
    "A = softmax(S)",
    "The shares of attention, each row adding up to 1. The darker, the more a row's token looks there:",
)

LAYER_STEPS: Mapping[str, Step] = MappingProxyType(
    {
        "attention.heads": Step(
            "Z",
            "Z = [A · V of every head, side by side]",
            "Each head mixes the values by its shares; the outputs of all heads are set side by side.",
        ),
        "attention.projection": Step(
            "O",
            "O = Z · W_o",
            "A matrix product lets the heads' findings mix and brings them back to the stream's width.",
        ),
        "attention_output_norm": Step("O normed", "", "What attention made is brought to a standard size."),
        "attention_residual": Step(
            "X + O",
            "X = X + {scale}O",
            "The result is added to what went in, not put in its place: what was known about a token is kept.",
        ),
        "attention_norm": Step(
            "X normed",
            "normalise each row, then scale it by learned factors",
            "Each token's row is brought to a standard size, so that numbers neither explode nor vanish from layer "
            "to layer.",
        ),
        "mlp_norm": Step(
            "X normed", "normalise each row, then scale it by learned factors", "Each row is normalised again."
        ),
        "mlp.gate": Step(
            "G", "G = X · W_gate", "A second set of the same size decides how much of each of those numbers may pass."
        ),
        "mlp.up": Step(
            "U",
            "U = X · W_up",
            "Now every token thinks for itself, in the feed-forward network: its row is multiplied out to many more "
            "numbers.",
        ),
        "mlp.activated": Step(
            "H",
            "H = {activation}",
            "A bend in the line: small or negative numbers are damped, others pass. Without it all matrices together "
            "could do no more than a single one.",
        ),
        "mlp.down": Step("D", "D = H · W_down", "The many numbers are brought back to the stream's width."),
        "mlp.router": Step(
            "R",
            "R = X · W_router",
            "This layer has several feed-forward networks, called experts. Each token scores them:",
        ),
        "mlp.expert_ids": Step("chosen experts", "", "and goes to the experts with the best scores only,"),
        "mlp.expert_weights": Step("their shares", "", "whose answers are mixed by these shares."),
        "mlp.shared": Step("shared", "", "One more expert sees every token."),
        "mlp_output_norm": Step("D normed", "", "What the network made is brought to a standard size."),
        "mlp_residual": Step("X + D", "X = X + {scale}D", "And added to what the token was before."),
    }
)
