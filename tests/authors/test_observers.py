"""Observers of requests: told once of each, whatever becomes of it, and never able to hurt it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from treadle_plugin_api import RequestInfo, RequestResult, Stage, hookimpl
from treadle_server.errors import InvalidRequestError, StageError
from treadle_server.language_model import LanguageModel
from treadle_server.plugins import PluginManager
from treadle_server.plugins.discovery import PluginSource, installed_sources


class Failing(Stage):
    """Fail at the third token."""

    name = "failing"
    kind = "mask"

    def apply(self, logits, context, state=None):
        """Fail in time."""
        if context.num_outputs == 2:
            raise RuntimeError("enough")
        return logits


class Watcher:
    """A plugin that writes down what it is told."""

    def __init__(self) -> None:
        self.started: list[RequestInfo] = []
        self.finished: list[RequestResult] = []

    @hookimpl
    def treadle_register_stages(self, register):
        """Bring a stage that fails."""
        register(Failing)

    @hookimpl
    def treadle_request_started(self, request):
        """Write it down."""
        self.started.append(request)

    @hookimpl
    def treadle_request_finished(self, result):
        """Write it down."""
        self.finished.append(result)


class Observed:
    """A model with a watcher."""

    def __init__(self, folder: Path, *plugins: object) -> None:
        self.watcher = Watcher()
        built_in = [source for source in installed_sources() if source.built_in]
        sources = [_source(f"p{i}", plugin) for i, plugin in enumerate((*plugins, self.watcher))]
        self.plugins = PluginManager([*built_in, *sources], strict=True)
        self.model = LanguageModel.load(folder, name="tiny", plugins=self.plugins)

    def seen(self) -> tuple[list[RequestInfo], list[RequestResult]]:
        """All that was told so far."""
        self.plugins.observers.wait()
        return self.watcher.started, self.watcher.finished


def _source(name: str, plugin: object) -> PluginSource:
    return PluginSource(name, name, "", lambda: plugin)


@pytest.fixture
def observe(tiny_folder: Path):
    """Make an observed model, beside other plugins."""
    made: list[Observed] = []

    def make(*plugins: object) -> Observed:
        made.append(Observed(tiny_folder, *plugins))
        return made[-1]

    yield make
    for one in made:
        one.model.close()


def observer(started: Callable[[], None]) -> SimpleNamespace:
    """A plugin that does something at each start, and takes no argument."""

    def treadle_request_started() -> None:
        started()

    return SimpleNamespace(treadle_request_started=hookimpl(treadle_request_started))


def test_a_request_is_told_once_from_start_to_end(observe):
    """Start and end have the same id, the chain, the counts and the durations."""
    one = observe()
    result = one.model.generate("hello", max_tokens=4, top_k=5, seed=1, n=2, ignore_eos=True)
    ((started,), (finished,)) = one.seen()
    assert started.request_id == finished.request_id == result.prompt_info.request_id
    assert (started.model, finished.model) == ("tiny", "tiny")
    assert started.chain == ("top_k", "categorical")
    assert (started.num_choices, started.max_tokens) == (2, 4)
    assert started.num_prompt_tokens == finished.num_prompt_tokens == len(result.prompt_info.prompt_ids)
    assert finished.reasons == ("max_tokens", "max_tokens")
    assert (finished.num_generated_tokens, finished.error) == (8, "")
    assert finished.prefill_s > 0
    assert finished.decode_s > 0


def test_what_observers_get_cannot_be_changed(observe):
    """One observer cannot fool the next."""
    one = observe()
    one.model.generate("hello", max_tokens=1)
    for told in (*one.seen()[0], *one.seen()[1]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            told.request_id = "other"


def test_a_stop_text_a_failure_and_a_reader_that_leaves(observe):
    """Each way to end has its name."""
    one = observe()
    text = one.model.generate("hello", max_tokens=6, temperature=0).choices[0].text
    one.model.generate("hello", max_tokens=6, temperature=0, stop=[text[0]])
    with pytest.raises(StageError):
        one.model.generate("hello", max_tokens=6, ignore_eos=True, stages=[("failing", {})])
    stream = one.model.stream("hello", max_tokens=100, ignore_eos=True)
    next(stream)
    stream.close()
    _, finished = one.seen()
    assert [result.reasons for result in finished[1:]] == [("stop_string",), ("failed",), ("cancelled",)]
    assert "enough" in finished[2].error
    assert finished[2].num_generated_tokens == 2


def test_what_is_refused_never_started(observe):
    """Observers see queued requests only."""
    one = observe()
    with pytest.raises(InvalidRequestError):
        one.model.generate("hello", top_p=7.0)
    assert one.seen() == ([], [])


def test_an_observer_that_raises_is_logged_once(observe, caplog: pytest.LogCaptureFixture):
    """It hurts neither requests nor other observers, and does not fill the log."""

    def fail() -> None:
        raise SystemExit("bad day")

    one = observe(observer(fail))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            one.model.generate("hello", max_tokens=1)
        started, finished = one.seen()
    assert (len(started), len(finished)) == (3, 3)
    (line,) = [record.message for record in caplog.records]
    assert "treadle_request_started of plugin p0 (p0) raised SystemExit: bad day" in line


def test_a_slow_observer_holds_nobody_up(observe):
    """A request ends while an observer still sleeps over its start."""
    gate = threading.Event()
    one = observe(observer(lambda: gate.wait(30) and None))
    one.model.generate("hello", max_tokens=1)
    assert one.watcher.finished == []
    gate.set()
    assert len(one.seen()[1]) == 1
