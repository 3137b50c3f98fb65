"""Tracing and previewing through a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from treadle_client import Client, InvalidArgumentError, NotFoundError, ServerInternalError
from treadle_protos.v1 import generation_pb2, trace_pb2_grpc
from treadle_protos.v1 import trace_pb2 as pb
from treadle_server import LanguageModel
from treadle_server.config import ServerConfig
from treadle_server.service.embedded import embedded_server

LOGITS = [0.1, -0.5, 2.3, 1.2, 0.8, -0.3]  # the handworked document's, for 6 words
IDS = [1, 5, 9, 5]


@pytest.fixture
def stub(target: str) -> Iterator[trace_pb2_grpc.TraceServiceStub]:
    """The bare service, for what the client would not send."""
    with grpc.insecure_channel(target) as channel:
        yield trace_pb2_grpc.TraceServiceStub(channel)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Iterator[LanguageModel]:
    """The served model in this process."""
    with LanguageModel.load(tiny_folder) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def small_target(tiny_folder: Path) -> Iterator[str]:
    """A server of one model with the smallest messages, a small trace limit and the preview of cat-mouse's size."""
    config = ServerConfig(port=0, grace_s=0, max_message_bytes=1 << 16, max_trace_bytes=1 << 20, max_trace_tokens=100)
    with embedded_server([str(tiny_folder)], config) as address:
        yield address


def test_trace_is_the_in_process_one(client: Client, model: LanguageModel) -> None:
    """Every tensor arrives as it was computed, with type and shape."""
    trace, expected = client.trace(IDS, model="tiny"), model.trace(IDS)
    assert list(trace) == list(expected)
    for name, array in expected.items():
        assert trace[name].dtype == array.dtype
        np.testing.assert_allclose(trace[name], array, atol=1e-5)
    assert trace.token_ids == tuple(IDS)
    assert trace.tokens == tuple(model.tokenizer.token_bytes(token_id) for token_id in IDS)
    assert (trace.model, trace.weight_version) == ("tiny", 1)


def test_layers_and_names_narrow_a_trace(client: Client) -> None:
    """Only what was asked for travels."""
    assert list(client.trace("hello", model="tiny", layers=[1], what=["weights", "logits"])) == [
        "layers.1.attention.weights",
        "logits",
    ]


def test_large_tensors_come_in_parts(small_target: str, model: LanguageModel) -> None:
    """No message is larger than the limit, parts are consecutive, and the client puts them together."""
    ids = [5] * 60
    with grpc.insecure_channel(small_target) as channel:
        request = pb.TraceRequest(token_ids=generation_pb2.TokenIds(ids=ids), what=["logits"])
        first, *rest = trace_pb2_grpc.TraceServiceStub(channel).Trace(request)
    assert first.info.names == ["logits"]
    assert len(rest) == 3
    assert all(message.ByteSize() <= 1 << 16 for message in rest)
    ends = np.cumsum([len(message.part.data) for message in rest])
    assert [message.part.offset for message in rest] == [0, *ends[:-1]]
    with Client(small_target) as client:
        np.testing.assert_allclose(client.trace(ids, what="logits")["logits"], model.logits(ids), atol=1e-5)


def test_a_trace_over_the_limits_is_refused(small_target: str) -> None:
    """The refusal names value and limit; the limits are told beforehand."""
    with Client(small_target) as client:
        limits = client.server_info().limits
        assert (limits.max_trace_tokens, limits.max_trace_bytes) == (100, 1 << 20)
        with pytest.raises(InvalidArgumentError, match="token_ids: has 101 tokens; a trace takes at most 100"):
            client.trace([5] * 101)
        with pytest.raises(InvalidArgumentError, match=r"what: selects \d+ bytes; a trace gives out at most 1048576"):
            client.trace([5] * 100)
        assert client.trace([5] * 100, what="embedding")["embedding"].shape[0] == 100


def test_a_preview_over_the_message_limit_is_refused(small_target: str) -> None:
    """A vocabulary whose distributions fit no message gets a clear answer."""
    with Client(small_target) as client:
        with pytest.raises(InvalidArgumentError, match=r"distributions of \d+ bytes; a message takes at most 65536"):
            client.preview(logits=[float(i) for i in range(6000)])
        assert len(client.preview(logits=[float(i) for i in range(6000)][:2000])[0].probabilities) == 2000


def test_capabilities_are_told(client: Client) -> None:
    """A client can see beforehand that the server traces and previews."""
    assert {"preview", "trace"} <= set(client.server_info().capabilities)


