"""ALiBi's slopes and biases by hand."""

from __future__ import annotations

import numpy as np
from treadle_server.model.alibi import Alibi, alibi_slopes, round_to_bfloat16


def test_slopes_of_a_power_of_two_are_a_geometric_series():
    """Eight heads have the slopes 1/2, 1/4 ... 1/256 (section 3 of the paper)."""
    np.testing.assert_allclose(alibi_slopes(8), 0.5 ** np.arange(1, 9))


def test_other_numbers_of_heads_take_every_other_slope_of_the_next_power():
    """Twelve heads have the eight slopes and, of sixteen heads, the first, third, fifth and seventh."""
    np.testing.assert_allclose(alibi_slopes(12), [*alibi_slopes(8), *alibi_slopes(16)[:8:2]])


def test_biases_fall_with_the_distance():
    """A query meets itself without a bias and a key three tokens back with three slopes less."""
    biases = Alibi.of(2, scale=0.5).biases(np.array([7]), np.array([4, 7]))
    np.testing.assert_allclose(biases, -0.5 * alibi_slopes(2)[:, None, None] * np.array([[[3, 0]]]))


def test_rounding_to_bfloat16_is_to_the_nearest_even():
    """The result has 8 significant bits, ties going to the even one."""
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 0.1, -257.0])
    np.testing.assert_array_equal(round_to_bfloat16(x), [1.0, 1.0, 1 + 2**-6, 0.10009765625, -256.0])
