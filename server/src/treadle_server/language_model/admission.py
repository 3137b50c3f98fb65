"""Checks what is asked of a model and turns it into a request for the engine."""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Mapping, Sequence

import numpy as np
from treadle_plugin_api import ModelInfo

from treadle_server.engine.chain import SamplingChain
from treadle_server.engine.engine import Engine
from treadle_server.engine.guidance import Guidance
from treadle_server.engine.request import GenerationRequest
from treadle_server.engine.speculation import Speculation
from treadle_server.errors import InvalidRequestError
from treadle_server.language_model.adapters import AdapterTable
from treadle_server.language_model.presets import PRESETS
from treadle_server.language_model.prompts import PromptEncoder
from treadle_server.language_model.spec import GenerationSpec, Prompt
from treadle_server.language_model.validation import (
    RequestLimits,
    check_spec,
    check_top_logprobs,
    is_finite_number,
    refuse,
    renamed_field,
)
from treadle_server.model.kv_cache import BLOCK_TOKENS
from treadle_server.plugins.registry import StageRegistry

_LOG = logging.getLogger(__name__)

# Tokens drafted for a step when a request does not say: more are seldom all right, and cost a wider step.
_DRAFT_TOKENS = 5


class Admission:
    """Makes the requests of one model. May be used from any thread.

    Attributes:
        default_knobs: what unset knobs take: the settings of generation_config.json that are numbers and legal.
    """

    def __init__(
        self,
        *,
        info: ModelInfo,
        prompts: PromptEncoder,
        registry: StageRegistry,
        adapters: AdapterTable,
        engine: Engine,
        limits: RequestLimits,
        generation_config: Mapping[str, object],
    ) -> None:
        self._info = info
        self._prompts = prompts
        self._registry = registry
        self._adapters = adapters
        self._engine = engine
        self._limits = limits
        self.default_knobs = self._sound_defaults(generation_config)

    def _sound_defaults(self, generation_config: Mapping[str, object]) -> dict[str, object]:
        """Return the sampling settings of generation_config.json that are numbers and legal; do_sample is ignored."""
        sound: dict[str, object] = {}
        for knob in tuple(self._registry.knobs):
            value = generation_config.get(knob)
            if not is_finite_number(value):
                continue
            try:
                self._chain(GenerationSpec(prompt=(), use_model_defaults=False, knobs={knob: value}), {})
            except InvalidRequestError as error:
                _LOG.warning("model %s: generation_config.json is wrong and ignored: %s", self._info.name, error)
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
            model_info=self._info,
        )

    def _defaults_for(self, spec: GenerationSpec) -> dict[str, object]:
        """Return what unset knobs take: the preset's values, then the model's own."""
        model_defaults = self.default_knobs if spec.use_model_defaults else {}
        return {**model_defaults, **PRESETS.get(spec.preset, {})}

    def generation(self, spec: GenerationSpec, request_id: str | None = None) -> GenerationRequest:
        """Return the request for a spec.

        Raises:
            InvalidRequestError: with one violation for each wrong field.
            ChatTemplateError: the chat template refuses the messages.
        """
        check_spec(spec, self._limits, self._info.vocab_size)
        if spec.speculation is Speculation.DRAFT_MODEL and self._engine.draft_model is None:
            raise refuse("speculation", "no_draft_model")
        chain = self._chain(spec, self._defaults_for(spec))
        # One place is left for the first token of the answer.
        prompt_ids = self._prompts.encode(spec.prompt, self._info.context_length - 1)
        guidance = self._guidance(spec, prompt_ids)
        lanes = [len(prompt_ids)] if guidance is None else [len(prompt_ids), len(guidance.negative_ids)]
        room = self._room(spec, lanes)
        return GenerationRequest(
            request_id=request_id or uuid.uuid4().hex,
            prompt_ids=np.array(prompt_ids, np.int64),
            chain=chain,
            seed=secrets.randbits(63) if spec.seed is None else spec.seed,
            n=spec.n,
            max_tokens=room if spec.max_tokens is None else min(spec.max_tokens, room),
            truncated=spec.max_tokens is None or spec.max_tokens > room,
            min_tokens=spec.min_tokens,
            eos_ids=frozenset() if spec.ignore_eos else frozenset(self._info.eos_ids),
            stop_ids=frozenset(spec.stop_token_ids),
            logprobs=spec.logprobs,
            num_top_logprobs=spec.num_top_logprobs,
            prompt_logprobs=spec.prompt_logprobs,
            guidance=guidance,
            speculation=spec.speculation,
            max_draft_tokens=_DRAFT_TOKENS if spec.num_draft_tokens is None else spec.num_draft_tokens,
            priority=spec.priority,
            adapter=self._adapters.find(spec.adapter),
        )

    def scoring(
        self, prompt: Prompt, num_top_logprobs: int, *, adapter: str, request_id: str | None = None
    ) -> GenerationRequest:
        """Return the request that scores a prompt and generates nothing; errors as for `generation`."""
        check_top_logprobs(num_top_logprobs, self._limits)
        return GenerationRequest(
            request_id=request_id or uuid.uuid4().hex,
            prompt_ids=np.array(self._prompts.encode(prompt, self._info.context_length), np.int64),
            chain=self._chain(GenerationSpec(prompt=prompt), {}),
            seed=0,
            max_tokens=0,
            prompt_logprobs=True,
            num_top_logprobs=num_top_logprobs,
            adapter=self._adapters.find(adapter),
        )

    def _guidance(self, spec: GenerationSpec, prompt_ids: Sequence[int]) -> Guidance | None:
        """Return what a request is turned away from: the negative prompt, or else the prompt's last token alone."""
        if spec.guidance_scale == 1:
            return None
        negative = list(prompt_ids[-1:])
        if spec.negative_prompt is not None:
            with renamed_field("prompt", "negative_prompt"):
                negative = self._prompts.encode(spec.negative_prompt, self._info.context_length - 1)
        return Guidance(float(spec.guidance_scale), np.array(negative, np.int64))

    def _room(self, spec: GenerationSpec, lanes: Sequence[int]) -> int:
        """Return how many tokens can follow prompts of these lengths, one for each lane.

        The context limits it, and the memory for keys and values, a draft model's included.
        """
        limit = self._engine.scheduler.limits.max_kv_bytes
        block = len(lanes) * self._engine.kv_bytes_for(BLOCK_TOKENS)
        if spec.speculation is Speculation.DRAFT_MODEL and self._engine.draft_model is not None:
            block += self._engine.draft_model.kv_bytes_for(BLOCK_TOKENS)
        whole = min(self._info.context_length, limit // block * BLOCK_TOKENS)
        if whole <= max(lanes):
            needed = (max(lanes) // BLOCK_TOKENS + 1) * block
            raise refuse("prompt", "kv_memory", value=needed, tokens=max(lanes), limit=limit)
        return whole - max(lanes)
