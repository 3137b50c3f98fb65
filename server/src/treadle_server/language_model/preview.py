"""Runs the sampling chain once and keeps what every stage made of the distribution."""

from __future__ import annotations

import queue
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from pydantic import PrivateAttr
from treadle_plugin_api import Logits, ModelInfo, SamplingContext, Select, finite, softmax64
from treadle_plugin_api.drawing import Draw, draw

from treadle_server.engine.chain import ChoiceSampler, ResolvedStage, SamplingChain, sample_rows
from treadle_server.engine.events import EngineEvent, is_over
from treadle_server.engine.request import GenerationRequest
from treadle_server.engine.sequence import ActiveRequest, Deliver
from treadle_server.engine.weights import LoadedAdapter
from treadle_server.errors import TreadleError
from treadle_server.language_model.presets import PRESETS
from treadle_server.language_model.spec import PreviewSpec, Prompt, SamplingPreview, StageResult
from treadle_server.language_model.validation import check_preview, check_preview_source, refuse
from treadle_server.plugins.registry import StageEntry, StageRegistry

# What ids may stand before the token when no model says how long its context is.
_MAX_TOKENS_WITHOUT_MODEL = 1 << 17
# Bytes of one kept token: its id and its probability.
_KEPT_BYTES = 16
# Largest size of all distributions of a preview together, in bytes.
MAX_PREVIEW_BYTES = 256 << 20


def bare_model_info(vocab_size: int) -> ModelInfo:
    """What stages see of a vocabulary that belongs to no model: tokens without bytes, and no tokenizer."""
    return ModelInfo(
        name="",
        vocab_size=vocab_size,
        context_length=_MAX_TOKENS_WITHOUT_MODEL,
        eos_ids=(),
        token_bytes=lambda token_id: b"",
        encode=_no_tokenizer,
    )


def _no_tokenizer(text: str) -> Sequence[int]:
    raise ValueError(f"the text {text!r:.80} needs a tokenizer; name a model whose vocabulary the logits have")


def preview_logits(
    spec: PreviewSpec, registry: StageRegistry, model_info: ModelInfo | None = None, drawer: Draw = draw
) -> SamplingPreview:
    """Run the chain of a spec on its own logits.

    Args:
        spec: has logits.
        registry: the stages there are.
        model_info: the model that the logits are of; None for a vocabulary of its own. Logits past the model's
            vocabulary are padding and cut.
        drawer: what draws the model's tokens.

    Raises:
        InvalidRequestError: with one violation for each wrong field.
        StageError: a stage failed.
    """
    check_preview_source(spec)
    logits = _checked_logits(spec)
    info = model_info or bare_model_info(len(logits))
    return ChainPreview(spec, registry, info, drawer).run(logits[: info.vocab_size])


class ChainPreview:
    """The chain of a preview, checked and built, before there are logits.

    Raises:
        InvalidRequestError: with one violation for each wrong field.
    """

    def __init__(self, spec: PreviewSpec, registry: StageRegistry, info: ModelInfo, drawer: Draw = draw) -> None:
        check_preview(spec, info.vocab_size, info.context_length)
        self._spec = spec
        self._drawer = drawer
        self._seed = secrets.randbits(63) if spec.seed is None else spec.seed
        self._chain = SamplingChain.resolve(
            registry,
            explicit=spec.knobs,
            defaults=PRESETS.get(spec.preset, {}),
            stages=spec.stages,
            order=spec.order or None,
            model_info=replace(info, eos_ids=frozenset(spec.eos_ids)),
        )

    def run(self, logits: Logits) -> SamplingPreview:
        """Run the chain on logits [vocab] float32.

        Raises:
            InvalidRequestError: the distributions of all stages are too large together.
            StageError: a stage failed.
            NonFiniteLogitsError: the logits hold NaN or +inf.
        """
        sampler = self._start()
        recorder = _Recorder()
        initial = recorder.take("logits", {}, logits)
        sample = sample_rows([sampler], logits[None], observe=recorder.observe, drawer=self._drawer)[0]
        if isinstance(sample, TreadleError):
            raise sample
        recorder.take_select(self._chain.stages[-1], cast("Logits", sample.processed))
        return SamplingPreview(
            initial=initial,
            stages=tuple(recorder.stages[1:]),
            chosen=sample.token_id,
            seed=self._seed,
            knobs=self._chain.knobs,
        )

    def _start(self) -> ChoiceSampler:
        """Return the choice at the token to be previewed: its stages have accepted the output so far."""
        spec = self._spec
        sampler = self._chain.begin(
            spec.prompt_ids, seed=self._seed, eos_ids=spec.eos_ids, stop_ids=spec.stop_token_ids, wants_processed=True
        )
        for token_id in spec.output_ids:
            sampler.accept(token_id)
        return sampler


def _checked_logits(spec: PreviewSpec) -> Logits:
    """Return the logits as float32 [vocab], the number type in which all chains run."""
    try:
        given = np.asarray(spec.logits)
    except ValueError:  # lists of different lengths in a list
        given = np.empty((0, 0))
    if given.ndim != 1 or given.dtype.kind not in "fiu" or not len(given):
        raise refuse("logits", "logits_shape", shape=list(given.shape), dtype=given.dtype)
    with np.errstate(over="ignore"):
        logits = given.astype(np.float32)
    wrong = np.flatnonzero(np.isnan(logits) | np.isposinf(logits) | (np.isneginf(logits) & np.isfinite(given)))
    if len(wrong):
        raise refuse(f"logits[{wrong[0]}]", "logit", value=given[wrong[0]])
    if not np.isfinite(logits.max()):
        raise refuse("logits", "logits_masked")
    return logits


