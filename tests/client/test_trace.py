"""Traces and previews: requests from arguments, and arrays with and without NumPy."""

import importlib
import math
import struct
from typing import Any, get_type_hints

import grpc
import pytest
from treadle_client import AsyncClient, Client, InvalidArgumentError, PreviewOptions, Tensor
from treadle_client._options import make_preview_request, preview_paths
from treadle_protos.v1 import generation_pb2, trace_pb2, value_pb2
from treadle_protos.v1.trace_pb2 import PreviewSamplingRequest, TensorPart, TraceRequest, TraceResponse

LOGITS = [0.1, -0.5, 2.3, 1.2, 0.8, -0.3]


@pytest.fixture
def without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NumPy to import."""
    load = importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name == "numpy":
            raise ImportError(name)
        return load(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)


@pytest.fixture
def traced(script: Any) -> Any:
    """The script of a trace of two tensors, one of them in two parts."""
    info = trace_pb2.TraceInfo(
        model="tiny", weight_version=2, token_ids=[5, 6], tokens=[b"a", b"\xe7"], names=["x", "y"]
    )
    data = struct.pack("<6f", *range(6))
    part = TensorPart(name="x", dtype="float32", shape=[2, 3])
    script.events = [TraceResponse(info=info)]
    for start, end in ((0, 10), (10, 24)):
        script.events.append(TraceResponse(part=part))
        script.events[-1].part.offset = start
        script.events[-1].part.data = data[start:end]
    y = TensorPart(name="y", dtype="int64", shape=[1], data=struct.pack("<q", -7))
    script.events.append(TraceResponse(part=y))
    return script


@pytest.fixture
def previewed(script: Any) -> Any:
    """The script of a preview of one stage and the select."""
    even = {"kept_ids": [0, 1, 2, 3], "probabilities": [0.25] * 4}
    two = {"kept_ids": [1, 3], "probabilities": [0.75, 0.25]}
    top_k = generation_pb2.Stage(name="top_k", parameters={"top_k": value_pb2.Value(int_value=2)})
    script.replies["PreviewSampling"] = trace_pb2.PreviewSamplingResponse(
        vocab_size=4,
        initial=trace_pb2.StageDistribution(stage=generation_pb2.Stage(name="logits"), **even),
        stages=[
            trace_pb2.StageDistribution(stage=top_k, **two),
            trace_pb2.StageDistribution(stage=generation_pb2.Stage(name="categorical"), **two),
        ],
        chosen_token_id=3,
        seed=2**64 - 1,
        knobs={"top_k": value_pb2.Value(int_value=2)},
    )
    return script


def test_a_trace_joins_its_parts(client: Client, traced: Any) -> None:
    """Tensors come back whole, as NumPy arrays of their type and shape, by name in the order sent."""
    np = pytest.importorskip("numpy")
    trace = client.trace("a")
    assert list(trace) == ["x", "y"]
    assert (trace["x"].dtype, trace["x"].tolist()) == (np.float32, [[0, 1, 2], [3, 4, 5]])
    assert (trace["y"].dtype, trace["y"].tolist()) == (np.int64, [-7])
    assert (trace.model, trace.weight_version, trace.token_ids, trace.tokens) == ("tiny", 2, (5, 6), (b"a", b"\xe7"))
    assert len(trace) == 2
    assert "tensors" not in repr(trace)


@pytest.mark.usefixtures("without_numpy")
def test_a_trace_without_numpy(client: Client, traced: Any) -> None:
    """Tensors have the same type, shape and numbers."""
    x = client.trace("a")["x"]
    assert isinstance(x, Tensor)
    assert (x.dtype, x.shape, x.tolist()) == ("float32", (2, 3), [[0, 1, 2], [3, 4, 5]])


async def test_an_asynchronous_trace(async_client: AsyncClient, traced: Any) -> None:
    """The asynchronous client joins the parts as well."""
    assert (await async_client.trace([5, 6], layers=[0]))["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert traced.requests[0].layers == [0]


def test_a_trace_sends_what_is_asked(client: Client, traced: Any) -> None:
    """Layers and names travel as they are; one name may be a bare text; what is None stays unset."""
    client.trace("a", model="tiny", layers=[0, 3], what=["q", "logits"])
    client.trace([5, 6], what="logits")
    first, second = traced.requests
    assert first == TraceRequest(model="tiny", text="a", layers=[0, 3], what=["q", "logits"])
    assert second == TraceRequest(token_ids=generation_pb2.TokenIds(ids=[5, 6]), what=["logits"])


def test_a_trace_is_tried_again(client: Client, traced: Any, failure: Any) -> None:
    """A server that was not there is asked again, and the trace is whole."""
    client._sleep = lambda seconds: None
    traced.failures.append(failure(grpc.StatusCode.UNAVAILABLE))
    assert len(client.trace("a")) == 2
    traced.after_events = failure(grpc.StatusCode.INVALID_ARGUMENT, "no")
    with pytest.raises(InvalidArgumentError, match="no"):
        client.trace("a")


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [((), 1, 0.0), ((0,), 0, []), ((3,), 3, [0, 1, 2]), ((2, 0), 0, []), ((2, 1, 2), 4, [[[0, 1]], [[2, 3]]])],
)
def test_nested_lists(shape: tuple[int, ...], count: int, expected: object) -> None:
    """A tensor of any number of dimensions turns into nested lists."""
    tensor = Tensor(dtype="float64", shape=shape, data=struct.pack(f"<{count}d", *range(count)))
    assert tensor.tolist() == expected


def test_a_preview_is_a_sequence_of_stages(client: Client, previewed: Any) -> None:
    """Each stage has one probability a token, and the ids it kept; the whole tells what is chosen."""
    np = pytest.importorskip("numpy")
    result = client.preview(logits=LOGITS, top_k=2)
    assert [stage.stage for stage in result] == ["top_k", "categorical"]
    assert len(result) == 2
    assert result[-1] is result[1:][0]
    assert result[0].probabilities.tolist() == [0, 0.75, 0, 0.25]
    assert (result[0].kept.dtype, result[0].kept.tolist()) == (np.int64, [1, 3])
    assert result[0].parameters == {"top_k": 2}
    assert (result.initial.stage, result.initial.probabilities.sum()) == ("logits", 1)
    assert (result.chosen, result.seed, result.knobs) == (3, 2**64 - 1, {"top_k": 2})


@pytest.mark.usefixtures("without_numpy")
def test_a_preview_without_numpy(client: Client, previewed: Any) -> None:
    """Probabilities and ids are tuples then."""
    first = client.preview("a")[0]
    assert (first.probabilities, first.kept) == ((0.0, 0.75, 0.0, 0.25), (1, 3))


async def test_an_asynchronous_preview(async_client: AsyncClient, previewed: Any) -> None:
    """The asynchronous client takes the same arguments."""
    assert (await async_client.preview(logits=LOGITS, temperature=0.5, top_k=3)).chosen == 3


def test_every_proto_field_is_a_keyword() -> None:
    """PreviewOptions names exactly the keywords that the proto has fields for."""
    assert set(get_type_hints(PreviewOptions)) == set(preview_paths())


def test_every_keyword_arrives() -> None:
    """Each keyword arrives in its own place; empty lists and None leave it unset."""
    request = make_preview_request(
        None,
        LOGITS,
        {"model": "m", "adapter": "d", "preset": "p", "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 0}
        | {"order": ["top_k"], "stages": ["x"], "min_tokens": 1, "stop_token_ids": [4]}
        | {"prompt_ids": [1, 2], "output_ids": [3], "eos_ids": [0]},
    )
    sampling = generation_pb2.SamplingOptions(
        temperature=0.5, top_k=3, top_p=0.9, seed=0, order=["top_k"], stages=[generation_pb2.Stage(name="x")]
    )
    assert request == PreviewSamplingRequest(
        model="m", adapter="d", preset="p", logits=trace_pb2.Logits(values=LOGITS), sampling=sampling,
        prompt_ids=[1, 2], output_ids=[3], eos_ids=[0], stop_token_ids=[4], min_tokens=1,
    )  # fmt: skip
    assert make_preview_request("a", None, {"prompt_ids": [], "top_k": None}) == PreviewSamplingRequest(text="a")


def test_masked_and_wrong_logits_are_sent() -> None:
    """Infinities and NaN travel; refusing the latter is the server's part."""
    values = make_preview_request(None, (-math.inf, math.nan, 1), {}).logits.values
    assert values[0] == -math.inf
    assert math.isnan(values[1])


@pytest.mark.parametrize(
    ("prompt", "logits", "options", "field", "words"),
    [
        ("a", [1.0], {}, "prompt", "no prompt beside logits"),
        (None, 3, {}, "logits", "a list of numbers, got int 3"),
        (None, "abc", {}, "logits", "a list of numbers, got str"),
        (None, [1.0, "x"], {}, "logits[1]", "a number, got str 'x'"),
        (None, [True], {}, "logits[0]", "a number, got bool True"),
        (None, [1.0], {"eos_ids": [-1]}, "eos_ids[0]", "got int -1"),
        (None, [1.0], {"temperature": "x"}, "sampling.temperature", "got str 'x'"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    prompt: object, logits: object, options: dict[str, object], field: str, words: str
) -> None:
    """The violation names the field, what was expected, and the value."""
    with pytest.raises(InvalidArgumentError) as caught:
        make_preview_request(prompt, logits, options)
    assert caught.value.violations[0][0] == field
    assert words in caught.value.violations[0][1]


def test_model_defaults_are_no_keyword(client: Client) -> None:
    """A preview takes none, so that there is nothing to ask for."""
    with pytest.raises(TypeError, match="use_model_defaults"):
        client.preview("a", use_model_defaults=True)  # type: ignore[call-arg]
