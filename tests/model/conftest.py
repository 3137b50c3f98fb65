"""Decoders of the reference models, and a wide random one whose sizes fit no kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from treadle_plugin_api.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    MlpConfig,
    NormConfig,
    PositionsConfig,
    RotaryConfig,
)
from treadle_server.checkpoints.loading import load_checkpoint
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
