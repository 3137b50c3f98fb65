"""Running chains: guards, isolation of rows, batches, buffers, determinism."""

from typing import Any

import numpy as np
import pytest
from treadle_plugin_api import Field, Select, Stage, softmax64
from treadle_server.engine.chain import BufferPool, Sample, SamplingChain, StageSpec, sample_rows
from treadle_server.errors import NonFiniteLogitsError, StageError

INF = np.inf


def row(*values: float) -> np.ndarray:
    """Logits [1, vocab] float32."""
    return np.array([values], dtype=np.float32)


def rows(count: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Random logits [count, vocab] float32."""
    return (3 * np.random.default_rng(seed).standard_normal((count, vocab_size))).astype(np.float32)


def run(chain: SamplingChain, logits: np.ndarray, *, seeds: list[int] | None = None, **options: Any) -> list[Any]:
    """Outcomes of rows that all have the same chain."""
    seeds = seeds if seeds is not None else list(range(len(logits)))
    begin = {key: options.pop(key) for key in ("wants_processed", "eos_ids", "stop_ids") if key in options}
    samplers = [chain.begin([1, 2], seed=seed, **begin) for seed in seeds]
    return sample_rows(samplers, logits, **options)


def tokens(outcomes: list[Any]) -> list[int]:
    """The chosen ids."""
    return [outcome.token_id for outcome in outcomes]


def stage_of(body: Any, base: type = Stage, **attributes: Any) -> type:
    """A foreign stage called `mine` with the given `apply`."""
    attributes = {"name": "mine", "kind": "select" if base is Select else "filter", **attributes}
    return type("Mine", (base,), {"__doc__": "x", "__module__": __name__, "apply": body, **attributes})


def mine(resolve: Any, body: Any, base: type = Stage, **attributes: Any) -> SamplingChain:
    """A chain of that stage alone."""
    return resolve(stage_of(body, base, **attributes), stages=[StageSpec("mine")], vocab_size=4)


def test_greedy_rows(resolve):
    """The largest of each row, the lowest id among equals."""
    assert tokens(run(resolve(temperature=0, vocab_size=3), np.array([[1, 3, 3], [5, 1, 2]], np.float32))) == [1, 0]


def test_top_k_one_equals_greedy(resolve):
    """Keeping one token leaves nothing to chance."""
    logits = rows(16, 200)
    cold, one = resolve(temperature=0, vocab_size=200), resolve(top_k=1, vocab_size=200)
    assert tokens(run(cold, logits)) == tokens(run(one, logits))


def test_same_seed_same_token_whatever_the_batch(resolve):
    """A row gives the same token alone, in a batch, in another order and beside other chains."""
    logits = rows(8, 300)
    warm, cold = resolve(temperature=0.8, top_p=0.9, vocab_size=300), resolve(temperature=0, vocab_size=300)
    samplers = [(warm if i % 3 else cold).begin([5], seed=i) for i in range(8)]
    alone = [sample_rows([sampler], logits[i : i + 1])[0].token_id for i, sampler in enumerate(samplers)]
    assert tokens(sample_rows(samplers, logits)) == alone
    order = [3, 1, 7, 0, 5, 2, 6, 4]
    assert tokens(sample_rows([samplers[i] for i in order], logits[order])) == [alone[i] for i in order]


def test_seeds_and_choices_differ(resolve):
    """Other seeds and other choices of one request draw other tokens."""
    chain, logits = resolve(vocab_size=1000), rows(1, 1000).repeat(64, axis=0)
    assert len(set(tokens(run(chain, logits)))) > 20
    choices = [chain.begin([1], seed=3, choice=choice) for choice in range(64)]
    assert len(set(tokens(sample_rows(choices, logits)))) > 20


def test_draws_follow_the_position(resolve):
    """Accepting a token moves on; the request sent again with its output continues the stream."""
    chain, logits = resolve(vocab_size=1000), rows(1, 1000)
    running = chain.begin([1, 2], seed=9)
    stream = []
    for _ in range(6):
        stream += tokens(sample_rows([running], logits))
        running.accept(stream[-1])
    resumed = chain.begin([1, 2, *stream[:3]], seed=9)
    assert len(set(stream)) > 1
    assert tokens(sample_rows([resumed], logits)) == stream[3:4]


def test_padding_is_never_seen(resolve):
    """Ids past the tokenizer's size cannot be chosen, greedily or not, and stages see only the real ones."""
    logits = np.zeros((4, 12), dtype=np.float32)
    logits[:, 8:] = 100
    assert tokens(run(resolve(temperature=0, vocab_size=8), logits)) == [0] * 4
    outcomes = run(resolve(temperature=2.0, vocab_size=8), logits, wants_processed=True)
    assert max(tokens(outcomes)) < 8
    assert all((outcome.processed[8:] == -INF).all() and len(outcome.processed) == 12 for outcome in outcomes)


@pytest.mark.parametrize("knobs", [{"temperature": 0}, {"temperature": 0.7, "top_k": 2}, {}])
def test_non_finite_logits_fail_their_row_alone(resolve, knobs):
    """NaN, +inf and a row without any finite logit are errors of that row."""
    logits = rows(5, 8)
    logits[1, 3], logits[2, 3], logits[3] = np.nan, INF, -INF
    outcomes = run(resolve(**knobs), logits)
    assert [type(outcome) for outcome in outcomes] == [Sample, *[NonFiniteLogitsError] * 3, Sample]


def test_float64_logits_are_taken(resolve):
    """A float64 model's rows work; values past float32 are reported as infinite."""
    logits = rows(2, 8).astype(np.float64)
    logits[1, 2] = 1e300
    first, second = run(resolve(), logits)
    assert isinstance(first, Sample)
    assert isinstance(second, NonFiniteLogitsError)


def test_input_is_never_written(resolve):
    """The model's logits are the same after any chain."""
    logits = rows(3, 50)
    before = logits.copy()
    run(resolve(temperature=0.7, top_k=5, top_p=0.5, min_tokens=3, vocab_size=50), logits, eos_ids=[0])
    assert (logits == before).all()


def test_processed_is_what_was_drawn_from(resolve):
    """After temperature and top_k; one-hot for greedy; nothing unless asked for."""
    logits = row(1, 2, 3, 0)
    (warm,) = run(resolve(temperature=0.5, top_k=2, vocab_size=4), logits, wants_processed=True)
    assert softmax64(warm.processed).round(6).tolist() == [
        0,
        round(1 / (1 + np.e**2), 6),
        round(1 / (1 + np.e**-2), 6),
        0,
    ]
    (cold,) = run(resolve(temperature=0, vocab_size=4), logits, wants_processed=True)
    assert softmax64(cold.processed).tolist() == [0, 0, 1, 0]
    assert run(resolve(vocab_size=4), logits)[0].processed is None


def test_min_tokens_runs_under_greedy(resolve):
    """The end of text waits, though it is the most likely token."""
    chain, logits = resolve(temperature=0, min_tokens=1, vocab_size=3), row(9, 1, 2)
    sampler = chain.begin([1], seed=0, eos_ids=[0])
    assert tokens(sample_rows([sampler], logits)) == [2]
    sampler.accept(2)
    assert tokens(sample_rows([sampler], logits)) == [0]


def raises(self, logits, context, state=None):
    """Fails always."""
    raise RuntimeError("boom")


def exits(self, logits, context, state=None):
    """Tries to end the process."""
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (raises, "raised RuntimeError: boom"),
        (exits, "raised SystemExit"),
        (lambda self, logits, context, state=None: logits.__setitem__(0, 1), "read-only"),
        (lambda self, logits, context, state=None: None, "returned NoneType"),
        (lambda self, logits, context, state=None: logits[:2], r"returned float32 \[2\], not float32 \[4\]"),
        (lambda self, logits, context, state=None: logits.astype(np.float64), "returned float64"),
        (lambda self, logits, context, state=None: logits * np.float32(np.nan), "returned NaN"),
        (lambda self, logits, context, state=None: logits + np.float32(INF), r"returned (\+inf|NaN)"),
        (lambda self, logits, context, state=None: logits - np.float32(INF), "left no token"),
        (lambda self, logits, context, state=None: np.zeros_like(logits), "made the masked token 1 possible"),
        (lambda self, logits, context, state=None: np.ma.masked_array(logits), "returned MaskedArray"),
    ],
)
def test_a_foreign_stage_that_breaks_a_rule_fails_its_row(resolve, body, reason):
    """The error names plugin, stage and rule."""
    (outcome,) = run(mine(resolve, body), row(1, -INF, 2, 0))
    assert isinstance(outcome, StageError)
    with pytest.raises(StageError, match=f"'mine' of plugin 'mine' {reason}|{reason}"):
        raise outcome


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [(1, "masked token 1"), (4, "outside"), (-1, "outside"), (None, "None"), (True, "True"), (2.0, "2.0")],
)
def test_a_foreign_select_is_guarded(resolve, chosen, reason):
    """Only a valid id of an unmasked token is taken."""
    (outcome,) = run(mine(resolve, lambda self, logits, context, state=None: chosen, Select), row(1, -INF, 2, 0))
    assert isinstance(outcome, StageError)
    assert reason in str(outcome)


