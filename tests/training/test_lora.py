"""LoRA: what is trained, what stays, and the files that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from treadle_server import LanguageModel, LoraConfig, Trainer
from treadle_server.checkpoints.adapters import read_adapter, write_adapter
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.errors import CheckpointError, InvalidRequestError, TrainingError
from treadle_server.training.batches import make_batch
from treadle_server.training.lora import new_adapter

IDS = [[5, 9, 2, 7, 7, 1], [3, 8, 4], [6, 6, 1, 0]]
# A matrix by itself, transposed, fused head by head, fused one after the other, an expert.
MODELS = ["models/llama_plain", "models/gpt2", "models/gpt_neox", "models/phi3", "models/mixtral"]


def train(one: Trainer, num_steps: int) -> None:
    """Do steps whose batches depend on the step alone."""
    for _ in range(num_steps):
        one.forward_backward(np.random.default_rng(one.step).integers(0, 40, (2, 6)))
        one.optim_step(lr=1e-2, weight_decay=0.1, grad_clip_norm=1.0)


def same(first: Trainer, second: Trainer) -> bool:
    """Tell whether two trainers have the same parameters, to the bit."""
    left, right = first.parameters(), second.parameters()
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_loss(load_trainer: Any, name: str) -> None:
    """Numeric slopes along a random direction in each tensor, A shared by fused matrices included."""
    one = load_trainer(name, dtype="float64", lora=LoraConfig(rank=2, alpha=3))
    train(one, 2)  # away from B = 0, where A has no gradient
    one.forward_backward(IDS)
    gradients = one.gradients()
    one.zero_gradients()
    rng = np.random.default_rng(0)
    for entry in one._trained.table[:4]:
        gradient = gradients[entry.file_name]
        directions = {name: rng.standard_normal(one._trained.arrays[name].shape) for name in entry.params}
        losses = []
        for step in (1e-5, -1e-5):
            for name, direction in directions.items():
                one._trained.arrays[name] += step * direction
            losses.append(one.compute_loss(IDS).loss)
            for name, direction in directions.items():
                one._trained.arrays[name] -= step * direction
        moved = one._to_file(one._trained.arrays | directions)[entry.file_name]
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx((gradient * moved).sum(), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_only_the_adapter_changes_and_the_loss_falls(load_trainer: Any, name: str) -> None:
    """It begins with the model's own loss; the model's arrays stay to the bit."""
    bare, one = load_trainer(name), load_trainer(name, lora=LoraConfig(rank=4))
    before = {name: array.copy() for name, array in one._decoder.parameters.items()}
    losses = []
    for _ in range(4):
        losses.append(one.forward_backward(IDS).loss)
        one.optim_step(lr=1e-2)
    assert losses[0] == pytest.approx(bare.compute_loss(IDS).loss, abs=1e-6)
    assert losses == sorted(losses, reverse=True)
    assert all(np.array_equal(array, before[name]) for name, array in one._decoder.parameters.items())


def test_names_are_those_of_peft(load_trainer: Any) -> None:
    """Of parameters and gradients; a matrix of the file has one pair."""
    one = load_trainer("models/gpt2", lora=LoraConfig(rank=3, target_modules=["c_attn"]))
    names = {f"base_model.model.transformer.h.{n}.attn.c_attn.lora_{ab}.weight" for n in (0, 1) for ab in "AB"}
    assert one.parameters().keys() == names
    one.forward_backward(IDS)
    assert one.gradients().keys() == names
    shapes = {name[-8]: array.shape for name, array in one.parameters().items()}
    dim = one.config.dim
    assert shapes == {"A": (3, dim), "B": (3 * dim, 3)}
    assert one.num_trainable_parameters == 2 * (3 * dim + 9 * dim) < one.num_parameters


def test_it_begins_as_peft_does(golden: Path) -> None:
    """B is 0 and A uniform in what He et al. give for its inputs; the seed and the name decide, not what is beside."""
    with load_checkpoint(golden / "models" / "llama_plain") as checkpoint:
        adapters = [
            new_adapter(checkpoint, LoraConfig(rank=8, seed=seed, target_modules=targets), np.float32)
            for seed, targets in ((1, ()), (1, ["q_proj"]), (2, ()))
        ]
    name = "layers.1.attention.q.weight"
    whole, part, other = (adapter.deltas[name] for adapter in adapters)
    assert not whole.b.any()
    bound = whole.a.shape[1] ** -0.5
    assert 0.9 * bound < np.abs(whole.a).max() <= bound
    assert abs(whole.a.mean()) < 0.1 * bound
    assert np.array_equal(whole.a, part.a)
    assert not np.array_equal(whole.a, other.a)
    assert whole.scale == 2.0


@pytest.mark.parametrize("name", MODELS)
def test_resuming_is_exact(golden: Path, load_trainer: Any, tmp_path: Path, name: str) -> None:
    """Five steps, a save, five more from the files: the same bits as ten; also where the files are rounded."""
    for dtype in (None, "bfloat16"):
        straight, first = (load_trainer(name, lora=LoraConfig(rank=3, alpha=5)) for _ in range(2))
        train(straight, 10)
        train(first, 5)
        first.save(tmp_path / "saved", dtype=dtype)
        second = Trainer.load(golden / name, adapter=tmp_path / "saved")
        second.load_state(tmp_path / "saved")
        train(second, 5)
        assert second.step == 10
        assert same(straight, second)


def test_a_state_takes_the_place_of_a_new_adapter(load_trainer: Any, tmp_path: Path) -> None:
    """A trainer with the same settings goes on from it; one with others refuses."""
    first, second = (load_trainer(lora=LoraConfig(rank=3, seed=seed)) for seed in (0, 1))
    train(first, 2)
    first.save(tmp_path / "saved")
    second.load_state(tmp_path / "saved")
    assert same(first, second)
    for lora in (LoraConfig(rank=4), LoraConfig(rank=3, alpha=1.0), LoraConfig(rank=3, target_modules=["q_proj"])):
        with pytest.raises(CheckpointError, match="is another adapter"):
            load_trainer(lora=lora).load_state(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"has no config\.json|holds only an adapter"):
        load_trainer().load_state(tmp_path / "saved")


@pytest.mark.parametrize("name", ["models/llama_plain", "models/gpt2", "models/gpt_neox"])
def test_a_merged_model_is_the_model_with_its_adapter(load_trainer: Any, tmp_path: Path, name: str) -> None:
    """In float64 and rounded; it is a whole model, and no folder is written over."""
    one = load_trainer(name, dtype="float64", lora=LoraConfig(rank=3))
    train(one, 3)
    expected = one.compute_loss(IDS).loss
    one.save_merged(tmp_path / "merged")
    assert Trainer.load(tmp_path / "merged", dtype="float64").compute_loss(IDS).loss == pytest.approx(
        expected, abs=1e-12
    )
    one.save_merged(tmp_path / "rounded", dtype="bfloat16")
    assert Trainer.load(tmp_path / "rounded").compute_loss(IDS).loss == pytest.approx(expected, abs=0.02)
    one.save(tmp_path / "saved")
    for there in ("merged", "saved"):
        with pytest.raises(CheckpointError, match=f"{there}: exists; a merged model replaces nothing"):
            one.save_merged(tmp_path / there)


def test_a_merged_model_is_served(tiny_folder: Path, tmp_path: Path) -> None:
    """A language model that loads the folder gives the trainer's probabilities."""
    one = Trainer.load(tiny_folder, lora=LoraConfig(rank=2))
    train(one, 2)
    one.save_merged(tmp_path / "merged")
    with LanguageModel.load(tmp_path / "merged") as model:
        logits = model.logits(IDS[0]).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert np.allclose(one.compute_loss(IDS).logprobs[0][1:], logprobs[np.arange(5), IDS[0][1:]], atol=1e-4)


