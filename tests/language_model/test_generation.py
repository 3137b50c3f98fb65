"""Generation through the in-process API: what comes back is what the model and the request say."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from treadle_server import LanguageModel
from treadle_server.engine.events import FinishReason
from treadle_server.engine.scheduler import EngineLimits
from treadle_server.errors import InvalidRequestError, QueueFullError
from treadle_server.language_model import Delta, FinishInfo, PromptInfo

PROMPT = [5, 90, 41, 7, 200]


def wait_until_idle(model: LanguageModel) -> None:
    """Wait until the engine holds nothing; fail after five seconds."""
    deadline = time.monotonic() + 5
    while model.engine.load().num_running_sequences or model.engine.load().num_waiting_requests:
        assert time.monotonic() < deadline, "the engine still works on something"
        time.sleep(0.005)


def ids(model: LanguageModel, prompt: object = PROMPT, **keywords: object) -> tuple[int, ...]:
    """Generate and return the ids of the first choice."""
    return model.generate(prompt, **keywords).choices[0].token_ids


def test_greedy_tokens_are_the_reference_ones(model: LanguageModel, golden: Path) -> None:
    """Greedy decoding with a cache gives the ids that transformers gives by full forward passes."""
    reference = np.load(golden / "parity" / "llama_plain.npz")
    got = ids(model, reference["ids_5"].tolist(), temperature=0, ignore_eos=True, max_tokens=24)
    assert list(got) == reference["greedy_ids"].tolist()


def test_logits_are_the_reference_ones(model: LanguageModel, golden: Path) -> None:
    """The in-process logits agree with the reference to 1e-4."""
    reference = np.load(golden / "parity" / "llama_plain.npz")
    assert np.abs(model.logits(reference["ids_40"].tolist()) - reference["logits_40"]).max() < 1e-4


def test_stream_is_prompt_info_then_deltas_then_a_finish_for_each_choice(model: LanguageModel) -> None:
    """Events come in the promised order, with one FinishInfo a choice."""
    events = list(model.stream(PROMPT, max_tokens=6, n=2, seed=1, ignore_eos=True))
    assert isinstance(events[0], PromptInfo)
    assert [type(e) for e in events[1:]].count(PromptInfo) == 0
    assert sorted(e.index for e in events if isinstance(e, FinishInfo)) == [0, 1]


def test_deltas_join_to_the_decoded_tokens(model: LanguageModel) -> None:
    """The streamed text is the text of the tokens after the prompt."""
    result = model.generate(PROMPT, max_tokens=30, seed=3, ignore_eos=True, special_tokens=True)
    whole = model.tokenizer.decode([*PROMPT, *result.choices[0].token_ids], skip_special_tokens=False)
    prompt = model.tokenizer.decode(PROMPT, skip_special_tokens=False)
    assert prompt + result.text == whole


def test_same_seed_gives_the_same_tokens_and_the_seed_is_returned(model: LanguageModel) -> None:
    """A drawn seed is told, and giving it back repeats the tokens."""
    first = model.generate(PROMPT, max_tokens=12)
    again = model.generate(PROMPT, max_tokens=12, seed=first.prompt_info.seed)
    assert again.choices[0].token_ids == first.choices[0].token_ids


def test_unset_seeds_differ(model: LanguageModel) -> None:
    """Two requests without a seed draw different ones."""
    seeds = {model.generate(PROMPT, max_tokens=1).prompt_info.seed for _ in range(2)}
    assert len(seeds) == 2


def test_continuing_a_request_continues_its_noise(exact_model: LanguageModel) -> None:
    """Sending prompt and output again goes on as if the request had never stopped: noise depends on the position."""
    whole = ids(exact_model, max_tokens=10, seed=9, ignore_eos=True)
    rest = ids(exact_model, [*PROMPT, *whole[:4]], max_tokens=6, seed=9, ignore_eos=True)
    assert whole[4:] == rest


def test_first_choice_of_many_is_the_single_choice(exact_model: LanguageModel) -> None:
    """Choice 0 of n is what n = 1 gives; the others have noise of their own."""
    many = exact_model.generate(PROMPT, n=4, seed=5, max_tokens=8, ignore_eos=True)
    assert many.choices[0].token_ids == ids(exact_model, seed=5, max_tokens=8, ignore_eos=True)
    assert len({choice.token_ids for choice in many.choices}) == 4


def test_max_tokens_unset_fills_the_context(model: LanguageModel) -> None:
    """Without max_tokens the answer may take all the room, and the reason says that the context is full."""
    result = model.generate(PROMPT, temperature=0, ignore_eos=True)
    assert len(result.choices[0].token_ids) == model.context_length - len(PROMPT)
    assert result.choices[0].finish.reason is FinishReason.CONTEXT_FULL


def test_max_tokens_ends_with_its_own_reason(model: LanguageModel) -> None:
    """A limit that was asked for is told apart from a full context."""
    finish = model.generate(PROMPT, max_tokens=3, ignore_eos=True).choices[0].finish
    assert (finish.reason, finish.num_generated_tokens) == (FinishReason.MAX_TOKENS, 3)


def test_stop_token_ends_the_choice_and_is_no_text(model: LanguageModel) -> None:
    """A stop token counts, is among the ids, and appears in the text only when asked for."""
    whole = ids(model, temperature=0, max_tokens=6, ignore_eos=True)
    stop = whole[2]
    first = whole.index(stop)
    result = model.generate(PROMPT, temperature=0, max_tokens=6, stop_token_ids=[stop], ignore_eos=True)
    choice = result.choices[0]
    assert choice.token_ids == whole[: first + 1]
    assert (choice.finish.reason, choice.finish.matched) == (FinishReason.STOP_TOKEN, stop)
    shown = model.generate(
        PROMPT, temperature=0, max_tokens=6, stop_token_ids=[stop], include_stop=True, ignore_eos=True
    )
    assert shown.text == result.text + model.tokenizer.decode([stop], skip_special_tokens=False)


def test_stop_string_cuts_the_text_and_the_count(model: LanguageModel) -> None:
    """Text ends before the stop string; tokens past the match are neither returned nor counted."""
    whole = model.generate(PROMPT, seed=2, max_tokens=20, ignore_eos=True)
    stop = whole.text[5:8]
    cut = model.generate(PROMPT, seed=2, max_tokens=20, ignore_eos=True, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.choices[0].finish.matched == stop
    assert cut.choices[0].finish.num_generated_tokens == len(cut.choices[0].token_ids) < 20
    shown = model.generate(PROMPT, seed=2, max_tokens=20, ignore_eos=True, stop=stop, include_stop=True)
    assert shown.text == cut.text + stop


def test_min_tokens_holds_off_every_kind_of_stop(model: LanguageModel) -> None:
    """Before min_tokens no stop token is drawn and no stop string ends the text."""
    whole = ids(model, temperature=0, max_tokens=8, ignore_eos=True)
    text = model.generate(PROMPT, temperature=0, max_tokens=8, ignore_eos=True).text
    late = model.generate(PROMPT, temperature=0, max_tokens=8, min_tokens=8, stop_token_ids=[whole[1]])
    assert len(late.choices[0].token_ids) == 8
    late = model.generate(PROMPT, temperature=0, max_tokens=8, min_tokens=8, stop=text[0], ignore_eos=True)
    assert late.choices[0].finish.num_generated_tokens == 8


def test_logprobs_raw_and_processed(model: LanguageModel) -> None:
    """Raw logprobs are the model's; processed ones are those of the distribution drawn from."""
    result = model.generate(
        PROMPT, max_tokens=4, seed=1, temperature=0.5, top_k=3, logprobs="raw", num_top_logprobs=5, ignore_eos=True
    )
    choice = result.choices[0]
    logits = model.logits([*PROMPT, *choice.token_ids]).astype(np.float64)
    for step, item in enumerate(choice.logprobs):
        row = logits[len(PROMPT) - 1 + step]
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert item.logprob == pytest.approx(expected[item.token_id], abs=1e-4)
        assert item.rank == 1 + int((row > row[item.token_id]).sum())
        assert [i for i, _ in item.top] == np.argsort(-row, kind="stable")[:5].tolist()
    processed = (
        model.generate(PROMPT, max_tokens=1, seed=1, temperature=0.5, top_k=3, logprobs="processed", num_top_logprobs=5)
        .choices[0]
        .logprobs[0]
    )
    assert len(processed.top) == 3
    assert sum(np.exp(p) for _, p in processed.top) == pytest.approx(1)