def test_a_numpy_id_is_taken(resolve):
    """A select may return what NumPy gives; the sample holds a plain int."""
    (outcome,) = run(mine(resolve, lambda self, logits, context, state=None: logits.argmax(), Select), row(1, 2, 3, 0))
    assert type(outcome.token_id) is int


class Scale(Stage):
    """Scales a row."""

    name = "mine"
    kind = "filter"
    scale: float = Field(default=1.0, description="x")

    def apply(self, logits, context, state=None):
        """The product."""
        return np.multiply(logits, np.float32(self.scale), out=context.empty())


class Picky(Scale):
    """Fails on rows whose first logit is negative."""

    kind = "mask"

    def apply(self, logits, context, state=None):
        """Scale, or fail."""
        if logits[0] < 0:
            raise ValueError("negative")
        return super().apply(logits, context, state)


class PickyBatch(Picky):
    """The same, many rows at a time."""

    @classmethod
    def apply_batch(cls, stages, logits, contexts, states):
        """Fails half way through a batch that holds a bad row."""
        return np.stack([stage.apply(*one) for stage, *one in zip(stages, logits, contexts, states, strict=True)])


@pytest.mark.parametrize("cls", [Picky, PickyBatch])
def test_a_failing_row_leaves_the_others_alone(resolve, cls):
    """The others give what they give without it, in a batch stage too."""
    chain = resolve(cls, stages=[StageSpec("mine", {"scale": 2.0})], temperature=0.9, vocab_size=30)
    logits = rows(6, 30)
    logits[:, 0] = [1, -1, 1, 1, -1, 1]
    outcomes = run(chain, logits)
    assert [isinstance(outcome, StageError) for outcome in outcomes] == [False, True, False, False, True, False]
    good = [0, 2, 3, 5]
    assert tokens([outcomes[i] for i in good]) == tokens(run(chain, logits[good], seeds=good))


