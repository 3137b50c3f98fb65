"""A loaded model: tokenizer, weights and engine behind one object, served by the server or held by a script."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
from treadle_plugin_api.backend import Batch
from treadle_plugin_api.drawing import draw

from treadle_server.checkpoints.store import ModelStore
from treadle_server.engine.engine import Engine
from treadle_server.engine.events import EngineEvent, TokenLogprob
from treadle_server.engine.request import GenerationRequest
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.engine.sequence import ActiveRequest, Deliver
from treadle_server.engine.speculation import DraftModel
from treadle_server.engine.weights import LoadedAdapter, deltas_of
from treadle_server.engine.worker import EngineWorker
from treadle_server.errors import VersionConflictError
from treadle_server.language_model.adapters import AdapterTable
from treadle_server.language_model.admission import Admission
from treadle_server.language_model.best_of import keep_best, widen
from treadle_server.language_model.generation import Generation, gather, prompt_info_of, read, read_scores
from treadle_server.language_model.keywords import preview_spec_of, spec_of
from treadle_server.language_model.loading import ModelLoader, OpenedModel
from treadle_server.language_model.preview import Previewer
from treadle_server.language_model.prompts import PromptEncoder
from treadle_server.language_model.report import RequestReport
from treadle_server.language_model.spec import (
    GenerationEvent,
    GenerationResult,
    GenerationSpec,
    Message,
    Prompt,
    SamplingPreview,
)
from treadle_server.language_model.trace import Trace, Tracer
from treadle_server.language_model.validation import (
    RequestLimits,
    check_best_of,
    check_label,
    check_lists,
    check_name,
)
from treadle_server.model.decoder import Activations, Decoder, DTypeName, Numerics, Quantised, make_backend
from treadle_server.plugins.manager import PluginManager
from treadle_server.tokenizer import Token

_T = TypeVar("_T")

# Tokenize takes texts longer than the context, within reason: somebody may want to know how much to cut.
_MAX_TOKENIZED_CONTEXTS = 8


class LanguageModel:
    """A model that generates and scores text.

    Attributes:
        name: the name that requests use.
        config: its architecture, the same for every version of its weights.
        vocab_size: number of tokens that can be given or generated.
        eos_ids: end-of-sequence tokens: the union of config.json, generation_config.json and the tokenizer.
        default_knobs: what unset sampling knobs take, from generation_config.json.
        previewer: runs sampling chains to be looked at; see `preview`.
    """

    def __init__(
        self,
        name: str,
        opened: OpenedModel,
        loader: ModelLoader,
        *,
        plugins: PluginManager,
        worker: EngineWorker,
        engine_limits: EngineLimits,
        request_limits: RequestLimits,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = opened.tokenizer
        self.config = opened.weights.decoder.config
        self.vocab_size = opened.vocab_size
        self.eos_ids = opened.eos_ids
        self.request_limits = request_limits
        self.engine = Engine(opened.weights, engine_limits, draft_model)
        self._loader = loader
        self._checkpoint = opened.checkpoint
        self._updating = threading.Lock()
        self._adapters = AdapterTable()
        self._registry = plugins.registry
        self._observers = plugins.observers
        self._worker = worker
        self._owned_worker: EngineWorker | None = None
        self._prompts = PromptEncoder(
            tokenizer=self.tokenizer, vocab_size=self.vocab_size, context_length=self.context_length
        )
        info = opened.describe(name)
        self._admission = Admission(
            info=info,
            prompts=self._prompts,
            registry=plugins.registry,
            adapters=self._adapters,
            engine=self.engine,
            limits=request_limits,
            generation_config=opened.checkpoint.generation_config,
        )
        self.default_knobs = self._admission.default_knobs
        self._tracer = Tracer(self.engine, request_limits, worker)
        self.previewer = Previewer(
            self._registry,
            info,
            self._prompts.encode,
            self._submit,
            self.config.vocab_size,
            self._adapters.find,
            self.decoder.backend.faster(draw),
        )
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
        quantize: Quantised | None = None,
        activations: Activations = "float32",
    ) -> LanguageModel:
        """Load a Hugging Face folder, or a stored or bundled model by name.

        Args:
            source: path of the folder, or a model's name.
            name: the name for requests; the folder's own when not given.
            backend: name of the compute backend; "numpy", a plugin's, or "auto" for the preferred one.
            dtype: number type of the arithmetic, float32 or float64.
            numerics: "fast", or "reproducible": a row's result then never depends on what else is in the batch.
            plugins: stages and model families of plugins; all installed ones when not given.
            worker: the engine thread to share with other models; one of its own when not given.
            engine_limits: what the engine may hold and do at once.
            request_limits: limits on one request.
            draft: a smaller model of the same vocabulary, to draft tokens for requests that want it.
            quantize: "int8" or "int4" rounds the large matrices to so many bits, of the draft model too; for a backend
                that multiplies with such numbers.
            activations: "bf16" rounds them before they meet a matrix in bfloat16, for prompts at twice the speed; for a
                backend that does.

        Raises:
            ModelNotFoundError: there is no such folder or name.
            CheckpointError: the folder is broken, or asks for what treadle does not have.
            ConfigError: there is no such backend, or it lacks the number type, or cannot be made on this machine.
        """
        folder = ModelStore().resolve(str(source))
        plugins = plugins or PluginManager.load()
        make = partial(make_backend, backend, dtype, numerics, plugins.backends.parts())
        loader = ModelLoader(
            families=plugins.families,
            backend=cache(partial(make, quantize=quantize, activations=activations)),
            dtype=dtype,
            numerics=numerics,
            quantize=quantize,
        )
        opened = loader.open(folder)
        drafting = None if draft is None else loader.open_draft(str(draft), opened.tokenizer)
        model = cls(
            name or folder.name.lower(),
            opened,
            loader,
            plugins=plugins,
            worker=worker or EngineWorker(),
            engine_limits=engine_limits or EngineLimits(),
            request_limits=request_limits or RequestLimits(),
            draft_model=drafting,
        )
        if worker is None:
            model._owned_worker = model._worker
        return model

    @property
    def context_length(self) -> int:
        """Largest number of tokens, prompt and answer together."""
        return self.config.context_length

    def kv_bytes_for(self, num_tokens: int) -> int:
        """Return the memory of the keys and values of that many tokens, in bytes."""
        return self.engine.kv_bytes_for(num_tokens)

    @property
    def decoder(self) -> Decoder:
        """What computes new requests."""
        return self.engine.weights.decoder

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return self.engine.weights.num_parameters

    @property
    def weight_version(self) -> int:
        """Version of the weights that new requests get; counts up from 1 with each update."""
        return self.engine.weights.version

    @property
    def weight_label(self) -> str:
        """The label given with those weights; empty for none."""
        return self.engine.weights.label

    @property
    def knob_names(self) -> tuple[str, ...]:
        """Names of the plain sampling knobs."""
        return tuple(self._registry.knobs)

    def update_weights(self, path: str | Path, *, label: str = "", expected_version: int | None = None) -> int:
        """Load another checkpoint of this model beside the one served, and swap them between two steps.

        Requests under way finish on the weights they began with, and both are in memory until then. Tokenizer, chat
        template and sampling defaults stay as they are, and so do adapters. Updates wait for each other.

        Args:
            path: folder of the checkpoint; its tokenizer.json may be missing.
            label: kept with the version, for people; 256 characters at most.
            expected_version: refuses the update unless this is the version now served.

        Returns:
            The version of the new weights.

        Raises:
            InvalidRequestError: the label is too long.
            VersionConflictError: another version than the expected one is served.
            CheckpointError: the checkpoint is broken, or of another architecture or vocabulary. The old one is served.
        """
        check_label(label)
        with self._updating:
            version = self.weight_version
            if expected_version is not None and expected_version != version:
                raise VersionConflictError(self.name, expected=expected_version, served=version)
            weights = self._loader.open_version(
                Path(path), version=version + 1, label=label, like=self.config, tokenizer=self.tokenizer
            )
            self.call(lambda: self.engine.update(weights)).result()
            return weights.version

    def load_adapter(self, name: str, path: str | Path) -> LoadedAdapter:
        """Serve an adapter under a name, in place of one that has it; requests under way keep the one they began with.

        Raises:
            InvalidRequestError: the name is not fit for one.
            CheckpointError: the folder holds no adapter for this model.
        """
        check_name("adapter", name)
        return self._adapters.put(self._loader.open_adapter(Path(path), name, self._checkpoint))

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more; requests under way keep it.

        Raises:
            AdapterNotFoundError: there is no such adapter.
        """
        self._adapters.remove(name)

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """The adapters that requests may name, by name."""
        return self._adapters.all()

    def start(self, spec: GenerationSpec, deliver: Deliver, *, request_id: str | None = None) -> Generation:
        """Check a request and queue it. Its events go to `deliver`, on the engine thread; see `Generation.taken`.

        Raises:
            InvalidRequestError: with one violation for each wrong field.
            ChatTemplateError: the chat template refuses the messages.
            QueueFullError: too many requests wait.
        """
        active = self._submit(self._admission.generation(spec, request_id), deliver)
        info = prompt_info_of(active, self.name)
        return Generation(active, spec, info, self.tokenizer, RequestReport(self._observers, info, spec.n))

    def _submit(self, request: GenerationRequest, deliver: Deliver) -> ActiveRequest:
        return self._worker.submit(self.engine, request, deliver)

    def stream(self, prompt: Prompt, **keywords: Any) -> Iterator[GenerationEvent]:
        """Generate, yielding events as they come: a PromptInfo, Deltas, and a FinishInfo for each choice.

        Closing the iterator stops the work; not reading it pauses the work, and for too long ends it. Keywords are the
        fields of GenerationSpec and the plain sampling knobs.

        Raises:
            TypeError: a keyword is unknown.
            TreadleError: see `start`; or the request failed under way.
        """
        return self.stream_spec(spec_of(prompt, self.knob_names, keywords))

    def stream_spec(self, spec: GenerationSpec) -> Iterator[GenerationEvent]:
        """Like `stream`, for a spec."""
        inbox: queue.SimpleQueue[list[EngineEvent]] = queue.SimpleQueue()
        generation = self.start(spec, inbox.put)
        return read(generation, inbox)

    def generate(self, prompt: Prompt, **keywords: Any) -> GenerationResult:
        """Generate and return everything at once; see `stream`. `best_of` works here only."""
        spec = spec_of(prompt, self.knob_names, keywords)
        check_best_of(spec, self.request_limits)
        return keep_best(gather(self.stream_spec(widen(spec))), spec)

    def begin_score(
        self,
        prompt: Prompt,
        deliver: Deliver,
        *,
        num_top_logprobs: int = 0,
        adapter: str = "",
        request_id: str | None = None,
    ) -> ActiveRequest:
        """Check a prompt and queue it for scoring: PromptScored events and a ChoiceFinished go to `deliver`."""
        request = self._admission.scoring(prompt, num_top_logprobs, adapter=adapter, request_id=request_id)
        return self._submit(request, deliver)

    def score(self, prompt: Prompt, *, num_top_logprobs: int = 0, adapter: str = "") -> tuple[TokenLogprob, ...]:
        """Return the model's own log-probability of every token of a prompt; the first has none."""
        inbox: queue.SimpleQueue[list[EngineEvent]] = queue.SimpleQueue()
        active = self.begin_score(prompt, inbox.put, num_top_logprobs=num_top_logprobs, adapter=adapter)
        return read_scores(active, inbox)

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
        return self._prompts.decode(token_ids, special_tokens=special_tokens, max_tokens=limit)

    def logits(self, token_ids: Sequence[int], *, adapter: str = "") -> npt.NDArray[np.floating]:
        """Return the logits after each of the tokens, [seq, vocab] in the model's dtype.

        Raises:
            InvalidRequestError: no tokens, too many, or one outside the vocabulary; or no such adapter.
        """
        ids = np.array(self._prompts.encode(token_ids, self.context_length), np.int64)
        batch = Batch.of([ids], adapters=[deltas_of(self._adapters.find(adapter))])
        compute = lambda: self.decoder.head(self.decoder.forward(batch))  # noqa: E731 - on the engine thread
        return cast("npt.NDArray[np.floating]", self.call(compute).result())

    def trace(
        self,
        prompt: Prompt,
        *,
        layers: Sequence[int] | None = None,
        what: str | Sequence[str] | None = None,
        adapter: str = "",
    ) -> Trace:
        """Run one pass over a prompt and return its named intermediates, all of them or those asked for.

        Args:
            prompt: a text, token ids, or messages.
            layers: the layers to show, from 0; all when None or empty. What is outside all layers is not affected.
            what: name or names to show; all when None or empty. A name stands for every intermediate that has it as
                whole dotted parts: `logits`, `attention`, `attention.weights`, `q`, `layers.3`; `*` is any text.
            adapter: name of a loaded adapter; empty for the bare model.

        Raises:
            InvalidRequestError: with one violation for each wrong field; also when what is asked for is too large.
        """
        names = (what,) if isinstance(what, str) else () if what is None else what
        return self.begin_trace(prompt, layers=() if layers is None else layers, what=names, adapter=adapter).result()

    def begin_trace(
        self, prompt: Prompt, *, layers: Sequence[int], what: Sequence[str], adapter: str = ""
    ) -> Future[Trace]:
        """Check a trace and queue it for the engine thread; see `trace`."""
        check_lists(layers=layers, what=what)
        token_ids = self._prompts.encode(prompt, self.context_length)
        return self._tracer.begin(token_ids, layers, what, self._adapters.find(adapter))

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
