"""Batches: the shift, what counts, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from treadle_server.errors import InvalidRequestError
from treadle_server.training.batches import make_batch

IDS = [[1, 2, 3], [4, 5]]


def test_labels_are_shifted_inside() -> None:
    """Token t - 1 predicts label t; rows never predict each other's labels."""
    batch = make_batch(IDS, None, 10)
    assert batch.predicting.tolist() == [0, 1, 3]
    assert batch.targets.ids.tolist() == [2, 3, 5]


def test_ignored_labels_first_labels_and_weights_of_zero_do_not_count() -> None:
    """What is left keeps its own weight."""
    batch = make_batch(IDS, [[9, 2, -100], [9, 5]], 10, weights=[[1, 0, 1], [1, 0.5]])
    assert batch.targets.ids.tolist() == [5]
    assert batch.targets.weights.tolist() == [0.5]


def test_logprobs_come_back_where_the_labels_stood() -> None:
    """With zeros where none was counted."""
    batch = make_batch(IDS, [[-100, 2, -100], [4, 5]], 10)
    rows = batch.logprobs_by_row(np.array([-1.0, -2.0]))
    assert [row.tolist() for row in rows] == [[0, -1, 0], [0, -2]]


def test_arrays_serve_as_rows() -> None:
    """A rectangular batch may be one array."""
    assert make_batch(np.array([[1, 2], [3, 4]]), None, 10).targets.ids.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": []}, r"input_ids: must be rows of one token id at least, but has lengths \[\]"),
        ({"input_ids": [[1], []]}, r"input_ids: must be rows of one token id at least, but has lengths \[1, 0\]"),
        ({"input_ids": [[1, 10]]}, r"input_ids\[0\]\[1\]: must be 0 to 9, but is 10"),
        ({"input_ids": [[1, -100]]}, r"input_ids\[0\]\[1\]: must be 0 to 9, but is -100"),
        ({"input_ids": [[1.5, 2]]}, r"input_ids\[0\]: must be a list of whole numbers, but is float64"),
        ({"input_ids": [3, 4]}, r"input_ids\[0\]: must be a list of whole numbers, but is int64 of shape \(\)"),
        ({"labels": [[1, 2, 3], [4, 10]]}, r"labels\[1\]\[1\]: must be 0 to 9, or -100 to be ignored, but is 10"),
        ({"labels": [[1, 2, 3], [4, -1]]}, r"labels\[1\]\[1\]: must be 0 to 9, or -100 to be ignored, but is -1"),
        ({"labels": [[1, 2, 3]]}, r"labels: must have rows as long as those of input_ids, \[3, 2\], but has \[3\]"),
        ({"labels": [[1, 2], [4, 5]]}, r"labels: must have rows as long as those of input_ids, \[3, 2\]"),
        ({"labels": [[1, -100, -100], [4, -100]]}, "labels: must have one at least that counts: not -100"),
        ({"input_ids": [[1], [2]]}, "labels: must have one at least that counts"),
        ({"weights": [[0, 0, 0], [0, 0]]}, "labels: must have one at least that counts"),
        ({"weights": [[1, 1, -1], [1, 1]]}, r"weights: must be 0, or from 1e-12 to 1e\+12, but token 2"),
        ({"weights": [[1, 1, 1], [1, 1e-40]]}, r"weights: must be 0, or from 1e-12 to 1e\+12, but token 4"),
        ({"weights": [[1, 1e308, 1e308], [1, 1]]}, r"weights: must be 0, or from 1e-12 to 1e\+12, but token 1"),
        ({"weights": [[1, "x", 1], [1, 1]]}, "weights: must be lists of numbers, but could not convert"),
        ({"weights": 3}, "weights: must be a list of rows, but is 3"),
        ({"input_ids": None}, "input_ids: must be a list of rows, but is None"),
        ({"weights": [[1, 1], [1, 1]]}, "weights: must have rows as long as those of input_ids"),
        ({"logprobs": [[0, 0, 0], [0, float("nan")]]}, "logprobs: must be a finite number, but token 4"),
        ({"advantages": [[0, 0, 0]]}, "advantages: must have rows as long as those of input_ids"),
    ],
)
def test_a_bad_batch_is_refused_by_field_and_value(arguments: dict[str, Any], message: str) -> None:
    """The message says where it is wrong and what it may be."""
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        make_batch(**{"input_ids": IDS, "labels": None, "vocab_size": 10} | arguments)
