"""What each intermediate of a layer is and why it is computed, in words; how, say the formulas beside the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from treadle_plugin_api.decoder_config import DecoderConfig

# By the name in a trace, after the layer's prefix, in the words of the walk.
HEAD_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "q": "The queries: what each token looks for.",
        "k": "The keys: what each token has to offer.",
        "v": "The values: what each token hands over to those that look at it.",
        "q_normed": "The queries are brought to a standard size.",
        "k_normed": "So are the keys.",
        "q_rotated": (
            "Queries learn where they stand: pairs of their numbers are turned like the hands of a clock, further with "
            "every position. Two tokens' scores then depend on how far apart they are."
        ),
        "k_rotated": "The keys are turned in the same way.",
        "scores": ("The scores: how well each token's query fits each token's key. Rows look, columns are seen."),
        "scaled_scores": "The scores are made smaller, so that the softmax does not give everything to one.",
        "capped_scores": "Scores of any size are squeezed between minus and plus a cap.",
        "biased_scores": (
            "Tokens that are further away get something subtracted: that is how this model knows positions."
        ),
        "masked_scores": (
            "No token may look at those that come after it, as these are what the model is to guess: their scores "
            "become minus infinity, which the softmax turns into a share of 0."
        ),
    }
)
WEIGHTS_SENTENCE = "The shares of attention, each row adding up to 1. The darker, the more a row's token looks there:"

LAYER_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "attention.heads": ("Each head mixes the values by its shares; the outputs of all heads are set side by side."),
        "attention.projection": (
            "A matrix product lets the heads' findings mix and brings them back to the stream's width."
        ),
        "attention_output_norm": "What attention made is brought to a standard size.",
        "attention_residual": (
            "The result is added to what went in, not put in its place: what was known about a token is kept."
        ),
        "attention_norm": (
            "Each token's row is brought to a standard size, so that numbers neither explode nor vanish from layer "
            "to layer."
        ),
        "mlp_norm": "Each row is brought to a standard size again, for the feed-forward network.",
        "mlp.gate": "A second set of the same size decides how much of each of those numbers may pass.",
        "mlp.up": (
            "Now every token thinks for itself, in the feed-forward network: its row is multiplied out to many more "
            "numbers."
        ),
        "mlp.activated": (
            "A bend in the line: small or negative numbers are damped, others pass. Without it all matrices together "
            "could do no more than a single one."
        ),
        "mlp.down": "The many numbers are brought back to the stream's width.",
        "mlp.router": "This layer has several feed-forward networks, called experts. Each token scores them:",
        "mlp.expert_ids": "and goes to the experts with the best scores only,",
        "mlp.expert_weights": "whose answers are mixed by these shares.",
        "mlp.shared": "One more expert sees every token.",
        "mlp_output_norm": "What the network made is brought to a standard size.",
        "mlp_residual": "And added to what the token was before.",
    }
)
_PARALLEL = (
    " It starts from the X of the layer as attention did, not from what attention made of it: the two run side by side."
)


def head_sentence(name: str, config: DecoderConfig, layer: int) -> str:
    """Return the sentence of an intermediate of a head, as it is true of this model."""
    scale = config.attention.scale_of(layer)
    if name == "scaled_scores" and scale == 1:
        return "This model leaves the scores as they are; others make them smaller here."
    if name == "scaled_scores" and scale > 1:
        return "The scores are multiplied by a number that makes the differences between them larger."
    return HEAD_SENTENCES[name]


def layer_sentence(name: str, config: DecoderConfig, layer: int) -> str | None:
    """Return the sentence of an intermediate of a layer, as it is true of this model; None for one of a head."""
    if config.norm.place == "post" and name in ("attention_norm", "mlp_norm"):
        return "The sum is brought to a standard size, so that numbers neither explode nor vanish from layer to layer."
    if config.residual_from_norm and name in ("attention_residual", "mlp_residual"):
        return "The result is added to the rows of standard size that went in."
    if name == "mlp.down" and config.moe_of(layer) is not None:
        return "The answers, put together:"
    if config.residual != "serial" and name == "mlp.up":
        return LAYER_SENTENCES[name] + _PARALLEL
    return LAYER_SENTENCES.get(name)
