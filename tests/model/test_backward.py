"""The backward pass: adapters' gradients, gradients that nobody wants, layers that are run again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from treadle_plugin_api.backend import Adapter, Array, Batch, LowRank
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.model import ops_backward, primitives
from treadle_server.model.adapters import lora_arrays
from treadle_server.model.params import Params, random_arrays
from treadle_server.model.trainable import TrainableDecoder
from treadle_server.testing import check_grads

FAMILIES = ("gpt2", "gpt_neox", "phi3", "gemma", "gemma2", "falcon_new", "cohere", "mixtral", "qwen2_moe", "olmo2")
IDS = ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9])


def gradients(decoder: TrainableDecoder, batch: Batch, wanted: Collection[str] | None = None) -> dict[str, Array]:
    """Return the gradients, without the head's, of a loss that weighs hidden states at random."""
    saved: dict[str, Array] = {}
    hidden = decoder.forward_saving(batch, saved)
    return decoder.backward(saved, np.random.default_rng(1).standard_normal(hidden.shape).astype(hidden.dtype), wanted)


@pytest.mark.parametrize("model", FAMILIES)
def test_an_adapters_gradients_follow_from_those_of_the_merged_matrices(read_arrays, merge, make_adapter, model):
    """DA = scale B' dW and dB = scale dW A', and every other gradient is that of the merged model."""
    config, arrays = read_arrays(model)
    adapter = make_adapter(config)
    batch = Batch.of(IDS)
    expected = gradients(TrainableDecoder(config, merge(arrays, adapter), dtype="float64"), batch)
    largest = max(float(np.abs(one).max()) for one in expected.values())
    for name, delta in adapter.deltas.items():
        stem, dweight = name.removesuffix(".weight"), delta.scale * expected[name]
        expected |= {f"{stem}.lora_A": delta.b.T @ dweight, f"{stem}.lora_B": dweight @ delta.a.T}
    decoder = TrainableDecoder(config, Params.from_arrays(arrays), dtype="float64")
    found = gradients(decoder, replace(batch, adapters=(adapter,) * 3))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-10 * largest, err_msg=name)


@pytest.mark.parametrize("model", ["gpt2", "falcon_new", "qwen2_moe"])
def test_gradients_of_an_adapter_that_some_rows_have(read_arrays, make_adapter, model):
    """Against finite differences, beside rows without one."""
    config, arrays = read_arrays(model)
    decoder = TrainableDecoder(config, Params.from_arrays(arrays), dtype="float64")
    drawn = make_adapter(config, only="layers.0.")
    names = list(lora_arrays(drawn))

    def batch_of(*moved: Array) -> Batch:
        a_and_b = zip(moved[::2], moved[1::2], strict=True)
        deltas = {name: LowRank(*pair, 0.5) for name, pair in zip(drawn.deltas, a_and_b, strict=True)}
        adapter = Adapter("moved", deltas)
        return Batch.of(IDS, adapters=[adapter, None, adapter])

    def backward_of(dy: Array, *moved: Array) -> list[Array]:
        saved: dict[str, Array] = {}
        decoder.forward_saving(batch_of(*moved), saved)
        grads = decoder.backward(saved, dy, names)
        return [grads[name] for name in names]

    check_grads(lambda *moved: decoder.forward(batch_of(*moved)), backward_of, *lora_arrays(drawn).values())


@pytest.fixture
def odd_trainable(odd_config, make_adapter):
    """A decoder of the odd sizes and a batch, with an adapter of the last layer's q and v."""
    decoder = TrainableDecoder(odd_config, Params.from_arrays(random_arrays(odd_config, seed=3, scale=0.1)))
    whole = make_adapter(odd_config, "float32")
    deltas = {name: whole.deltas[name] for name in ("layers.1.attention.q.weight", "layers.1.attention.v.weight")}
    return decoder, Batch.of(IDS, adapters=[Adapter("small", deltas)] * 3)


@pytest.mark.parametrize(
    "wanted",
    [
        ["embedding.weight"],
        ["layers.0.attention.k.weight", "layers.1.mlp.gate.weight"],
        ["layers.1.attention.v.lora_A", "layers.0.attention_norm.weight"],
        ["final_norm.weight", "head.weight"],
        [],
    ],
)
def test_only_wanted_gradients_are_returned(odd_trainable, wanted):
    """They are those of a pass that makes all; a head's own come from elsewhere."""
    decoder, batch = odd_trainable
    whole, found = gradients(decoder, batch), gradients(decoder, batch, wanted)
    assert sorted(found) == sorted(set(wanted) - {"head.weight"})
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, whole[name], rtol=0, atol=1e-5 * np.abs(whole[name]).max())


