"""What one request may hold, whichever of its lists grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from treadle_client import Client, InvalidArgumentError
from treadle_protos.v1 import generation_pb2 as pb
from treadle_protos.v1 import value_pb2
from treadle_server.config import ServerConfig
from treadle_server.service.embedded import embedded_server

LIMIT = 100
MANY = range(3, 3 + LIMIT)
WORDS = [f"word{i}" for i in range(LIMIT + 1)]


@pytest.fixture(scope="module")
def client(tiny_folder: Path) -> Iterator[Client]:
    """A client of a server that takes few entries."""
    config = ServerConfig(port=0, max_request_entries=LIMIT, grace_s=0)
    with embedded_server([f"tiny={tiny_folder}"], config) as target, Client(target) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logit_bias": dict.fromkeys(MANY, 1.0), "stop": ["a"]}, "logit_bias"),
        ({"bad_words": WORDS}, "bad_words"),
        ({"bad_words_token_ids": [[3]] * (LIMIT // 2 + 1)}, "bad_words_token_ids"),
        ({"allowed_token_ids": [*MANY, 3]}, "allowed_token_ids"),
        ({"suppress_tokens": [*MANY, 3]}, "suppress_tokens"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": WORDS}, "dry_sequence_breakers"),
        ({"dry_multiplier": 1.0, "dry_sequence_breaker_ids": [*MANY, 3]}, "dry_sequence_breaker_ids"),
        ({"stages": [("allowed_token_ids", {"allowed_token_ids": [*MANY, 3]})]}, "list_value.values"),
        ({"stop": WORDS}, "stop"),
        ({"order": WORDS}, "order"),
    ],
)
def test_lists_are_bounded_together(client: Client, options: dict[str, Any], field: str) -> None:
    """A request over the limit is refused by the name of the list; one under it is not, whatever else is wrong."""
    with pytest.raises(InvalidArgumentError, match=f"at most {LIMIT} together") as caught:
        client.generate([3], max_tokens=1, **options)
    assert field in caught.value.violations[0].field


def test_prompts_are_bounded_before_they_are_tokenised(client: Client) -> None:
    """Too many ids, too many messages, and messages that together make too long a text, are refused by length."""
    many: list[Any] = [{"role": "user", "content": "hi"}] * (LIMIT + 1)
    for prompt in ([*MANY, 3], many):
        with pytest.raises(InvalidArgumentError, match="at most"):
            client.generate(prompt)
    with pytest.raises(InvalidArgumentError, match=r"at least|room"):
        client.generate([{"role": "user", "content": "word " * 60}] * 50)


def test_a_message_cannot_fill_the_memory(serve: Any) -> None:
    """Of 15 MB of the smallest values, nested in a stage, the server refuses to make Python objects."""
    value = value_pb2.Value(bool_value=True)
    values = value_pb2.ValueList(values=[value]).SerializeToString() * 3_500_000  # a message joined to itself
    parameter = value_pb2.Value(list_value=value_pb2.ValueList())
    parameter.list_value.MergeFromString(values)
    stage = pb.Stage(name="top_k", parameters={"k": parameter})
    request = pb.GenerateRequest(spec=pb.GenerationSpec(text="a", sampling=pb.SamplingOptions(stages=[stage])))
    with serve() as server, grpc.insecure_channel(server.target) as channel:
        before = psutil.Process(server.process.pid).memory_info().rss
        with pytest.raises(grpc.RpcError, match="lists of a request have at most 1048576 together"):
            channel.unary_unary("/treadle_protos.v1.GenerationService/Generate")(
                request.SerializeToString(), timeout=60
            )
        peak = _peak_bytes(server.process.pid)
        assert peak - before < 500 << 20  # nine tenths of it is protobuf's; Python's objects would be gigabytes


def _peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had so far."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("this system does not tell how much memory a process has had")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
