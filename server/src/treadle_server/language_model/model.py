"""A loaded model: tokenizer, decoder and engine behind one object, served by the server or held by a script."""

from __future__ import annotations

import logging
import math
import queue
import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
from treadle_plugin_api import ModelInfo
from treadle_plugin_api.backend import Batch

from treadle_server.checkpoints.loading import Checkpoint, load_checkpoint
from treadle_server.checkpoints.store import ModelStore
from treadle_server.engine.chain import SamplingChain, StageSpec
from treadle_server.engine.engine import Engine
from treadle_server.engine.events import EngineEvent, PromptScored, RequestFailed, TokenLogprob
from treadle_server.engine.guidance import Guidance
from treadle_server.engine.request import GenerationRequest
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.engine.sequence import ActiveRequest, Deliver
from treadle_server.engine.speculation import DraftModel, Speculation
from treadle_server.engine.worker import EngineWorker
from treadle_server.errors import CheckpointError, InvalidRequestError
from treadle_server.language_model.best_of import keep_best, widen
from treadle_server.language_model.generation import Generation, gather
from treadle_server.language_model.keywords import preview_spec_of, spec_of
from treadle_server.language_model.presets import PRESETS
from treadle_server.language_model.preview import Previewer
from treadle_server.language_model.prompts import PromptEncoder
from treadle_server.language_model.report import RequestReport
from treadle_server.language_model.spec import (
    GenerationEvent,
    GenerationResult,
    GenerationSpec,
    Message,
    Prompt,
    PromptInfo,
    SamplingPreview,
)
from treadle_server.language_model.trace import Trace, Tracer
from treadle_server.language_model.validation import (
    RequestLimits,
    check_best_of,
    check_lists,
    check_spec,
    check_top_logprobs,
    is_finite_number,
    refuse,
    renamed_field,
    token_id_violations,
)
from treadle_server.model.decoder import Decoder, DTypeName, Numerics
from treadle_server.model.families.registry import FamilyRegistry
from treadle_server.model.kv_cache import BLOCK_TOKENS, KVCache
from treadle_server.plugins.manager import PluginManager
from treadle_server.tokenizer import Token, Tokenizer

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)

# Tokenize takes texts longer than the context, within reason: somebody may want to know how much to cut.
_MAX_TOKENIZED_CONTEXTS = 8
# Tokens drafted for a step when a request does not say: more are seldom all right, and cost a wider step.
_DRAFT_TOKENS = 5


