"""The walk through one pass of a model: its tokens, one layer, one head or two, and the choice that follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from treadle_plugin_api.backend import Array

from treadle_server.engine.logprobs import prompt_logprobs
from treadle_server.errors import InvalidRequestError
from treadle_server.explain.blocks import (
    Block,
    Chapter,
    Formula,
    Heatmap,
    Matrix,
    Part,
    Table,
    Text,
    best_ids,
    distribution,
    percent_text,
)
from treadle_server.explain.formulas import Rule, embedding_rules, final_rules, layer_rules
from treadle_server.explain.steps import HEAD_SENTENCES, WEIGHTS_SENTENCE, head_sentence, layer_sentence
from treadle_server.explain.tokens import token_label
from treadle_server.language_model import LanguageModel
from treadle_server.language_model.spec import Prompt

# More tokens make a heatmap that nobody can read.
MAX_TOKENS = 128
# A model with so few heads shows them all when none is asked for.
_FEW_HEADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What of a model is to be shown.

    Attributes:
        prompt: the text, or its token ids.
        layer: the layer to look into, from 0.
        head: the head to look into, from 0; None for the first, or all where there are few.
        knobs: the sampling knobs of the last chapter, in the order of the chain.
        seed: the seed of the draw.
        next_token: the position whose next token is chosen; the last one if None.
        ends: the text is whole, so that its end is a token to be guessed as well.
    """

    prompt: Prompt
    layer: int = 0
    head: int | None = None
    knobs: Mapping[str, object]
    seed: int = 0
    next_token: int | None = None
    ends: bool = False