def test_processed_logprob_of_greedy_is_zero(model: LanguageModel) -> None:
    """Greedy draws from a one-hot distribution."""
    item = model.generate(PROMPT, max_tokens=1, temperature=0, logprobs="processed").choices[0].logprobs[0]
    assert (item.logprob, item.rank) == (0.0, 1)


def test_score_is_the_log_softmax_of_the_logits(model: LanguageModel) -> None:
    """Score gives each token's raw log-probability; the first has none."""
    scored = model.score(PROMPT, num_top_logprobs=2)
    logits = model.logits(PROMPT).astype(np.float64)
    assert (scored[0].logprob, scored[0].rank) == (None, None)
    for position, item in enumerate(scored[1:]):
        row = logits[position] - logits[position].max()
        assert item.logprob == pytest.approx(row[item.token_id] - np.log(np.exp(row).sum()), abs=1e-4)
    assert [item.token_id for item in scored] == PROMPT


def test_prompt_logprobs_are_the_scores(model: LanguageModel) -> None:
    """A generation can return its prompt's scores beside its text, whatever chunks the prefill took."""
    info = model.generate(PROMPT, max_tokens=2, prompt_logprobs=True).prompt_info
    scores = [item.logprob for item in model.score(PROMPT)]
    assert [item.logprob for item in info.prompt_logprobs] == pytest.approx(scores, abs=1e-5)