def test_batch_stages_get_rows_of_different_chains(resolve):
    """Rows before the same class go together, each with its own parameters, whatever ran before."""
    calls = []

    class Together(Scale):
        """Records the size of its batches."""

        @classmethod
        def apply_batch(cls, stages, logits, contexts, states):
            """Scale each row by its own factor."""
            calls.append([stage.scale for stage in stages])
            return logits * np.array([[stage.scale] for stage in stages], dtype=np.float32)

    def chain(scale: float, **knobs: object) -> SamplingChain:
        return resolve(Together, stages=[StageSpec("mine", {"scale": scale})], vocab_size=30, **knobs)

    chains = [chain(1.0), chain(2.0, temperature=0.5), chain(3.0, top_k=4, top_p=0.5)]
    logits = np.abs(rows(3, 30))
    samplers = [chain.begin([1], seed=i) for i, chain in enumerate(chains)]
    together = tokens(sample_rows(samplers, logits))
    assert calls == [[1.0, 2.0, 3.0]]
    assert together == [sample_rows([samplers[i]], logits[i : i + 1])[0].token_id for i in range(3)]


@pytest.mark.parametrize("answer", [None, [], [np.zeros(30, np.float32)] * 4, np.zeros((2, 2)), "text"])
def test_a_batch_that_answers_garbage_is_run_row_by_row(resolve, answer):
    """What apply_batch returns is not trusted."""

    class Garbage(Scale):
        """Answers batches with anything."""

        @classmethod
        def apply_batch(cls, stages, logits, contexts, states):
            """Garbage."""
            return answer

    logits = np.abs(rows(4, 30))
    chain = resolve(Garbage, stages=[StageSpec("mine")], vocab_size=30)
    assert tokens(run(chain, logits)) == tokens(run(resolve(vocab_size=30), logits))


def test_draws_start_at_zero_in_every_call(resolve):
    """A stage that draws much, or is called again, shifts nobody's numbers, its own included."""
    seen: list[list[float]] = []

    def greedy_drawer(self, logits, context, state=None):
        seen.append([context.uniform(), *context.uniform(2)])
        return logits

    chain, logits = mine(resolve, greedy_drawer), rows(1, 4)
    samplers = [chain.begin([1], seed=5)]
    with_stage = tokens(sample_rows(samplers, logits) + sample_rows(samplers, logits))
    without = tokens(run(resolve(vocab_size=4), logits, seeds=[5]) * 2)
    assert seen[0] == seen[1]
    assert len(with_stage) == len(without) == 2
    assert with_stage[0] == with_stage[1]


