"""Every RPC of every service, with messages made from the protocol itself: sensible, extreme, wrong and broken ones.

Fields are drawn from their descriptors: often what the field is for, else the ends of its type, NaN, numbers that no
enum has, texts of any characters, lists of hundreds. Then the bytes may be cut short, changed, nested, or given
fields that nobody knows. Whatever an RPC gets, its answer or its error is one that the protocol has.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from treadle_client import Client, TrainingClient
from treadle_protos.v1 import generation_pb2, model_pb2, sampler_pb2, server_pb2, trace_pb2, training_pb2

METHODS = [
    method
    for module in (generation_pb2, model_pb2, sampler_pb2, server_pb2, trace_pb2, training_pb2, health_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAVAILABLE}
# Streams that go on until their reader leaves, and how long one is read here.
ENDLESS = {"Watch", "StreamMetrics"}
ENDLESS_S = 0.1
# What changes which models or adapters there are.
CHANGES = {"LoadModel", "UnloadModel", "UnloadAdapter"}
# More than the slowest answer to a message that is right; what takes longer hangs.
DEADLINE_S = 60.0
# How long a list may be, and how large one of messages: a trainer may well work for a minute on a long one.
MANY = 100
MANY_BYTES = 5000
CONTROL_IDS = [5, 90, 41, 17]


# --- what a message may hold --------------------------------------------------------------------------------------

# Fields that most requests need to get past the first check, and of the lists among them at least one entry.
USUAL = {"spec", "batch", "rows", "optimizer", "lr", "model", "source", "path", "adapter", "ids", "messages"}
DEEPEST = 6
SMALL = st.integers(0, 12)
SHARES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])

INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
DOUBLES = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 5e-324, 1e-9, 1e38, 1e308, -1e308, float("nan"), float("inf"), -float("inf")]
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "\0", " ", "..", "../..", "/", "~", "a" * 600, "猫" * 200, "\u202e", "{{ 1 // 0 }}"]),
)


def sensible(root: Path) -> dict[str, st.SearchStrategy[Any]]:
    """Return what fields usually hold, by their names, or by those of a message and its field."""
    folders = [str(root / name) for name in ("first", "second", "adapter", "broken", "link", "none")]
    stages = st.sampled_from(
        ["temperature", "top_k", "top_p", "min_p", "greedy", "dry", "mirostat", "bad_words", "grammar"]
    )
    named = {
        "LoadAdapterRequest.adapter": ["cats", "dogs"],
        "UnloadAdapterRequest.adapter": ["cats", "dogs"],
        "LoadAdapterRequest.path": [folders[2], *folders],
        "LoadModelRequest.model": ["spare", ""],
        "LoadModelRequest.source": [*folders, str(root.parent), "nothing"],
        "LossSpec.name": ["", "cross_entropy", "ppo"],
        "adapter": ["", "", "", "cats"],
        "content": ["a", "hello", "猫 追"],
        "labels": [-100, 1, 5, 9],
        "lr": [0.0, 1e-4, 1e-2],
        "model": ["tiny", "tiny", "tiny", ""],
        "name": ["a", "b", "last"],
        "path": [*folders[:2], *folders, str(root.parent)],
        "preset": ["", "", "creative", "code"],
        "role": ["user", "assistant", "system"],
        "service": ["", "treadle_protos.v1.ModelService", "treadle_protos.v1.TrainingService"],
        "stop": ["a", "the", "\n\n"],
        "string_value": ["a", "[a-z]+"],
        "text": ["a", "hello", "猫 追", "\n", "the cat", ":", "</s>", "👩‍👩‍👧"],
        "texts": ["a", ":"],
        "values": [0.0, 1.5, -3.0, -float("inf")],
        "what": ["logits", "attention", "q", "*", "layers.0"],
    }
    numbers = dict.fromkeys(
        ("best_of", "layers", "max_tokens", "n", "seed", "sequence_number", "top_k"), st.integers(1, 4)
    )
    drawn = {name: st.sampled_from(values) for name, values in named.items()}
    ids = dict.fromkeys(("ids", "token_ids", "stop_token_ids", "prompt_ids", "output_ids"), st.integers(0, 255))
    shares = dict.fromkeys(
        ("temperature", "top_p", "min_p", "tfs", "typical_p", "weights", "logprobs", "advantages"), SHARES
    )
    return drawn | numbers | ids | shares | {"Stage.name": stages, "order": stages, "speculation": st.integers(0, 1)}


class Messages:
    """Draws messages of any kind from their descriptors."""

    def __init__(self, root: Path) -> None:
        self._sensible = sensible(root)

    def strategy(self, descriptor: Descriptor) -> st.SearchStrategy[Any]:
        """Return a strategy of messages."""
        return st.composite(self._message)(descriptor, 0)

    def _message(self, draw: Any, descriptor: Descriptor, depth: int) -> Any:
        message = GetMessageClass(descriptor)()
        for chosen in self._fields(draw, descriptor, depth):
            if chosen.is_repeated:
                self._fill(draw, message, chosen, depth)
            elif chosen.message_type is not None:
                getattr(message, chosen.name).CopyFrom(self._message(draw, chosen.message_type, depth + 1))
            else:
                setattr(message, chosen.name, self._scalar(draw, chosen))
        return message

    def _fields(self, draw: Any, descriptor: Descriptor, depth: int) -> list[FieldDescriptor]:
        """Return a few fields to set, and most times those that the message cannot do without."""
        known = [f for f in descriptor.fields if depth < DEEPEST or f.message_type is None]
        if not known:
            return []
        chosen = draw(st.lists(st.sampled_from(known), max_size=draw(st.integers(0, 3)), unique_by=lambda f: f.number))
        if draw(st.integers(0, 15)):
            chosen += [f for f in known if f.name in USUAL]
            groups = [group for group in descriptor.oneofs if len(group.fields) > 1]
            chosen += [draw(st.sampled_from(list(group.fields))) for group in groups if depth < DEEPEST]
        return chosen

    def _fill(self, draw: Any, message: Any, repeated: FieldDescriptor, depth: int) -> None:
        entries = getattr(message, repeated.name)
        kind = repeated.message_type
        count = draw(st.integers(1 if repeated.name in USUAL else 0, 3))
        times = draw(st.sampled_from([1] * 15 + [MANY]))
        for _ in range(count):
            if kind is None:
                entries.extend([self._scalar(draw, repeated)] * times)
            elif kind.GetOptions().map_entry:
                self._put(draw, entries, kind, depth)
            else:
                entry = self._message(draw, kind, depth + 1)
                entries.extend([entry] * max(1, min(times, MANY_BYTES // (1 + entry.ByteSize()))))

    def _put(self, draw: Any, entries: Any, kind: Descriptor, depth: int) -> None:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        place = self._scalar(draw, key)
        if value.message_type is None:
            entries[place] = self._scalar(draw, value)
        else:
            entries[place].CopyFrom(self._message(draw, value.message_type, depth + 1))

    def _scalar(self, draw: Any, wanted: FieldDescriptor) -> Any:
        whose = f"{wanted.containing_type.name}.{wanted.name}"
        known = self._sensible.get(whose, self._sensible.get(wanted.name))
        if known is not None and draw(st.integers(0, 15)):
            value = draw(known)
            if _fits(wanted, value):
                return value
        return draw(_any_value(wanted))


def _fits(wanted: FieldDescriptor, value: object) -> bool:
    if wanted.cpp_type in INTEGERS:
        low, high = INTEGERS[wanted.cpp_type]
        return isinstance(value, int) and low <= value <= high
    kinds = {
        FieldDescriptor.CPPTYPE_STRING: str,
        FieldDescriptor.CPPTYPE_DOUBLE: float,
        FieldDescriptor.CPPTYPE_ENUM: int,
    }
    return isinstance(value, kinds.get(wanted.cpp_type, ())) and wanted.type != FieldDescriptor.TYPE_BYTES


def _any_value(wanted: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Return a strategy of all that a field's type can hold, its ends most of all."""
    if wanted.cpp_type in INTEGERS:
        low, high = INTEGERS[wanted.cpp_type]
        return st.one_of(SMALL, st.sampled_from([low, high, max(low, -1), 255, 256, 2**31 - 1]), st.integers(low, high))
    if wanted.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if wanted.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.one_of(SHARES, DOUBLES, st.floats(allow_nan=True))
    if wanted.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return st.one_of(st.sampled_from([*wanted.enum_type.values_by_number]), st.sampled_from([-1, 99, 2**31 - 1]))
    if wanted.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    return TEXTS