def test_training_goes_on_from_an_adapter_of_peft(golden: Path, load_trainer: Any, tmp_path: Path) -> None:
    """Ranks and scales of its own for a module are kept, and what was not chosen has none."""
    folder = golden / "adapters" / "phi3"
    one = load_trainer("models/phi3", adapter=folder)
    train(one, 1)
    one.save(tmp_path / "saved")
    with load_checkpoint(golden / "models" / "phi3") as checkpoint:
        before, after = (read_adapter(path, checkpoint) for path in (folder, tmp_path / "saved"))
    assert before.deltas.keys() == after.deltas.keys()
    for name, delta in before.deltas.items():
        assert delta.scale == after.deltas[name].scale
        assert delta.b.shape == after.deltas[name].b.shape
        assert not np.array_equal(delta.b, after.deltas[name].b)


def test_frozen_and_spared_tensors(load_trainer: Any) -> None:
    """Patterns are of PEFT's names."""
    lora = LoraConfig(rank=2)
    one = load_trainer(optimizer="sgd", lora=lora, frozen=("*.lora_A.weight",), no_decay=("*.q_proj.lora_B.weight",))
    train(one, 1)
    before = one.parameters()
    one.forward_backward(IDS)
    gradients = one.gradients()
    one.optim_step(lr=1.0, weight_decay=1.0)
    for name, array in one.parameters().items():
        if ".lora_A." in name:
            assert name not in gradients
            assert np.array_equal(array, before[name])
        else:
            kept = before[name] if ".q_proj." in name else 0
            assert np.allclose(array, kept - gradients[name], atol=1e-6), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"^lora\.rank: must be 1 to 4096"),
        ({"rank": 2.0}, r"^lora\.rank"),
        ({"alpha": 0}, r"^lora\.alpha: must be a finite number over 0"),
        ({"alpha": "8"}, r"^lora\.alpha"),
        ({"seed": -1}, r"^lora\.seed"),
        ({"dropout": 0.1}, r"^lora\.dropout: must be 0"),
        ({"target_modules": "q_proj"}, r"^lora\.target_modules: must be a sequence of names"),
        ({"target_modules": ["q_proj", "c_attn"]}, r"lora\.target_modules: .*such as down_proj, .*'c_attn' names none"),
        ({"target_modules": ["lm_head"]}, r"'lm_head' names none"),
    ],
)
def test_bad_settings_are_named(load_trainer: Any, settings: dict[str, Any], message: str) -> None:
    """With what was expected."""
    with pytest.raises(InvalidRequestError, match=message):
        load_trainer(lora=LoraConfig(**settings))


