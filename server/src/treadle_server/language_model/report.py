"""Tells the observers of requests how each generation starts and ends."""

from __future__ import annotations

from collections.abc import Collection

from treadle_plugin_api.observers import RequestInfo, RequestResult

from treadle_server.engine.events import FinishReason, Timings
from treadle_server.language_model.spec import FinishInfo, PromptInfo
from treadle_server.plugins.observers import Observers


class RequestReport:
    """One generation as observers see it: its start is told at once, its end at the first `close`."""

    def __init__(self, observers: Observers, info: PromptInfo, num_choices: int) -> None:
        self._observers = observers
        self._info = info
        self._reasons: dict[int, FinishReason] = {}
        self.timings = Timings(0.0, 0.0, 0.0)
        self._closed = False
        observers.started(lambda: _request_info(info, num_choices))

    def note(self, timings: Timings) -> None:
        """Note the durations up to a token or to the end of a choice."""
        self.timings = timings

    def choice_ended(self, finish: FinishInfo) -> None:
        """Note why a choice ended."""
        self._reasons[finish.index] = finish.reason

    def close(self, num_tokens: Collection[int], error: str = "") -> None:
        """Tell the end, once: choices that have not ended have failed with the error, or nobody wants them.

        num_tokens holds the number of tokens of each choice.
        """
        if self._closed:
            return
        self._closed = True
        self._observers.finished(lambda: self._result(num_tokens, error))

    def _result(self, num_tokens: Collection[int], error: str) -> RequestResult:
        ended = {index: reason.name.lower() for index, reason in self._reasons.items()}
        otherwise = "failed" if error else "cancelled"
        return RequestResult(
            request_id=self._info.request_id,
            model=self._info.model,
            reasons=tuple(ended.get(index, otherwise) for index in range(len(num_tokens))),
            error=error,
            num_prompt_tokens=len(self._info.prompt_ids),
            num_generated_tokens=sum(num_tokens),
            queue_s=self.timings.queue_s,
            prefill_s=self.timings.prefill_s,
            decode_s=self.timings.decode_s,
        )


def _request_info(info: PromptInfo, num_choices: int) -> RequestInfo:
    return RequestInfo(
        request_id=info.request_id,
        model=info.model,
        chain=tuple(stage.name for stage in info.chain),
        num_prompt_tokens=len(info.prompt_ids),
        num_choices=num_choices,
        max_tokens=info.max_tokens,
    )