@st.composite
def broken(draw: Any, whole: st.SearchStrategy[Any]) -> bytes:
    """Draw the bytes of a message, most of them as they are."""
    raw = bytearray(draw(whole).SerializeToString())
    how = draw(st.sampled_from(["whole"] * 12 + ["unknown", "cut", "changed", "random", "nested"]))
    if how == "unknown":
        raw += b"\xfa\x3f\x03abc"  # field 1023, three bytes long
    if how == "cut":
        del raw[draw(st.integers(0, len(raw))) :]
    if how == "changed" and raw:
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    if how == "random":
        return draw(st.binary(max_size=60))
    if how == "nested":
        return _nested(draw(st.integers(1, 15)), draw(st.sampled_from([20, 90, 200, 2000])))
    return bytes(raw)


def _nested(number: int, depth: int) -> bytes:
    """Return a message in a message, and so on, always in the field of the same number."""
    raw = b""
    for _ in range(depth):
        size, varint = len(raw), bytearray()
        while size > 127:
            varint.append(size & 127 | 128)
            size >>= 7
        raw = bytes([number << 3 | 2]) + bytes(varint) + bytes([size]) + raw
    return raw


# --- a server and a trainer ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, golden: Path) -> Path:
    """A folder that the server allows: two checkpoints, an adapter, a broken model, and a link that leads out of it."""
    outside = tmp_path_factory.mktemp("outside")
    shutil.copytree(tiny_folder, outside / "model")
    folder = outside / "allowed"
    for name in ("first", "second", "broken"):
        shutil.copytree(tiny_folder, folder / name)
    shutil.copytree(golden / "adapters" / "llama_plain", folder / "adapter")
    (folder / "broken" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (folder / "link").symlink_to(outside / "model")
    return folder


@dataclass
class Target:
    """A server and a trainer that publishes to it; what they answered before anything was tried."""

    server: Any
    trainer: Any
    root: Path
    seen: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Ask for what must stay as it is."""
        self._client = Client(self.server.address, timeout_s=60)
        self._training = TrainingClient(self.trainer.address, timeout_s=60)
        self._training.step([CONTROL_IDS], lr=0.01)
        self._training.save_checkpoint("control")
        self.restore()
        self._before = self._control()

    def _control(self) -> tuple[Any, ...]:
        answer = self._client.generate(
            CONTROL_IDS, model="control", seed=7, max_tokens=20, ignore_eos=True, token_ids=True
        )
        self._training.load_checkpoint("control", with_optimizer=True)
        loss = self._training.compute_loss([CONTROL_IDS]).loss
        score = self._client.score(CONTROL_IDS, model="control").total_logprob
        return answer.choices[0].token_ids, score, loss

    def restore(self) -> None:
        """Bring back the models that were, and the adapter `cats`."""
        names = {model.name for model in self._client.list_models()}
        for name in names - {"control", "published", "tiny"}:
            self._client.unload_model(name)
        if "tiny" not in names:
            self._client.load_model(str(self.root / "first"), name="tiny")
        if "cats" not in {adapter.name for adapter in self._client.list_adapters(model="tiny")}:
            self._client.load_adapter("cats", self.root / "adapter", model="tiny")

    def check(self) -> None:
        """Ask again for what must stay as it is, and look for faults in the logs."""
        self.restore()
        assert self._control() == self._before
        assert not self.server.faults()
        assert not self.trainer.faults()

    def count(self, code: grpc.StatusCode, seconds: float) -> None:
        """Keep what a call ended with, and how long it took."""
        self.seen[code.name] += 1
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)

    def described(self) -> str:
        """Return the figures of all calls."""
        statuses = ", ".join(f"{name} {count}" for name, count in self.seen.most_common())
        return f"slowest {self.slowest_s:.2f} s; {statuses}"

    def close(self) -> None:
        """Close the clients."""
        self._client.close()
        self._training.close()


@pytest.fixture(scope="module")
def target(
    spawn: Callable[..., Any],
    configured: Callable[..., Path],
    figure: Callable[[str], None],
    tiny_folder: Path,
    root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Target]:
    """The processes: models `control`, `published` and `tiny`, and a trainer that publishes to the second."""
    publish, checkpoints = tmp_path_factory.mktemp("publish"), tmp_path_factory.mktemp("checkpoints")
    file = configured(
        numerics="reproducible", model_roots=[str(root), str(publish)], max_choices=8, grace_s=0.0, max_trace_tokens=64
    )
    served = [f"{name}={tiny_folder}" for name in ("control", "published", "tiny")]
    with spawn("serve", *served, "--port", "0", "--config", file) as server:
        options = ["--checkpoint-root", checkpoints, "--publish-root", publish, "--grace", "0"]
        options += ["--server", server.address, "--served-model", "published"]
        with spawn("trainer", tiny_folder, "--port", "0", *options) as trainer:
            made = Target(server, trainer, root)
            yield made
            made.close()
            figure(
                f"fuzzing: {made.seen.total()} calls of {len(METHODS)} RPCs in {made.seconds:.0f} s, {made.described()}"
            )


def status_of(call: Callable[..., Any], raw: bytes, timeout_s: float) -> grpc.StatusCode:
    """Send bytes, read the whole answer, and return its status."""
    try:
        answer = call(raw, timeout=timeout_s)
        if isinstance(answer, Iterator):
            for _ in answer:
                pass
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.counts(default=12, full=646)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_no_message_is_a_fault(target: Target, method: MethodDescriptor, count: int) -> None:
    """Neither INTERNAL nor UNKNOWN, no answer after the deadline; then both processes answer as they did before."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    trains = method.containing_service.name == "TrainingService"
    timeout_s = ENDLESS_S if method.name in ENDLESS else DEADLINE_S

    with grpc.insecure_channel((target.trainer if trains else target.server).address) as channel:
        call = channel.unary_stream(path) if method.server_streaming else channel.unary_unary(path)

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=count < 100,  # the daily run repeats itself; the long one looks for what is new
            suppress_health_check=list(HealthCheck),
        )
        @given(broken(Messages(target.root).strategy(method.input_type)))
        def send(raw: bytes) -> None:
            begun_s = time.monotonic()
            code = status_of(call, raw, timeout_s)
            target.count(code, time.monotonic() - begun_s)
            assert code not in FAULTS
            assert method.name in ENDLESS or code is not grpc.StatusCode.DEADLINE_EXCEEDED
            if method.name in CHANGES and code is grpc.StatusCode.OK:
                target.restore()

        send()
    target.check()