class LanguageModel:
    """A model that generates and scores text.

    Attributes:
        name: the name that requests use.
        vocab_size: number of tokens that can be given or generated.
        context_length: largest number of tokens, prompt and answer together.
        eos_ids: end-of-sequence tokens: the union of config.json, generation_config.json and the tokenizer.
        previewer: runs sampling chains to be looked at; see `preview`.
        weight_version: counts up from 1 with each update of the weights.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        decoder: Decoder,
        *,
        plugins: PluginManager,
        worker: EngineWorker,
        engine_limits: EngineLimits,
        request_limits: RequestLimits,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.config = decoder.config
        self.weight_version = 1
        self.num_parameters = sum(math.prod(weight.shape) for weight in checkpoint.params.values())
        self.vocab_size = min(tokenizer.vocab_size, self.config.vocab_size)
        self.eos_ids = _eos_ids(checkpoint, tokenizer, self.vocab_size)
        self.request_limits = request_limits
        self._prompts = PromptEncoder(
            tokenizer=tokenizer, vocab_size=self.vocab_size, context_length=self.config.context_length
        )
        self.engine = Engine(decoder, engine_limits, draft_model)
        self._tracer = Tracer(decoder, request_limits, worker.call)
        self._registry = plugins.registry
        self._observers = plugins.observers
        self._worker = worker
        self._owned_worker: EngineWorker | None = None
        self._model_info = ModelInfo(
            name=name,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            eos_ids=self.eos_ids,
            token_bytes=tokenizer.token_bytes,
            encode=partial(tokenizer.encode, add_special_tokens=False),
            special_ids=frozenset(filter(tokenizer.is_special, range(self.vocab_size))),
            text_is_bytes=tokenizer.text_is_bytes,
        )
        self.previewer = Previewer(
            self._registry, self._model_info, self._encode, partial(worker.submit, self.engine), self.config.vocab_size
        )
        self.default_knobs = self._sound_defaults(checkpoint.generation_config)
        worker.add(self.engine)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        name: str | None = None,
        backend: str = "auto",
        dtype: DTypeName = "float32",
        numerics: Numerics = "fast",
        plugins: PluginManager | None = None,
        worker: EngineWorker | None = None,
        engine_limits: EngineLimits | None = None,
        request_limits: RequestLimits | None = None,
        draft: str | Path | None = None,
    ) -> LanguageModel:
        """Load a Hugging Face folder, or a stored or bundled model by name.

        Args:
            source: path of the folder, or a model's name.
            name: the name for requests; the folder's own when not given.
            backend: name of the compute backend; "auto" takes the fastest one installed.
            dtype: number type of the arithmetic, float32 or float64.
            numerics: "fast", or "reproducible": a row's result then never depends on what else is in the batch.
            plugins: stages and model families of plugins; all installed ones when not given.
            worker: the engine thread to share with other models; one of its own when not given.
            engine_limits: what the engine may hold and do at once.
            request_limits: limits on one request.
            draft: a smaller model of the same vocabulary, to draft tokens for requests that want it.

        Raises:
            ModelNotFoundError: there is no such folder or name.
            CheckpointError: the folder is broken, or asks for what treadle does not have.
        """
        folder = ModelStore().resolve(str(source))
        plugins = plugins or PluginManager.load()
        checkpoint = load_checkpoint(folder, plugins.families)
        try:
            tokenizer = Tokenizer.load(folder)
            drafting = None
            if draft is not None:
                drafting = _load_draft(str(draft), tokenizer, plugins.families, dtype=dtype, numerics=numerics)
            model = cls(
                name or folder.name.lower(),
                checkpoint,
                tokenizer,
                Decoder(checkpoint.config, checkpoint.params, backend=backend, dtype=dtype, numerics=numerics),
                plugins=plugins,
                worker=worker or EngineWorker(),
                engine_limits=engine_limits or EngineLimits(),
                request_limits=request_limits or RequestLimits(),
                draft_model=drafting,
            )
        finally:
            checkpoint.close()
        if worker is None:
            model._owned_worker = model._worker
        return model

    @property
    def context_length(self) -> int:
        """Largest number of tokens, prompt and answer together."""
        return self.config.context_length

    def kv_bytes_for(self, num_tokens: int) -> int:
        """Return the memory of the keys and values of that many tokens, in bytes."""
        return KVCache.bytes_for(self.config, self.decoder.dtype, num_tokens)

    @property
    def knob_names(self) -> tuple[str, ...]:
        """Names of the plain sampling knobs."""
        return tuple(self._registry.knobs)

    def _sound_defaults(self, generation_config: Mapping[str, Any]) -> dict[str, object]:
        """Return the sampling settings of generation_config.json that are numbers and legal; do_sample is ignored."""
        sound: dict[str, object] = {}
        for knob in tuple(self._registry.knobs):
            value = generation_config.get(knob)
            if not is_finite_number(value):
                continue
            try:
                self._chain(GenerationSpec(prompt=(), use_model_defaults=False, knobs={knob: value}), {})
            except InvalidRequestError as error:
                _LOG.warning("model %s: generation_config.json is ignored where it is wrong: %s", self.name, error)
            else:
                sound[knob] = value
        return sound

    def _chain(self, spec: GenerationSpec, defaults: Mapping[str, object]) -> SamplingChain:
        explicit = dict(spec.knobs)
        if spec.min_tokens:
            explicit["min_tokens"] = spec.min_tokens
        return SamplingChain.resolve(
            self._registry,
            explicit=explicit,
            defaults=defaults,
            stages=spec.stages,
            order=spec.order or None,
            model_info=self._model_info,
        )

    def _defaults_for(self, spec: GenerationSpec) -> dict[str, object]:
        """Return what unset knobs take: the preset's values, then the model's own."""
        model_defaults = self.default_knobs if spec.use_model_defaults else {}
        return {**model_defaults, **PRESETS.get(spec.preset, {})}

    def start(self, spec: GenerationSpec, deliver: Deliver, *, request_id: str | None = None) -> Generation:
        """Check a request and queue it. Its engine events go to `deliver`, on the engine thread.

        Raises:
            InvalidRequestError: with one violation for each wrong field.
            ChatTemplateError: the chat template refuses the messages.
            QueueFullError: too many requests wait.
        """
        check_spec(spec, self.request_limits, self.vocab_size)
        if spec.speculation is Speculation.DRAFT_MODEL and self.engine.draft_model is None:
            raise refuse("speculation", "no_draft_model")
        chain = self._chain(spec, self._defaults_for(spec))
        # One place is left for the first token of the answer.
        prompt_ids = self._encode(spec.prompt, self.context_length - 1)
        guidance = self._guidance(spec, prompt_ids)
        lanes = [len(prompt_ids)] if guidance is None else [len(prompt_ids), len(guidance.negative_ids)]
        room = self._room(spec, lanes)
        max_tokens = room if spec.max_tokens is None else min(spec.max_tokens, room)
        request = GenerationRequest(
            request_id=request_id or uuid.uuid4().hex,
            prompt_ids=np.array(prompt_ids, np.int64),
            chain=chain,
            seed=secrets.randbits(63) if spec.seed is None else spec.seed,
            n=spec.n,
            max_tokens=max_tokens,
            truncated=spec.max_tokens is None or spec.max_tokens > room,
            min_tokens=spec.min_tokens,
            eos_ids=frozenset() if spec.ignore_eos else self.eos_ids,
            stop_ids=frozenset(spec.stop_token_ids),
            logprobs=spec.logprobs,
            num_top_logprobs=spec.num_top_logprobs,
            prompt_logprobs=spec.prompt_logprobs,
            guidance=guidance,
            speculation=spec.speculation,
            max_draft_tokens=_DRAFT_TOKENS if spec.num_draft_tokens is None else spec.num_draft_tokens,
        )
        active = self._worker.submit(self.engine, request, deliver)
        info = self._prompt_info(request)
        return Generation(active, spec, info, self.tokenizer, RequestReport(self._observers, info, spec.n))

    def _guidance(self, spec: GenerationSpec, prompt_ids: Sequence[int]) -> Guidance | None:
        """Return what a request is turned away from: the negative prompt, or else the prompt's last token alone."""
        if spec.guidance_scale == 1:
            return None
        negative = list(prompt_ids[-1:])
        if spec.negative_prompt is not None:
            with renamed_field("prompt", "negative_prompt"):
                negative = self._encode(spec.negative_prompt, self.context_length - 1)
        return Guidance(float(spec.guidance_scale), np.array(negative, np.int64))

    def _encode(self, prompt: Prompt, max_tokens: int) -> list[int]:
        return self._prompts.encode(prompt, max_tokens)

    def _room(self, spec: GenerationSpec, lanes: Sequence[int]) -> int:
        """Return how many tokens can follow prompts of these lengths, one for each lane.

        The context limits it, and the memory for keys and values, a draft model's included.
        """
        limit = self.engine.scheduler.limits.max_kv_bytes
        block = len(lanes) * self.kv_bytes_for(BLOCK_TOKENS)
        if spec.speculation is Speculation.DRAFT_MODEL and self.engine.draft_model is not None:
            block += self.engine.draft_model.kv_bytes_for(BLOCK_TOKENS)
        whole = min(self.context_length, limit // block * BLOCK_TOKENS)
        if whole <= max(lanes):
            needed = (max(lanes) // BLOCK_TOKENS + 1) * block
            raise refuse("prompt", "kv_memory", value=needed, tokens=max(lanes), limit=limit)
        return whole - max(lanes)

    def _prompt_info(self, request: GenerationRequest) -> PromptInfo:
        return PromptInfo(
            request_id=request.request_id,
            model=self.name,
            weight_version=self.weight_version,
            prompt_ids=tuple(request.prompt_ids.tolist()),
            max_tokens=request.max_tokens,
            seed=request.seed,
            knobs=request.chain.knobs,
            chain=tuple(StageSpec(s.name, s.stage.model_dump()) for s in request.chain.stages),
        )

    def stream(self, prompt: Prompt, **keywords: Any) -> Iterator[GenerationEvent]:
        """Generate, yielding events as they come: a PromptInfo, Deltas, and a FinishInfo for each choice.

        Closing the iterator stops the work. Keywords are the fields of GenerationSpec and the plain sampling knobs.

        Raises:
            TypeError: a keyword is unknown.
            TreadleError: see `start`; or the request failed under way.
        """
        return self.stream_spec(spec_of(prompt, self.knob_names, keywords))

    def stream_spec(self, spec: GenerationSpec) -> Iterator[GenerationEvent]:
        """Like `stream`, for a spec."""
        inbox: queue.SimpleQueue[list[EngineEvent]] = queue.SimpleQueue()
        generation = self.start(spec, inbox.put)
        return _read(generation, inbox)

    def generate(self, prompt: Prompt, **keywords: Any) -> GenerationResult:
        """Generate and return everything at once; see `stream`. `best_of` works here only."""
        spec = spec_of(prompt, self.knob_names, keywords)
        check_best_of(spec, self.request_limits)
        return keep_best(gather(self.stream_spec(widen(spec))), spec)

    def begin_score(self, prompt: Prompt, deliver: Deliver, *, num_top_logprobs: int = 0) -> ActiveRequest:
        """Check a prompt and queue it for scoring: PromptScored events and a ChoiceFinished go to `deliver`."""
        check_top_logprobs(num_top_logprobs, self.request_limits)
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_ids=np.array(self._encode(prompt, self.context_length), np.int64),
            chain=self._chain(GenerationSpec(prompt=prompt), {}),
            seed=0,
            max_tokens=0,
            prompt_logprobs=True,
            num_top_logprobs=num_top_logprobs,
        )
        return self._worker.submit(self.engine, request, deliver)

    def score(self, prompt: Prompt, *, num_top_logprobs: int = 0) -> tuple[TokenLogprob, ...]:
        """Return the model's own log-probability of every token of a prompt; the first has none."""
        inbox: queue.SimpleQueue[list[EngineEvent]] = queue.SimpleQueue()
        self.begin_score(prompt, inbox.put, num_top_logprobs=num_top_logprobs)
        scored: list[TokenLogprob] = []
        while True:
            for event in inbox.get():
                if isinstance(event, RequestFailed):
                    raise event.error
                if not isinstance(event, PromptScored):
                    return tuple(scored)
                scored += event.logprobs

    def tokenize(self, prompt: str | Sequence[Message], *, add_special_tokens: bool = True) -> list[Token]:
        """Return the tokens of a text with their places in it, or those of messages in their rendered text."""
        limit = _MAX_TOKENIZED_CONTEXTS * self.context_length
        return self._prompts.tokenize(prompt, add_special_tokens=add_special_tokens, max_tokens=limit)

    def detokenize(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequestError: an id is outside the vocabulary, or there are too many.
        """
        limit = _MAX_TOKENIZED_CONTEXTS * self.context_length
        if len(token_ids) > limit:
            raise refuse("token_ids", "too_many", limit=limit, value=len(token_ids))
        violations = list(token_id_violations("token_ids", token_ids, self.vocab_size))
        if violations:
            raise InvalidRequestError(violations)
        return self.tokenizer.decode(token_ids, skip_special_tokens=not special_tokens)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.floating]:
        """Return the logits after each of the tokens, [seq, vocab] in the model's dtype.

        Raises:
            InvalidRequestError: no tokens, too many, or one outside the vocabulary.
        """
        ids = np.array(self._encode(token_ids, self.context_length), np.int64)
        compute = lambda: self.decoder.head(self.decoder.forward(Batch.of([ids])))  # noqa: E731
        return cast("npt.NDArray[np.floating]", self.call(compute).result())

    def trace(
        self, prompt: Prompt, *, layers: Sequence[int] | None = None, what: str | Sequence[str] | None = None
    ) -> Trace:
        """Run one pass over a prompt and return its named intermediates, all of them or those asked for.

        Args:
            prompt: a text, token ids, or messages.
            layers: the layers to show, from 0; all when None or empty. What is outside all layers is not affected.
            what: name or names to show; all when None or empty. A name stands for every intermediate that has it as
                whole dotted parts: `logits`, `attention`, `attention.weights`, `q`, `layers.3`; `*` is any text.

        Raises:
            InvalidRequestError: with one violation for each wrong field; also when what is asked for is too large.
        """
        names = (what,) if isinstance(what, str) else () if what is None else what
        return self.begin_trace(prompt, layers=() if layers is None else layers, what=names).result()

    def begin_trace(self, prompt: Prompt, *, layers: Sequence[int], what: Sequence[str]) -> Future[Trace]:
        """Check a trace and queue it for the engine thread; see `trace`."""
        check_lists(layers=layers, what=what)
        return self._tracer.begin(self._encode(prompt, self.context_length), layers, what)

    def preview(self, prompt: Prompt | None = None, **keywords: Any) -> SamplingPreview:
        """Return what every stage of a chain makes of the next token's distribution, and which token is chosen.

        Keywords are the fields of PreviewSpec and the plain sampling knobs; no defaults of the model come in.

        Raises:
            TypeError: a keyword is unknown.
            TreadleError: see `Previewer.preview`.
        """
        spec = preview_spec_of(prompt, self.knob_names, keywords)
        check_lists(**{name: getattr(spec, name) for name in ("prompt_ids", "output_ids", "eos_ids", "stop_token_ids")})
        return self.previewer.preview(spec)

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function on the engine thread, where the decoder lives, between two steps."""
        return self._worker.call(function)

    def close(self) -> None:
        """End what is under way and free the model."""
        self._worker.remove(self.engine)
        if self._owned_worker is not None:
            self._owned_worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(generation: Generation, inbox: queue.SimpleQueue[list[EngineEvent]]) -> Iterator[GenerationEvent]:
    try:
        yield from generation.start()
        while not generation.finished:
            yield from generation.feed(inbox.get())
    finally:
        generation.cancel()


def _load_draft(
    source: str, tokenizer: Tokenizer, families: FamilyRegistry, *, dtype: DTypeName, numerics: Numerics
) -> DraftModel:
    """Load a draft model; CheckpointError unless its tokens are those of the model it drafts for."""
    folder = ModelStore().resolve(source)
    drafting = Tokenizer.load(folder)
    size = min(drafting.vocab_size, tokenizer.vocab_size)
    if any(drafting.token_bytes(i) != tokenizer.token_bytes(i) for i in range(size)):
        raise CheckpointError(f"{folder}: its tokens are not those of the model that it is to draft for")
    with load_checkpoint(folder, families) as checkpoint:
        decoder = Decoder(checkpoint.config, checkpoint.params, dtype=dtype, numerics=numerics)
    return DraftModel(decoder, min(size, decoder.config.vocab_size))


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
    """Return the union of the end-of-sequence tokens that config, generation config and tokenizer name."""
    ids = set(tokenizer.eos_token_ids)
    for config in (checkpoint.hf_config, checkpoint.generation_config):
        value = config.get("eos_token_id")
        found = value if isinstance(value, list) else [value]
        ids.update(i for i in found if isinstance(i, int) and not isinstance(i, bool))
    outside = sorted(i for i in ids if not 0 <= i < vocab_size)
    if outside:
        _LOG.warning("end-of-sequence tokens outside the vocabulary are ignored: %s", str(outside)[:200])
    return frozenset(ids.difference(outside))
