"""How many requests a client may have under way."""

from __future__ import annotations

import pytest
from treadle_server.errors import QueueFullError
from treadle_server.service.security.client_limits import ClientLimits


def test_limit_is_by_client_and_given_back() -> None:
    """A client over its limit is refused, another is not; an end gives the place back, after a failure too."""
    limits = ClientLimits(2)
    with limits.place_for("a"), limits.place_for("b"):
        with pytest.raises(ValueError, match="boom"), limits.place_for("a"):
            raise ValueError("boom")
        with limits.place_for("a"), pytest.raises(QueueFullError, match="client a has 2 requests") as caught:
            limits.place_for("a").__enter__()
    assert caught.value.retry_after_s > 0
    assert not limits._num_running


def test_no_limit() -> None:
    """Without a limit nobody is refused."""
    limits = ClientLimits(None)
    with limits.place_for("a"), limits.place_for("a"), limits.place_for("a"):
        pass