def test_preview_of_the_document_s_logits(client: Client) -> None:
    """Temperature 0.7, top-k 3 and top-p 0.9 on six words, though no model served has six."""
    result = client.preview(logits=LOGITS, temperature=0.7, top_k=3, top_p=0.9, seed=1)
    assert [stage.stage for stage in result] == ["temperature", "top_k", "top_p", "categorical"]
    weights = np.exp(np.array(LOGITS) / 0.7)
    np.testing.assert_allclose(result[0].probabilities, weights / weights.sum(), atol=1e-6)
    kept = [stage.kept.tolist() for stage in result]
    assert kept == [[0, 1, 2, 3, 4, 5], [2, 3, 4], [2, 3], [2, 3]]
    two = weights[2:4] / weights[2:4].sum()
    np.testing.assert_allclose(result[-1].probabilities, [0, 0, *two, 0, 0], atol=1e-6)
    assert result.chosen in (2, 3)


def test_preview_takes_order_context_and_named_stages(client: Client) -> None:
    """An order with knobs and a named stage, and ids that the stages see."""
    result = client.preview(
        logits=LOGITS, prompt_ids=[0], output_ids=[1], eos_ids=[2], min_tokens=2, temperature=2.0,
        stages=[("top_k", {"top_k": 2})], order=["top_k", "min_tokens", "temperature"],
    )  # fmt: skip
    assert [(stage.stage, stage.kept.tolist()) for stage in result] == [
        ("top_k", [2, 3]),
        ("min_tokens", [3]),
        ("temperature", [3]),
        ("categorical", [3]),
    ]
    assert result.chosen == 3


def test_preview_takes_no_model_defaults(tiny_folder: Path, tmp_path: Path) -> None:
    """The model's generation_config.json acts in generation and not in a preview."""
    import json
    import shutil

    folder = tmp_path / "cool"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 7}))
    with embedded_server([str(folder)], ServerConfig(port=0, grace_s=0)) as target, Client(target) as client:
        assert client.get_model().default_knobs == {"temperature": 0.5, "top_k": 7}
        assert [stage.stage for stage in client.preview([5, 6])] == ["categorical"]


def test_preview_of_a_prompt_chooses_what_generation_chooses(client: Client) -> None:
    """The same chain, seed and prompt give the same token."""
    options = {"model": "tiny", "temperature": 0.9, "top_p": 0.8, "seed": 11}
    generated = client.generate(
        IDS, max_tokens=1, ignore_eos=True, use_model_defaults=False, token_ids=True, **options
    ).choices[0]
    result = client.preview(IDS, **options)
    assert result.chosen == generated.token_ids[0]
    assert len(result[0].probabilities) == client.get_model("tiny").vocab_size


def test_only_model_gives_its_tokens(small_target: str, model: LanguageModel) -> None:
    """Logits of the only model's size are of its tokens, others of none; a named model refuses others."""
    with Client(small_target) as client:
        assert len(client.preview(logits=model.logits([5])[-1].tolist()).initial.probabilities) == model.vocab_size
        assert len(client.preview(logits=LOGITS).initial.probabilities) == 6
        with pytest.raises(InvalidArgumentError, match="logits: must have 299 values"):
            client.preview(logits=LOGITS, model=client.list_models()[0].name)


def ids(*values: int) -> generation_pb2.TokenIds:
    """Return token ids as a message."""
    return generation_pb2.TokenIds(ids=values)