class Remembering(Stage):
    """Masks every token it has accepted."""

    name = "mine"
    kind = "mask"

    def start(self, context):
        """Nothing yet."""
        return set()

    def accept(self, state, token_id):
        """Note it."""
        if token_id == 3:
            raise ValueError("three")
        state.add(token_id)

    def apply(self, logits, context, state=None):
        """Mask."""
        out = logits.copy()
        out[list(state)] = -INF
        return out


def test_state_advances_and_clones(resolve):
    """State is one a choice; a clone goes its own way, with the same history so far."""
    chain = resolve(Remembering, stages=[StageSpec("mine")], temperature=0, vocab_size=4)
    first, other = chain.begin([1], seed=0), chain.begin([1], seed=0, choice=1)
    logits = row(4, 3, 2, 1)
    first.accept(0)
    copy = first.clone()
    first.accept(1)
    assert [sampler.context.output_ids.tolist() for sampler in (first, copy, other)] == [[0, 1], [0], []]
    assert tokens(sample_rows([first, copy, other], logits.repeat(3, axis=0))) == [2, 1, 0]


def test_errors_in_accept_and_start_name_the_stage(resolve):
    """Every call into a plugin is guarded."""
    chain = resolve(Remembering, stages=[StageSpec("mine")], vocab_size=4)
    with pytest.raises(StageError, match=r"'mine'.*three"):
        chain.begin([1], seed=0).accept(3)

    class BadStart(Remembering):
        """Cannot start."""

        def start(self, context):
            """Fails."""
            raise OSError("no state")

    with pytest.raises(StageError, match="no state"):
        resolve(BadStart, stages=[StageSpec("mine")], vocab_size=4).begin([1], seed=0)


def test_a_long_reason_is_cut(resolve):
    """A plugin cannot fill the log with one error."""

    def verbose(self, logits, context, state=None):
        raise RuntimeError("x" * 10_000)

    assert len(str(run(mine(resolve, verbose), rows(1, 4))[0])) < 700


def test_views_of_lent_buffers_survive(resolve):
    """A stage that returns a view of its buffer is not overwritten by the next one."""

    def reversed_twice(self, logits, context, state=None):
        out = context.empty()
        np.copyto(out, logits)
        context.empty().fill(7)  # a second buffer, thrown away
        return out[::-1][::-1]

    chain = resolve(stage_of(reversed_twice, kind="mask"), stages=[StageSpec("mine")], temperature=0.5, vocab_size=40)
    plain = resolve(temperature=0.5, vocab_size=40)
    logits = rows(5, 40)
    assert tokens(run(chain, logits, buffers=BufferPool())) == tokens(run(plain, logits))


def test_buffers_are_used_again(resolve):
    """However many rows and steps, a pool holds the few buffers of one row; another vocabulary size replaces them."""
    pool = BufferPool()
    for size in (500, 400):
        chain = resolve(temperature=0.7, top_k=50, top_p=0.9, vocab_size=size)
        for _ in range(3):
            run(chain, rows(8, size), buffers=pool)
        assert {len(buffer) for buffer in pool._free} == {size}
        assert len(pool._free) <= 3


def test_observer_sees_every_stage(resolve):
    """The stages in order, their logits, and the time they took."""
    seen = []
    chain = resolve(temperature=0.5, top_k=2, vocab_size=4)
    run(chain, row(1, 2, 3, 0), observe=lambda stage, logits, took_s: seen.append((stage.name, logits.copy(), took_s)))
    assert [name for name, _, _ in seen] == ["temperature", "top_k", "categorical"]
    assert seen[0][1].tolist() == [-4, -2, 0, -6]
    assert seen[2][1].tolist() == [-INF, -2, 0, -INF]
    assert all(took_s >= 0 for _, _, took_s in seen)


def test_no_rows(resolve):
    """An empty batch is no error."""
    assert sample_rows([], np.empty((0, 4), dtype=np.float32)) == []


def test_distribution_of_a_foreign_select_is_guarded(resolve):
    """Processed logits of a select that reshapes its input come from it, and are checked."""

    class Squaring(Select):
        """Draws from something else."""

        name = "mine"

        def apply(self, logits, context, state=None):
            """The first possible."""
            return int(np.flatnonzero(logits > -INF)[0])

        def distribution(self, logits, context, state=None):
            """Only the chosen."""
            return np.where(np.arange(len(logits)) == 0, logits, -INF).astype(np.float32)

    chain = resolve(Squaring, stages=[StageSpec("mine")], vocab_size=4)
    assert softmax64(run(chain, row(1, 1, 1, 1), wants_processed=True)[0].processed).tolist() == [1, 0, 0, 0]
    (outcome,) = run(chain, row(-INF, 1, 1, 1), wants_processed=True)
    assert isinstance(outcome, StageError)