class ModelWalk:
    """One pass of a model over a prompt, told in chapters."""

    def __init__(self, model: LanguageModel, view: View) -> None:
        """Run the pass.

        Raises:
            InvalidRequestError: the model has no such layer or head, or cannot take the prompt or a knob.
        """
        _check_range("layer", view.layer, model.config.num_layers)
        _check_range("head", view.head or 0, model.config.attention.num_heads)
        self._model = model
        self._view = view
        self._trace = model.trace(view.prompt, layers=[view.layer])
        self._ids = self._trace.token_ids
        if len(self._ids) > MAX_TOKENS:
            raise InvalidRequestError.of(
                "prompt", f"must have at most {MAX_TOKENS} tokens to be shown, got {len(self._ids)}"
            )
        self._labels = [token_label(model.tokenizer, i) for i in self._ids]
        self._prefix = f"layers.{view.layer}."
        self._rules = layer_rules(model.config, view.layer)

    def part(self) -> Part:
        """Return the walk."""
        num_heads, num_layers = self._model.config.attention.num_heads, self._model.config.num_layers
        layers = "one layer" if num_layers == 1 else f"{num_layers} layers that run one after the other"
        heads = "one attention head" if num_heads == 1 else f"{num_heads} attention heads"
        introduction = (
            f"What {self._model.name} computes for this text. The model has {self._model.num_parameters:,} learned "
            f"numbers, {layers}{'' if num_layers == 1 else ', each'} with {heads}, and {self._model.vocab_size:,} "
            "tokens to choose from."
        )
        chapters = [self._tokens(), self._embedding(), *self._layer(), *self._end(), self._choice()]
        if len(self._next_ids()):
            chapters.append(self._loss())
        return Part(f"The model {self._model.name}", introduction, chapters)

    # ---- before the layer -------------------------------------------------------------------------------------------

    def _tokens(self) -> Chapter:
        rows = [
            [str(i), str(token), label] for i, (token, label) in enumerate(zip(self._ids, self._labels, strict=True))
        ]
        text = (
            "The text is cut into tokens, whole words or pieces of words that the model has a number for. "
            "(␣ stands for a blank, which often belongs to the word behind it.)"
        )
        return Chapter("Tokens", [Text(text), Table(["position", "id", "token"], rows)])

    def _embedding(self) -> Chapter:
        config = self._model.config
        rules = embedding_rules(config)
        sentence = "Each token's id is looked up in a table: one row of learned numbers for every token there is."
        if config.embedding_scale != 1:
            sentence += f" Here the rows are multiplied by {config.embedding_scale:.4g} as well."
        if config.embedding_dim is not None:
            sentence += (
                f" A matrix product brings its {config.embedding_dim} numbers to the {config.dim} of the stream."
            )
        blocks: list[Block] = [Text(sentence), *self._ruled(rules["embedding"], "embedding")]
        if "embedding_norm" in self._trace:
            blocks += [
                Text("Each row is brought to a standard size."),
                *self._ruled(rules["embedding_norm"], "embedding_norm"),
            ]
        if "positions" in self._trace:
            blocks += [
                Text("A pattern for each position is added, so that the model knows the order of the tokens."),
                *self._ruled(rules["positions"], "positions"),
                *self._ruled(rules["embedding_with_positions"], "embedding_with_positions"),
            ]
        elif f"{self._prefix}attention.q_rotated" in self._trace:
            blocks.append(Text("No positions are added here: queries and keys are turned by them, further down."))
        blocks.append(Text(self._entrance()))
        return Chapter("Embedding", blocks)

    def _entrance(self) -> str:
        """Say what the X is that the shown layer begins with."""
        layer = self._view.layer
        if layer == 0:
            return "So the rows are that go into layer 0. There they are called X."
        before = "Layer 0 has" if layer == 1 else f"Layers 0 to {layer - 1} have"
        return (
            f"{before} run after that, each as the next chapters show it for layer {layer}. What comes out goes into "
            f"layer {layer}, and is called X there."
        )

    # ---- the layer --------------------------------------------------------------------------------------------------

    def _heads(self) -> Iterator[Chapter]:
        num_heads = self._model.config.attention.num_heads
        few = self._view.head is None and num_heads <= _FEW_HEADS
        for head in range(num_heads) if few else [self._view.head or 0]:
            yield Chapter(f"Layer {self._view.layer}: attention head {head}", list(self._head(head)))

    def _head(self, head: int) -> Iterator[Block]:
        for name in HEAD_SENTENCES:
            full_name = f"{self._prefix}attention.{name}"
            if full_name in self._trace:
                rule = self._rules[f"attention.{name}"]
                columns = self._labels if name.endswith("scores") else ()
                yield Text(head_sentence(name, self._model.config, self._view.layer))
                yield from _formula(rule)
                yield Matrix(rule.symbol, self._of_head(full_name, head), self._labels, columns)
        shares = self._rules["attention.weights"]
        yield Text(WEIGHTS_SENTENCE)
        yield from _formula(shares)
        weights = self._of_head(f"{self._prefix}attention.weights", head)
        yield Heatmap(f"{shares.symbol} of head {head}", weights, self._labels, self._labels)
        yield Text(self._favourite(weights))

    def _of_head(self, name: str, head: int) -> Array:
        """Return one head's matrix; heads may share keys and values, several heads one of them."""
        array = self._trace[name]  # [heads or kv_heads, tokens, ...]
        matrix: Array = array[head * len(array) // self._model.config.attention.num_heads]
        return matrix

    def _favourite(self, weights: Array) -> str:
        """Say where the last token looks most."""
        seen = int(weights[-1].argmax())
        text = (
            f"So the last token, {self._labels[-1]}, looks most at {self._labels[seen]} (position {seen}), with a "
            f"share of {percent_text(float(weights[-1, seen]))}."
        )
        if seen == 0 and len(self._ids) > 1 and self._model.config.num_layers > 1:
            text += (
                " Many heads of trained models rest on the first token when they find nothing of theirs in the text."
            )
        return text

    def _layer(self) -> Iterator[Chapter]:
        """Tell a layer in the order in which it was computed: what comes before its heads, the heads, the rest."""
        names = [name for name in self._trace if name.startswith(self._prefix)]
        queries = names.index(f"{self._prefix}attention.q")
        before, after = self._steps(names[:queries]), self._steps(names[queries:])
        if before:
            yield Chapter(f"Layer {self._view.layer}: before attention", before)
        yield from self._heads()
        yield Chapter(f"Layer {self._view.layer}: after attention", after)

    def _steps(self, names: Sequence[str]) -> list[Block]:
        """Show the intermediates that belong to no single head."""
        blocks: list[Block] = []
        for name in names:
            short = name.removeprefix(self._prefix)
            sentence = layer_sentence(short, self._model.config, self._view.layer)
            if sentence is not None:
                blocks += [Text(sentence), *self._ruled(self._rules[short], name)]
        return blocks

    # ---- after the layers -------------------------------------------------------------------------------------------

    def _end(self) -> Iterator[Chapter]:
        remaining = self._model.config.num_layers - 1 - self._view.layer
        blocks: list[Block] = []
        if remaining:
            blocks.append(Text(f"{remaining} more {'layer does' if remaining == 1 else 'layers do'} the same."))
        rules = final_rules(self._model.config)
        for name, sentence in (
            ("final_norm", "After the last layer each row of its result, X, is brought to a standard size once more."),
            ("embedding_out", "A matrix product gives rows the width of the table."),
        ):
            if name in self._trace:
                blocks += [Text(sentence), *self._ruled(rules[name], name)]
        vocabulary = range(self._model.vocab_size)
        few = self._model.vocab_size <= len(self._labels) + 8
        columns = [token_label(self._model.tokenizer, i) for i in vocabulary] if few else ()
        blocks += [
            Text(
                "A last matrix product gives every token of the vocabulary a score for being the next one: the "
                "logits. There is a row for each position; it has seen the tokens up to there and none behind."
            ),
            *_formula(rules["logits"]),
            Matrix("logits", self._trace["logits"][:, : self._model.vocab_size], self._labels, columns),
        ]
        yield Chapter("Logits", blocks)

    def _choice(self) -> Chapter:
        """Follow the sampling chain stage by stage."""
        row = len(self._ids) - 1 if self._view.next_token is None else self._view.next_token
        preview = self._model.preview(self._ids[: row + 1], seed=self._view.seed, **self._view.knobs)
        first = preview.initial.probabilities
        labels = {i: token_label(self._model.tokenizer, i) for i in best_ids(first)}
        context = self._model.tokenizer.decode(self._ids[: row + 1])
        blocks: list[Block] = [
            Text(f"Softmax turns the logits into probabilities. After “{context}” the model expects:"),
            distribution("the model's own", labels, first),
        ]
        for stage in preview.stages[:-1]:
            setting = ", ".join(f"{value:g}" for name, value in stage.parameters.items() if name in self._view.knobs)
            blocks += [
                Text(f"{_STAGES.get(stage.stage, '')} {_kept(len(stage.kept), self._model.vocab_size)}".strip()),
                distribution(f"after {stage.stage.replace('_', '-')} = {setting}", labels, stage.probabilities),
            ]
        chosen = token_label(self._model.tokenizer, preview.chosen)
        share = percent_text(float(preview.stages[-1].probabilities[preview.chosen]))
        how = _CHOICES.get(preview.stages[-1].stage, "{stage} chooses {token} (chance {share}).").format(
            stage=preview.stages[-1].stage, seed=preview.seed, token=chosen, share=share
        )
        blocks.append(Text(f"{how} It is put behind the text, and everything begins again for the token after it."))
        return Chapter("Choosing the next token", blocks)

    # ---- loss -------------------------------------------------------------------------------------------------------

    def _next_ids(self) -> Sequence[int]:
        return [*self._ids[1:], *(sorted(self._model.eos_ids)[:1] if self._view.ends else ())]

    def _loss(self) -> Chapter:
        next_ids = np.array(self._next_ids())
        scored = prompt_logprobs(self._trace["logits"][: len(next_ids)], next_ids, 0)  # as `score` does it
        losses = [np.inf if one.logprob is None else -one.logprob for one in scored]
        rows = [
            [label, token_label(self._model.tokenizer, one.token_id), percent_text(float(np.exp(-loss))), f"{loss:.3f}"]
            for label, one, loss in zip(self._labels, scored, losses, strict=False)
        ]
        blocks: list[Block] = [
            Text(
                "Had this text been a lesson, how well would the model have done? For every token of the text: how "
                "likely did it find the one that really came next? The loss is minus the logarithm of that, 0 for "
                "certainty."
            ),
            Formula("loss = -log P(next token of the text)"),
            Table(["after", "next token", "P of it", "loss"], rows),
            Formula(f"mean loss = {np.mean(losses):.3f}"),
        ]
        return Chapter("Loss", blocks)

    def _ruled(self, rule: Rule, name: str) -> list[Block]:
        """Show how an intermediate is computed, and its numbers."""
        return [*_formula(rule), Matrix(rule.symbol, self._trace[name], self._labels)]


def _formula(rule: Rule) -> list[Block]:
    return [Formula(rule.formula)] if rule.formula else []


# How the last stage chose.
_CHOICES: Mapping[str, str] = MappingProxyType(
    {
        "categorical": (
            "One of these is drawn at random, by its probability. With the seed {seed} the draw gives {token} (chance "
            "{share})."
        ),
        "greedy": "The most likely one is taken, and nothing is left to chance: {token}.",
    }
)


_STAGES: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "Temperature divides the logits: below 1 the likely tokens gain, above 1 the unlikely ones.",
        "top_k": "Top-k keeps the k most likely tokens only.",
        "top_p": "Top-p keeps the most likely tokens that together reach a share of p.",
    }
)


def _kept(num_kept: int, vocab_size: int) -> str:
    if num_kept == vocab_size:
        return "All tokens stay in the draw."
    return f"{num_kept:,} of {vocab_size:,} tokens stay{'s' if num_kept == 1 else ''} in the draw."


def _check_range(field: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise InvalidRequestError.of(field, f"must be in [0, {count - 1}], got {value}")