def test_echo_puts_the_prompt_before_the_text(model: LanguageModel) -> None:
    """The echoed text is the prompt's followed by the answer's."""
    plain = model.generate("hello there", max_tokens=4, seed=1)
    echoed = model.generate("hello there", max_tokens=4, seed=1, echo=True)
    assert echoed.text == "hello there" + plain.text


def test_closing_the_stream_stops_the_work(model: LanguageModel) -> None:
    """A reader that goes away frees the sequence and its memory."""
    stream = model.stream(PROMPT, ignore_eos=True, max_tokens=100)
    next(stream)
    next(stream)
    stream.close()
    wait_until_idle(model)
    assert model.engine.load().kv_cache_bytes == 0


def run_together(model: LanguageModel, requests: list[dict]) -> list[tuple[int, ...]]:
    """Run requests at the same time, each in a thread of its own."""
    results: list[tuple[int, ...]] = [()] * len(requests)

    def run(index: int) -> None:
        results[index] = ids(model, **requests[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


REQUESTS = [
    {"prompt": [(7 * i + j) % 290 + 3 for j in range(3 + 9 * i)], "seed": i, "max_tokens": 20, "ignore_eos": True}
    for i in range(8)
]


def test_reproducible_results_do_not_depend_on_the_batch(exact_model: LanguageModel) -> None:
    """Eight requests at once give the tokens that each gives alone."""
    alone = [ids(exact_model, **request) for request in REQUESTS]
    assert run_together(exact_model, REQUESTS) == alone


def test_reproducible_results_do_not_depend_on_chunks_or_preemption(
    tiny_folder: Path, exact_model: LanguageModel
) -> None:
    """Tiny prefill chunks and memory for two sequences only change nothing but the time."""
    alone = [ids(exact_model, **request) for request in REQUESTS]
    limits = EngineLimits(
        max_prefill_tokens=5, max_prefill_tokens_beside_decode=3, max_kv_bytes=exact_model.kv_bytes_for(200)
    )
    with LanguageModel.load(tiny_folder, numerics="reproducible", engine_limits=limits) as model:
        assert run_together(model, REQUESTS) == alone
        many = model.generate(PROMPT, n=5, seed=5, max_tokens=8, ignore_eos=True)
    expected = exact_model.generate(PROMPT, n=5, seed=5, max_tokens=8, ignore_eos=True)
    assert [c.token_ids for c in many.choices] == [c.token_ids for c in expected.choices]


def test_memory_limit_holds_for_a_single_sequence(tiny_folder: Path, model: LanguageModel) -> None:
    """A sequence gets the room that the memory for keys and values leaves, and a prompt past it is refused."""
    limit = model.kv_bytes_for(64)
    with LanguageModel.load(tiny_folder, engine_limits=EngineLimits(max_kv_bytes=limit)) as small:
        finish = small.generate(PROMPT, ignore_eos=True).choices[0].finish
        assert (finish.num_generated_tokens, finish.reason) == (64 - len(PROMPT), FinishReason.CONTEXT_FULL)
        with pytest.raises(InvalidRequestError, match="bytes of keys and values"):
            small.generate([5] * 64)


def test_full_queue_refuses_at_once(tiny_folder: Path) -> None:
    """Beyond the limits a request is refused with the time to retry after; the others finish."""
    limits = EngineLimits(max_running=1, max_queued_requests=1)
    release = threading.Event()
    with LanguageModel.load(tiny_folder, engine_limits=limits) as model:
        model.call(release.wait)  # no step is made, so that nothing ends and makes room
        waiting = model.stream(PROMPT, max_tokens=2, ignore_eos=True)
        with pytest.raises(QueueFullError) as caught:
            model.stream(PROMPT)
        assert caught.value.retry_after_s > 0
        release.set()
        assert isinstance(list(waiting)[-1], FinishInfo)


def test_a_long_prompt_does_not_stall_a_running_stream(tiny_folder: Path) -> None:
    """While a long prompt is prefilled in chunks, a stream that runs gets tokens in between."""
    limits = EngineLimits(max_prefill_tokens=4, max_prefill_tokens_beside_decode=4)
    with LanguageModel.load(tiny_folder, engine_limits=limits) as model:
        running = model.stream(PROMPT, max_tokens=100, ignore_eos=True)
        for event in running:
            if isinstance(event, Delta):
                break
        order: list[str] = []
        long = threading.Thread(
            target=lambda: [order.append("long") for e in model.stream([9] * 100, max_tokens=1) if isinstance(e, Delta)]
        )
        long.start()
        order.extend("running" for event in running if isinstance(event, Delta))
        long.join()
    assert order.index("long") >= 10  # 100 tokens by 4 are 25 steps, with a token of the stream in each
