"""The sampling chain of a request: resolved once, at admission, then run for every token of every choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from treadle_plugin_api import ModelInfo, SamplingContext
from treadle_plugin_api.logits import Ids

from treadle_server.engine.chain_resolution import ChainResolver
from treadle_server.engine.chain_run import BufferPool, ChoiceSampler, Sample, StageObserver, sample_rows
from treadle_server.engine.chain_stages import ResolvedStage, StageSpec
from treadle_server.plugins.registry import StageRegistry

__all__ = [
    "BufferPool",
    "ChoiceSampler",
    "ResolvedStage",
    "Sample",
    "SamplingChain",
    "StageObserver",
    "StageSpec",
    "sample_rows",
]


@dataclass(frozen=True, slots=True)
class SamplingChain:
    """The stages of a request in the order in which they run; the last one is the select.

    Attributes:
        stages: what runs; stages that greedy makes idle are already left out.
        knobs: the value in force of every plain knob.
        model_info: the model the request is for.
    """

    stages: tuple[ResolvedStage, ...]
    knobs: Mapping[str, object]
    model_info: ModelInfo

    @classmethod
    def resolve(
        cls,
        registry: StageRegistry,
        *,
        explicit: Mapping[str, object],
        defaults: Mapping[str, object],
        stages: Sequence[StageSpec] = (),
        order: Sequence[str] | None = None,
        model_info: ModelInfo,
    ) -> SamplingChain:
        """Build the chain of a request.

        Args:
            registry: the stages there are.
            explicit: plain knobs that the request sets.
            defaults: plain knobs of its preset or the model; entries that are no knobs are passed over.
            stages: stages that the request names.
            order: names of all stages in the order in which they run; the default order if None.
            model_info: what the stages' own checks see.

        Raises:
            InvalidRequestError: with a violation for each wrong field.
            StageError: a stage's check or validator failed.
        """
        resolver = ChainResolver(registry, explicit, defaults, stages, order, model_info)
        return cls(*resolver.resolve(), model_info)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.stages[-1].entry.built_in and self.stages[-1].name == "greedy"

    def begin(
        self,
        prompt_ids: Sequence[int] | Ids,
        *,
        seed: int,
        choice: int = 0,
        eos_ids: Iterable[int] = (),
        stop_ids: Iterable[int] = (),
        wants_processed: bool = False,
    ) -> ChoiceSampler:
        """Start a choice of the request; StageError if a stage fails to start."""
        context = SamplingContext(
            vocab_size=self.model_info.vocab_size,
            prompt_ids=prompt_ids,
            eos_ids=eos_ids,
            stop_ids=stop_ids,
            token_bytes=self.model_info.token_bytes,
            seed=seed,
            choice_index=choice,
        )
        states = [resolved.start(context) for resolved in self.stages]
        return ChoiceSampler(self.stages, context, wants_processed, states)
