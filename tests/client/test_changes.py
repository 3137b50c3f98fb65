"""Calls that change the server: what they send and return, and that they are sent once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from treadle_client import Adapter, AsyncClient, Client, InvalidArgumentError, UnavailableError
from treadle_protos.v1 import model_pb2 as pb

CHANGES: dict[str, Callable[[Any], Any]] = {
    "LoadModel": lambda client: client.load_model("/m"),
    "UnloadModel": lambda client: client.unload_model("m"),
    "UpdateWeights": lambda client: client.update_weights("/m"),
    "LoadAdapter": lambda client: client.load_adapter("a", "/a"),
    "UnloadAdapter": lambda client: client.unload_adapter("a"),
}


def test_models_are_loaded_and_unloaded(client: Client, script: Any) -> None:
    """The source goes as it is, the name only where one is given."""
    script.replies["LoadModel"] = pb.LoadModelResponse(model=pb.Model(name="m", weight_version=1, weight_label="x"))
    model = client.load_model("/models/m")
    assert (model.name, model.weight_label) == ("m", "x")
    client.load_model("stored", name="n")
    client.unload_model("n")
    assert script.requests == [
        pb.LoadModelRequest(source="/models/m"),
        pb.LoadModelRequest(source="stored", model="n"),
        pb.UnloadModelRequest(model="n"),
    ]


def test_weights_are_updated(client: Client, script: Any) -> None:
    """A path of either kind, a label and an expected version of 0 are sent; the version comes back."""
    script.replies["UpdateWeights"] = pb.UpdateWeightsResponse(weight_version=7)
    assert client.update_weights(Path("/w"), model="m", label="l", expected_version=0) == 7
    assert client.update_weights("/w") == 7
    assert script.requests[0] == pb.UpdateWeightsRequest(path="/w", model="m", label="l", expected_version=0)
    assert not script.requests[1].HasField("expected_version")


def test_adapters_are_loaded_listed_and_unloaded(client: Client, script: Any) -> None:
    """Adapters come back as they are described."""
    found = pb.Adapter(name="a", model="m", version=2, rank=8)
    script.replies["LoadAdapter"] = pb.LoadAdapterResponse(adapter=found)
    script.replies["ListAdapters"] = pb.ListAdaptersResponse(adapters=[found])
    adapter = Adapter(name="a", model="m", version=2, rank=8)
    assert client.load_adapter("a", Path("/a"), model="m") == adapter
    assert client.list_adapters(model="m") == (adapter,)
    client.unload_adapter("a", model="m")
    assert script.requests == [
        pb.LoadAdapterRequest(adapter="a", path="/a", model="m"),
        pb.ListAdaptersRequest(model="m"),
        pb.UnloadAdapterRequest(adapter="a", model="m"),
    ]


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_sent_once(client: Client, script: Any, failure: Any, name: str) -> None:
    """An answer that was lost may have been a yes, so nothing that changes the server is repeated."""
    script.failures.append(failure(grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(UnavailableError):
        CHANGES[name](client)
    assert len(script.requests) == 1


@pytest.mark.parametrize("name", CHANGES)
async def test_asynchronous_changes_are_sent_once(
    async_client: AsyncClient, script: Any, failure: Any, name: str
) -> None:
    """So it is with asyncio."""
    script.failures.append(failure(grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(UnavailableError):
        await CHANGES[name](async_client)
    assert len(script.requests) == 1


def test_listing_adapters_is_repeated(client: Client, script: Any, failure: Any) -> None:
    """What only reads is tried again."""
    script.failures.append(failure(grpc.StatusCode.UNAVAILABLE))
    assert client.list_adapters() == ()
    assert len(script.requests) == 2


def test_wrong_types_are_refused_before_sending(client: Client, script: Any) -> None:
    """A version that is no number, or a name that is no text, names its field."""
    with pytest.raises(InvalidArgumentError, match="expected_version"):
        client.update_weights("/w", expected_version=-1)
    with pytest.raises(InvalidArgumentError, match="adapter"):
        client.load_adapter(7, "/a")  # type: ignore[arg-type]
    assert script.requests == []
