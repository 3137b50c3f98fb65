"""How many entries a message may have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import Message
from treadle_protos.v1 import generation_pb2 as pb
from treadle_protos.v1 import value_pb2
from treadle_server.errors import InvalidRequestError
from treadle_server.service.message_size import check_entries

LIMIT = 10


def nested(num_lists: int, num_values: int) -> value_pb2.Value:
    """Return a list of lists of numbers."""
    inner = value_pb2.ValueList(values=[value_pb2.Value(int_value=1)] * num_values)
    return value_pb2.Value(list_value=value_pb2.ValueList(values=[value_pb2.Value(list_value=inner)] * num_lists))


def with_ids(count: int) -> Message:
    """A prompt of ids."""
    return pb.GenerationSpec(token_ids=pb.TokenIds(ids=range(count)))


def with_biases(count: int) -> Message:
    """A map of numbers."""
    return pb.SamplingOptions(logit_bias=pb.TokenBiases(biases=dict.fromkeys(range(count), 1.0)))


def with_messages(count: int) -> Message:
    """A conversation."""
    return pb.ScoreRequest(messages=pb.Messages(messages=[pb.Message(role="user")] * count))


def with_two_lists(count: int) -> Message:
    """Entries of two lists, counted together."""
    return pb.StoppingOptions(stop=["a"] * (count - 3), stop_token_ids=[1] * 3)


def with_stage_values(count: int) -> Message:
    """Two lists of three in a list in a map of a stage in a list, which are 10 entries, and an order."""
    stage = pb.Stage(name="s", parameters={"p": nested(2, 3)})
    return pb.SamplingOptions(stages=[stage], order=["x"] * (count - 10))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (with_ids, "token_ids.ids"),
        (with_biases, "logit_bias.biases"),
        (with_messages, "messages.messages"),
        (with_two_lists, "stop_token_ids"),
        (with_stage_values, "stages.parameters.list_value.values.list_value.values"),
    ],
)
def test_entries_are_counted_wherever_they_are(make: Callable[[int], Message], field: str) -> None:
    """As many as the limit are taken, one more is not, and the field is named."""
    check_entries(make(LIMIT), LIMIT)
    with pytest.raises(InvalidRequestError, match=f"at most {LIMIT} together") as caught:
        check_entries(make(LIMIT + 1), LIMIT)
    assert caught.value.violations[0].field == field


def test_texts_are_no_lists() -> None:
    """A long text is bounded by the size of the message, not by this limit."""
    check_entries(pb.GenerationSpec(text="word " * 100), LIMIT)
    check_entries(pb.GenerationSpec(), LIMIT)


def test_messages_are_fewer_than_numbers() -> None:
    """A quarter of the limit may be messages, such as the values of a stage's parameters; numbers may be all of it."""
    check_entries(with_ids(1000), 1000)
    check_entries(with_messages(250), 1000)
    with pytest.raises(InvalidRequestError, match=r"messages\.messages: has 251 entries"):
        check_entries(with_messages(251), 1000)
