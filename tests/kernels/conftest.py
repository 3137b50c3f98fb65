"""Decoders on the compiled backend; everything here is skipped where treadle-kernels is not installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from treadle_plugin_api.backend import Weight
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
from treadle_server.plugins import PluginManager
from treadle_server.plugins.discovery import BUILT_IN_DISTRIBUTION, PluginSource

INSTALLED = find_spec("treadle_kernels") is not None and find_spec("numba") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it where there is nothing to test."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.kernels)
            if not INSTALLED:
                reason = "treadle-kernels is not installed: pip install ./plugins/kernels"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def kernels():
    """The backend with two threads, compiled before as a server has it compiled."""
    from treadle_kernels.backend import KernelBackend
    from treadle_kernels.warm_up import ensure_compiled

    ensure_compiled()
    return KernelBackend(num_threads=2)


@pytest.fixture(scope="session")
def plugins(kernels) -> PluginManager:
    """The samplers, and the compiled backend by the plugin's door."""
    import treadle_kernels.plugin
    import treadle_samplers.plugin

    sources = [
        PluginSource("samplers", BUILT_IN_DISTRIBUTION, "0.1.0", lambda: treadle_samplers.plugin),
        PluginSource("kernels", "treadle-kernels", "0.1.0", lambda: treadle_kernels.plugin),
    ]
    return PluginManager(sources, strict=True)


@pytest.fixture(scope="session")
def training():
    """The backend that trains, compiled before as a trainer has it compiled."""
    from treadle_kernels.plugin import make_training

    return make_training("float32")


@pytest.fixture(scope="session")
def load_decoder(golden: Path, kernels) -> Callable[..., Decoder]:
    """Loads a reference model by name, on the compiled backend."""

    @functools.cache
    def load(name: str) -> Decoder:
        with load_checkpoint(golden / "models" / name) as checkpoint:
            return Decoder(checkpoint.config, checkpoint.params, backend=kernels)

    return load


@pytest.fixture(scope="session")
def odd_config() -> DecoderConfig:
    """A decoder of the common kind whose sizes no vector and no tile divides."""
    return DecoderConfig(
        model_type="llama",
        vocab_size=523,
        dim=150,
        num_layers=2,
        context_length=300,
        norm=NormConfig(kind="rms", eps=1e-5),
        positions=PositionsConfig(kind="rotary", rotary=RotaryConfig()),
        attention=AttentionConfig(num_heads=10, num_kv_heads=2, head_dim=26, scale=26**-0.5),
        mlp=MlpConfig(hidden_dim=333, activation="silu", gated=True),
    )


@pytest.fixture(scope="session")
def odd_params(odd_config: DecoderConfig) -> Callable[[str], dict[str, Weight]]:
    """Draws the odd decoder's parameters in a stored format."""
    import ml_dtypes

    types = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

    def draw(stored: str, config: DecoderConfig = odd_config) -> Params:
        arrays = random_arrays(config, seed=3, scale=0.1)
        return Params.from_arrays({name: array.astype(types[stored]) for name, array in arrays.items()})

    return draw