def test_a_new_adapter_beside_an_old_one_is_refused(golden: Path, load_trainer: Any) -> None:
    """One or the other."""
    with pytest.raises(InvalidRequestError, match=r"^lora: must not be given beside adapter"):
        load_trainer("models/phi3", lora=LoraConfig(), adapter=golden / "adapters" / "phi3")


def test_a_nan_in_an_adapter_is_named(load_trainer: Any) -> None:
    """The loss is refused."""
    one = load_trainer(lora=LoraConfig(rank=2))
    one._trained.arrays["layers.1.mlp.down.lora_B"][0, 0] = np.nan
    with pytest.raises(TrainingError, match=r"parameter base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"):
        one.forward_backward(IDS)


def test_an_adapter_of_a_request_is_the_one_that_was_trained(load_trainer: Any, golden: Path, tmp_path: Path) -> None:
    """Written, read and applied by a decoder for inference, it gives the trainer's log-probabilities."""
    one = load_trainer("models/gpt_neox", lora=LoraConfig(rank=2))
    train(one, 2)
    one.save_weights(tmp_path / "published")
    with load_checkpoint(golden / "models" / "gpt_neox") as checkpoint:
        adapter = read_adapter(tmp_path / "published", checkpoint)
        write_adapter(tmp_path, adapter, checkpoint)
    batch = make_batch(IDS, None, one.config.vocab_size, adapter=adapter)
    hidden = one._decoder.forward(batch.batch)
    logits = one._decoder.head(hidden[:5]).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert np.allclose(one.compute_loss(IDS).logprobs[0][1:], logprobs[np.arange(5), IDS[0][1:]], atol=1e-5)
