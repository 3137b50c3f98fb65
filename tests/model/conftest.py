"""Decoders of the reference models, and a wide random one whose sizes fit no kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from treadle_plugin_api.backend import Adapter, LowRank
from treadle_plugin_api.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    PositionsConfig,
    RotaryConfig,
)
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.model.adapters import adaptable
from treadle_server.model.decoder import Decoder
from treadle_server.model.params import Params, random_arrays

LoadDecoder = Callable[..., Decoder]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `any_model` with the name of every reference model."""
    if "any_model" in metafunc.fixturenames:
        golden = Path(__file__).parents[1] / "golden"
        metafunc.parametrize("any_model", sorted(path.stem for path in (golden / "parity").glob("*.npz")))


@pytest.fixture(scope="session")
def load_decoder(golden: Path) -> LoadDecoder:
    """Loads a reference model by name; keyword arguments are the decoder's."""

    @functools.cache
    def load(name: str, **options: str) -> Decoder:
        with load_checkpoint(golden / "models" / name) as checkpoint:
            return Decoder(checkpoint.config, checkpoint.params, **options)

    return load


@pytest.fixture(scope="session")
def parity(golden: Path) -> Callable[[str], dict[str, np.ndarray]]:
    """Reads a reference model's expected outputs by name."""
    return lambda name: dict(np.load(golden / "parity" / f"{name}.npz"))


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., Adapter]:
    """Draws an adapter of every matrix that can have one, or of those whose names contain a text."""

    def make(config: DecoderConfig, dtype: str = "float64", seed: int = 0, rank: int = 3, only: str = "") -> Adapter:
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> np.ndarray:
            return (0.3 * rng.standard_normal(shape)).astype(dtype)

        shapes = {name: shape for name, shape in adaptable(config).items() if only in name}
        deltas = {name: LowRank(draw(rank, n), draw(m, rank), 0.5 + seed) for name, (m, n) in shapes.items()}
        return Adapter(f"adapter {seed}", deltas)

    return make


@pytest.fixture(scope="session")
def read_arrays(golden: Path) -> Callable[[str], tuple[DecoderConfig, dict[str, np.ndarray]]]:
    """Reads a reference model's config and parameters, in float64, by name."""

    def read(name: str) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
        with load_checkpoint(golden / "models" / name) as checkpoint:
            arrays = {name: np.empty(weight.shape, np.float64) for name, weight in checkpoint.params.items()}
            for name, array in arrays.items():
                checkpoint.params[name].read_into(array)
            return checkpoint.config, arrays

    return read


@pytest.fixture(scope="session")
def merge() -> Callable[[Mapping[str, np.ndarray], Adapter | None], Params]:
    """Adds an adapter's changes to a model's parameters."""

    def merged(arrays: Mapping[str, np.ndarray], adapter: Adapter | None) -> Params:
        deltas = {} if adapter is None else adapter.deltas
        changed = {name: arrays[name] + one.scale * one.b @ one.a for name, one in deltas.items()}
        return Params.from_arrays({**arrays, **changed})

    return merged


@pytest.fixture(scope="session")
def odd_config() -> DecoderConfig:
    """Sizes that are multiples of nothing a kernel likes; grouped queries; 300 positions."""
    return DecoderConfig(
        model_type="llama",
        vocab_size=523,
        dim=150,
        num_layers=2,
        context_length=300,
        norm=NormConfig(kind="rms", eps=1e-5),
        positions=PositionsConfig(kind="rotary", rotary=RotaryConfig()),
        attention=AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=26, scale=26**-0.5),
        mlp=MlpConfig(hidden_dim=333, activation="silu", gated=True),
    )


@pytest.fixture(scope="session")
def odd_decoder(odd_config: DecoderConfig) -> LoadDecoder:
    """Makes a decoder of the odd sizes; keyword arguments are the decoder's."""
    params = Params.from_arrays(random_arrays(odd_config, seed=3, scale=0.1))
    return functools.cache(lambda **options: Decoder(odd_config, params, **options))