def test_frozen_matrices_cost_no_product_and_layers_below_the_lowest_wanted_none_at_all(odd_trainable, monkeypatch):
    """With an adapter in the second of two layers alone, no matrix has a gradient and the first layer has no pass."""
    decoder, batch = odd_trainable
    products, passes = [], []
    monkeypatch.setattr(ops_backward, "linear_weight_backward", lambda x, dy: products.append(dy.T @ x) or products[-1])
    attend = primitives.attention_backward
    monkeypatch.setattr(primitives, "attention_backward", lambda *args: passes.append(1) or attend(*args))
    found = gradients(decoder, batch, lora_arrays(batch.adapters[0]))
    assert len(found) == 4
    assert (len(products), len(passes)) == (0, len(IDS))
    gradients(decoder, batch)
    assert (len(products), len(passes)) == (2 * 4, 3 * len(IDS))


def test_a_name_that_no_parameter_has_is_refused(odd_trainable):
    """Also an adapter's that the batch does not have."""
    decoder, batch = odd_trainable
    for name in ("layers.9.attention.q.weight", "layers.0.attention.q.lora_A"):
        with pytest.raises(ValueError, match=f"no parameter is named {name}"):
            gradients(decoder, batch, ["embedding.weight", name])


def test_a_batch_with_two_adapters_is_not_trained_on(odd_trainable, make_adapter, odd_config):
    """Their gradients would have the same names."""
    decoder, batch = odd_trainable
    adapters = (batch.adapters[0], None, make_adapter(odd_config, "float32"))
    with pytest.raises(ValueError, match="must share one adapter"):
        decoder.forward_saving(replace(batch, adapters=adapters), {})


def test_head_gradients_that_nobody_wants_are_not_made(load_decoder, golden):
    """What is missing in the mapping is left out; the gradient of the hidden states is the same."""
    with load_checkpoint(golden / "models" / "opt_projected") as checkpoint:
        decoder = TrainableDecoder(checkpoint.config, checkpoint.params)
    hidden = decoder.forward(Batch.of(IDS))
    dlogits = np.random.default_rng(2).standard_normal((len(hidden), decoder.config.vocab_size)).astype(np.float32)
    whole = {name: np.zeros_like(decoder.parameters[name]) for name in decoder.head_parameters()}
    expected = decoder.head_backward(hidden, dlogits, whole)
    some = {"embedding_out.weight": np.zeros_like(decoder.parameters["embedding_out.weight"])}
    assert np.array_equal(decoder.head_backward(hidden, dlogits, some), expected)
    assert np.array_equal(some["embedding_out.weight"], whole["embedding_out.weight"])
    assert some.keys() < whole.keys()


# ---- activation recomputation ---------------------------------------------------------------------------------------


def test_running_layers_again_changes_no_bit_of_a_gradient(golden, make_adapter, any_model):
    """Every family, ragged, with an adapter on some rows; the saved arrays are gone afterwards."""
    with load_checkpoint(golden / "models" / any_model) as checkpoint:
        usual, again = (TrainableDecoder(checkpoint.config, checkpoint.params, recompute=one) for one in (False, True))
    batch = Batch.of(IDS, adapters=[make_adapter(usual.config, "float32"), None, None])
    expected, found = gradients(usual, batch), gradients(again, batch)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize(("recompute", "floats"), [(False, 150 + 150 + 10 * 26 + 6 * 26 + 2 * 333), (True, 150)])
def test_what_is_kept_of_a_layer(odd_config, recompute, floats):
    """The stream twice, q, k and v, the heads' outputs, gate and up; with recompute the stream once. Never twice."""
    params = Params.from_arrays(random_arrays(odd_config, seed=3))
    decoder, saved = TrainableDecoder(odd_config, params, recompute=recompute), {}
    hidden = decoder.forward_saving(Batch.of([list(range(100))]), saved)
    kept = {name: array for name, array in saved.items() if name.startswith("layers.")}
    assert sum(array.nbytes for array in kept.values()) == odd_config.num_layers * 100 * floats * 4
    decoder.backward(saved, hidden)
    assert not saved
