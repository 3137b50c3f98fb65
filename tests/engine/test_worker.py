"""The engine thread outlives faults and answers everyone when it closes."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
from treadle_server import LanguageModel
from treadle_server.engine.worker import EngineWorker
from treadle_server.errors import EngineError, UnavailableError


def test_calls_run_on_the_engine_thread_and_raise_where_they_are_awaited() -> None:
    """A function's result or error comes back to the caller."""
    worker = EngineWorker()
    assert worker.call(lambda: 7).result(timeout=5) == 7
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0).result(timeout=5)
    worker.close()


def test_a_call_cancelled_before_its_turn_runs_nothing() -> None:
    """Whoever no longer waits costs nothing, and the thread goes on."""
    worker, turn, ran = EngineWorker(), threading.Event(), []
    worker.call(turn.wait)
    late = worker.call(lambda: ran.append(1))
    assert late.cancel()
    turn.set()
    assert worker.call(lambda: 7).result(timeout=5) == 7
    assert ran == []
    worker.close()


def test_closed_worker_refuses_instead_of_hanging() -> None:
    """After close a call is an error at once."""
    worker = EngineWorker()
    worker.close()
    with pytest.raises(UnavailableError):
        worker.call(lambda: 1)


def test_fault_in_a_step_ends_its_requests_and_nothing_else(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception inside the model fails what was running; the next request is served."""
    with LanguageModel.load(tiny_folder) as model:
        forward = model.decoder.forward

        def broken(*args: object, **kwargs: object) -> object:
            monkeypatch.setattr(model.decoder, "forward", forward)
            raise RuntimeError("a fault")

        monkeypatch.setattr(model.decoder, "forward", broken)
        with pytest.raises(EngineError):
            model.generate([5], max_tokens=2)
        assert model.generate([5], max_tokens=2, ignore_eos=True).choices[0].finish.num_generated_tokens == 2
        assert model.engine.load().kv_cache_bytes == 0


def test_out_of_memory_fails_the_step_only(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that cannot be had is told as such."""
    with LanguageModel.load(tiny_folder) as model:

        def greedy_for_memory(*args: object, **kwargs: object) -> object:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(model.decoder, "forward", greedy_for_memory)
            with pytest.raises(EngineError, match="memory"):
                model.generate([5], max_tokens=2)
        assert model.generate([5], max_tokens=1).choices


def test_closing_a_model_ends_its_streams(tiny_folder: Path) -> None:
    """A stream that is open when its model closes gets an error, not silence."""
    model = LanguageModel.load(tiny_folder)
    stream = model.stream([5], ignore_eos=True)
    next(stream)
    model.close()
    with pytest.raises(UnavailableError):
        list(stream)
    with pytest.raises(UnavailableError):
        model.generate([5])


def test_a_closed_model_is_freed(tiny_folder: Path) -> None:
    """The thread that goes on for other models keeps nothing of one that is gone."""
    worker = EngineWorker()
    model = LanguageModel.load(tiny_folder, worker=worker)
    model.generate([5], max_tokens=2)
    weights = weakref.ref(model.engine.weights)
    model.close()
    del model
    worker.call(gc.collect).result()
    assert weights() is None
    worker.close()


def test_two_models_share_one_thread(tiny_folder: Path) -> None:
    """One worker steps the engines of several models in turn."""
    worker = EngineWorker()
    models = [LanguageModel.load(tiny_folder, name=f"m{i}", worker=worker, numerics="reproducible") for i in range(2)]
    streams = [model.stream([5, 6], seed=1, max_tokens=30, ignore_eos=True) for model in models]
    texts = [[event.text for event in stream if hasattr(event, "text")] for stream in streams]
    assert texts[0] == texts[1]
    worker.close()
