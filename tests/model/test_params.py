"""Canonical parameters and the batch that runs over them."""

from __future__ import annotations

import numpy as np
import pytest
from treadle_plugin_api.backend import ArrayWeight, Batch
from treadle_server.model.decoder import Decoder
from treadle_server.model.params import Params, random_arrays


def test_params_are_an_immutable_mapping_with_a_version(odd_config):
    """Names map to weights, nothing can be assigned, and a view cannot be written."""
    params = Params.from_arrays(random_arrays(odd_config, 0), version=4)
    assert (params.version, len(params)) == (4, len(list(params)))
    assert not hasattr(params, "__setitem__")
    assert not params["head.weight"].view().flags.writeable


def test_bytes_count_the_stored_format():
    """A float16 weight counts two bytes a number."""
    params = Params.from_arrays({"a": np.zeros((3, 5), np.float16), "b": np.zeros(2, np.float64)})
    assert params.num_bytes == 30 + 16


def test_a_weight_widens_on_reading():
    """Float16 numbers arrive exactly in float64."""
    out = np.empty(2)
    ArrayWeight(np.array([0.1, 65504], np.float16)).read_into(out)
    np.testing.assert_array_equal(out, [float(np.float16(0.1)), 65504.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("layers.1.mlp.up.weight"), "layers.1.mlp.up.weight is missing"),
        (lambda arrays: arrays.update(extra=np.zeros(1)), "extra is not part of the model"),
        (lambda arrays: arrays.update({"head.weight": np.zeros((2, 2))}), r"head.weight must have shape \[523, 150\]"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(odd_config, change, message):
    """A missing, unknown or mis-shaped parameter raises ValueError naming it."""
    arrays = random_arrays(odd_config, 0)
    change(arrays)
    with pytest.raises(ValueError, match=message):
        Decoder(odd_config, Params.from_arrays(arrays))


def test_positions_of_a_ragged_batch():
    """Each new token stands behind its own sequence's prefix."""
    batch = Batch.of([[5, 6, 7], [8], [9, 9]], [0, 10, 4])
    assert batch.positions().tolist() == [0, 1, 2, 10, 4, 5]
    assert (batch.num_tokens, batch.num_sequences, batch.starts.tolist()) == (6, 3, [0, 3, 4, 6])