NAN = float("nan")
WRONG = {
    "trace: no prompt": (pb.TraceRequest(model="tiny"), "prompt", "one of: text, token_ids, messages"),
    "trace: no model": (pb.TraceRequest(text="a"), "model", "overflowing, tiny"),
    "trace: adapter": (pb.TraceRequest(model="tiny", text="a", adapter="x"), "adapter", "'x'"),
    "trace: id outside": (pb.TraceRequest(model="tiny", token_ids=ids(4000)), "token_ids[0]", "4000"),
    "trace: too long": (pb.TraceRequest(model="tiny", token_ids=ids(*[5] * 500)), "token_ids", "has 500 tokens"),
    "trace: no messages": (
        pb.TraceRequest(model="tiny", messages=generation_pb2.Messages()),
        "messages",
        "one message",
    ),
    "trace: layer": (pb.TraceRequest(model="tiny", text="a", layers=[0, 2**32 - 1]), "layers[1]", "got 4294967295"),
    "trace: many layers": (pb.TraceRequest(model="tiny", text="a", layers=[0] * 100_000), "layers", "got 100000"),
    "trace: name": (pb.TraceRequest(model="tiny", text="a", what=["q", "x"]), "what[1]", "layers.N.attention.q"),
    "trace: empty name": (pb.TraceRequest(model="tiny", text="a", what=[""]), "what[0]", "''"),
    "trace: long name": (pb.TraceRequest(model="tiny", text="a", what=["*a" * 1000]), "what[0]", "2000"),
    "preview: nothing": (pb.PreviewSamplingRequest(model="tiny"), "prompt", "logits"),
    "preview: no model": (pb.PreviewSamplingRequest(text="a"), "model", "overflowing, tiny"),
    "preview: adapter": (pb.PreviewSamplingRequest(model="tiny", text="a", adapter="x"), "adapter", "'x'"),
    "preview: no logits": (pb.PreviewSamplingRequest(logits=pb.Logits()), "logits", "at least one"),
    "preview: nan": (pb.PreviewSamplingRequest(logits=pb.Logits(values=[1, NAN])), "logits[1]", "nan"),
    "preview: preset": (pb.PreviewSamplingRequest(logits=pb.Logits(values=[1]), preset="x"), "preset", "creative"),
    "preview: eos": (pb.PreviewSamplingRequest(logits=pb.Logits(values=[1]), eos_ids=[1]), "eos_ids[0]", "[0, 1)"),
    "preview: min_tokens": (
        pb.PreviewSamplingRequest(logits=pb.Logits(values=[1]), min_tokens=-3),
        "min_tokens",
        "-3",
    ),
    "preview: knob": (
        pb.PreviewSamplingRequest(
            logits=pb.Logits(values=[1]), sampling=generation_pb2.SamplingOptions(temperature=NAN)
        ),
        "sampling.temperature",
        "nan",
    ),
    "preview: stage": (
        pb.PreviewSamplingRequest(
            text="a", model="tiny", sampling=generation_pb2.SamplingOptions(stages=[generation_pb2.Stage(name="x")])
        ),
        "sampling.stages[0].name",
        "'x'",
    ),
    "preview: defaults": (
        pb.PreviewSamplingRequest(text="a", sampling=generation_pb2.SamplingOptions(use_model_defaults=True)),
        "sampling.use_model_defaults",
        "no model defaults",
    ),
    "preview: prompt twice": (
        pb.PreviewSamplingRequest(model="tiny", text="a", prompt_ids=[1]),
        "prompt_ids",
        "logits",
    ),
    "preview: output": (pb.PreviewSamplingRequest(model="tiny", text="a", output_ids=[999]), "output_ids[0]", "999"),
    "preview: full": (
        pb.PreviewSamplingRequest(model="tiny", token_ids=ids(5), output_ids=[5] * 127),
        "token_ids",
        "has 128 tokens",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_request_names_the_field(stub: trace_pb2_grpc.TraceServiceStub, client: Client, case: str) -> None:
    """INVALID_ARGUMENT with a field violation, and the server serves on."""
    request, field, message = WRONG[case]
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Trace(request)) if isinstance(request, pb.TraceRequest) else stub.PreviewSampling(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert any(v.field == field and message in v.description for v in violations(caught.value))
    assert client.generate([5, 6], model="tiny", max_tokens=1).choices


def violations(error: grpc.RpcError) -> list[error_details_pb2.BadRequest.FieldViolation]:
    """Return the field violations that a status carries."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(bad)
    return list(bad.field_violations)


def test_unknown_model_is_not_found(client: Client) -> None:
    """In a trace, and in a preview of logits too."""
    for call in (lambda: client.trace("a", model="x"), lambda: client.preview(logits=LOGITS, model="x")):
        with pytest.raises(NotFoundError, match="overflowing, tiny"):
            call()


def test_what_overflows_is_shown_and_not_drawn_from(client: Client) -> None:
    """A trace shows the infinities that make a preview of the same prompt impossible."""
    assert not np.isfinite(client.trace([5, 6], model="overflowing", what="logits")["logits"]).all()
    with pytest.raises(ServerInternalError, match="logit"):
        client.preview([5, 6], model="overflowing")


@pytest.mark.parametrize("how", ["raise", "nan", "shape", "mask_all", "garbage"])
def test_faulty_plugin_is_named(client: Client, how: str) -> None:
    """A stage that misbehaves fails the preview alone."""
    with pytest.raises(ServerInternalError, match="'faulty' of plugin 'faulty'"):
        client.preview(logits=LOGITS, stages=[("faulty", {"how": how})])


def test_many_traces_take_turns(client: Client) -> None:
    """More traces at once than the server holds in memory all get their answer."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as pool:
        traces = list(pool.map(lambda _: client.trace(IDS, model="tiny", what="logits")["logits"].tobytes(), range(12)))
    assert len(set(traces)) == 1