class _Recorder:
    """Keeps the distributions of one run, up to a size.

    Attributes:
        stages: what was kept, in order.
    """

    def __init__(self) -> None:
        self.stages: list[StageResult] = []
        self._num_bytes = 0

    def observe(self, resolved: ResolvedStage, logits: Logits, seconds: float) -> None:
        """Keep the distribution after a stage; a select's comes from `take_select`, as what it draws from."""
        if not resolved.entry.is_select:
            self.take(resolved.name, resolved.stage.model_dump(), logits)

    def take_select(self, resolved: ResolvedStage, drawn_from: Logits) -> None:
        """Keep the distribution that the token was drawn from."""
        self.take(resolved.name, resolved.stage.model_dump(), drawn_from)

    def take(self, name: str, parameters: Mapping[str, object], logits: Logits) -> StageResult:
        """Keep one distribution, [vocab] float32 logits."""
        kept = finite(logits)
        self._num_bytes += _KEPT_BYTES * len(kept)
        if self._num_bytes > MAX_PREVIEW_BYTES:
            raise refuse("stages", "preview_size", value=self._num_bytes, limit=MAX_PREVIEW_BYTES)
        self.stages.append(
            StageResult(
                stage=name,
                parameters=parameters,
                kept=kept,
                kept_probabilities=softmax64(logits[kept]),
                vocab_size=len(logits),
            )
        )
        return self.stages[-1]


class _Capture(Select):
    """Keep the row of logits that the model made; which token is chosen does not matter."""

    name = "capture"

    _rows: list[Logits] = PrivateAttr(default_factory=list)

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> int:
        """Copy the row and choose any token that can be chosen."""
        self._rows.append(logits.copy())
        return int(logits.argmax())

    def first_row(self) -> Logits:
        """Return the row, [vocab] float32."""
        return self._rows[0]


def capture_chain(info: ModelInfo) -> tuple[SamplingChain, Callable[[], Logits]]:
    """Return a chain that keeps the first row it is run on, [vocab] float32, and a function that returns that row."""
    stage = _Capture()
    entry = StageEntry(cls=_Capture, plugin="treadle", distribution="treadle-server", version="", built_in=True)
    chain = SamplingChain((ResolvedStage.of(stage, entry),), {}, info)
    return chain, stage.first_row


@dataclass(frozen=True, slots=True)
class PendingPreview:
    """A preview whose logits the engine is computing.

    Attributes:
        active: the engine's request; its events tell when the logits are there.
        finish: runs the chain on them, once they are.
    """

    active: ActiveRequest
    finish: Callable[[], SamplingPreview]


class Previewer:
    """Previews with one model. May be called from any thread."""

    def __init__(
        self,
        registry: StageRegistry,
        info: ModelInfo,
        encode: Callable[[Prompt, int], list[int]],
        submit: Callable[[GenerationRequest, Deliver], ActiveRequest],
        padded_size: int,
        find_adapter: Callable[[str], LoadedAdapter | None],
        drawer: Draw,
    ) -> None:
        """Keep what a preview needs.

        Args:
            registry: the stages there are.
            info: the model, as stages see it.
            encode: returns the ids of a prompt, at most as many as told.
            submit: queues a request in the model's engine.
            padded_size: length of the model's rows of logits, padding included.
            find_adapter: returns an adapter by name.
            drawer: what draws the model's tokens.
        """
        self._registry = registry
        self._info = info
        self._encode = encode
        self._submit = submit
        self._padded_size = padded_size
        self._find_adapter = find_adapter
        self._drawer = drawer

    def preview(self, spec: PreviewSpec) -> SamplingPreview:
        """Return what a spec asks for, of a prompt or of logits that the model can have made.

        Raises:
            InvalidRequestError: with one violation for each wrong field.
            QueueFullError: too many requests wait.
            TreadleError: the request, or a stage, failed.
        """
        if spec.logits is not None:
            return self._preview_logits(spec)
        inbox: queue.SimpleQueue[list[EngineEvent]] = queue.SimpleQueue()
        pending = self.begin(spec, inbox.put)
        while not is_over(inbox.get()):
            pass
        return pending.finish()

    def _preview_logits(self, spec: PreviewSpec) -> SamplingPreview:
        num_logits = np.size(cast("Any", spec.logits))
        if not self.has_logits_of(num_logits):
            size = self._info.vocab_size
            raise refuse("logits", "logits_vocabulary", vocab_size=size, model=self._info.name, value=num_logits)
        return preview_logits(spec, self._registry, self._info, self._drawer)

    def has_logits_of(self, num_logits: int) -> bool:
        """Tell whether the model can have made a row of that many logits, with or without its padding."""
        return num_logits in (self._info.vocab_size, self._padded_size)

    def begin(self, spec: PreviewSpec, deliver: Deliver) -> PendingPreview:
        """Check the preview of a prompt, and queue it for the model's logits; the engine's events go to `deliver`."""
        check_preview_source(spec)
        prompt_ids = self._encode(cast("Prompt", spec.prompt), self._info.context_length - 1)
        preview = ChainPreview(replace(spec, prompt_ids=prompt_ids), self._registry, self._info, self._drawer)
        chain, row = capture_chain(self._info)
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_ids=np.array([*prompt_ids, *spec.output_ids], np.int64),
            chain=chain,
            seed=0,
            max_tokens=1,
            adapter=self._find_adapter(spec.adapter),
        )
        return PendingPreview(self._submit(request, deliver), lambda: preview.run(row()))
