"""Compute backends that plugins bring: registered, listed, chosen by name, and refused where they do not fit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from treadle_plugin_api import hookimpl
from treadle_plugin_api.backend_factory import BackendFactory
from treadle_server import LanguageModel
from treadle_server.errors import ConfigError
from treadle_server.model import decoder
from treadle_server.model.decoder import make_backend
from treadle_server.model.numpy_backend import NumpyBackend
from treadle_server.plugins import PluginManager
from treadle_server.plugins.discovery import PluginSource


class Counting(NumpyBackend):
    """NumPy's backend that counts its products."""

    name = "counting"
    num_products = 0

    def linear(self, x, linear, out):
        """Count, then multiply as ever."""
        self.num_products += 1
        return super().linear(x, linear, out)


COUNTING = BackendFactory("counting", lambda dtype, numerics: Counting(dtype))


def plugin(*backends: object, name: str = "backends") -> PluginSource:
    """A foreign plugin that registers the given backends."""

    @hookimpl
    def treadle_register_backends(register):
        for backend in backends:
            register(backend)

    module = SimpleNamespace(treadle_register_backends=treadle_register_backends)
    return PluginSource(name, f"dist-{name}", "1.0", lambda: module)


def test_a_backend_of_a_plugin_computes(built_in, tiny_folder):
    """A model loaded with the plugin's name runs on its backend."""
    manager = PluginManager([built_in, plugin(COUNTING)], strict=True)
    with (
        LanguageModel.load(tiny_folder, backend="counting", plugins=manager) as model,
        LanguageModel.load(tiny_folder, backend="numpy", plugins=manager) as other,
    ):
        np.testing.assert_array_equal(model.logits([5, 6, 7]), other.logits([5, 6, 7]))
        assert (model.decoder.backend.name, other.decoder.backend.name) == ("counting", "numpy")
        assert model.decoder.backend.num_products > 0


def test_backends_are_listed(built_in):
    """The status of the plugin has the backend, and the registry has it by name."""
    manager = PluginManager([built_in, plugin(COUNTING)], strict=True)
    status = next(one for one in manager.plugins if one.name == "backends")
    assert [one.name for one in status.backends] == ["counting"]
    assert status.backends[0].owner == "backend 'counting' of plugin 'backends' (dist-backends)"
    assert manager.backends.parts() == {"counting": COUNTING}


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (BackendFactory("numpy", lambda dtype, numerics: None), "'numpy' is built in"),
        (BackendFactory("My Backend", lambda dtype, numerics: None), "lower-case"),
        (BackendFactory("mine", 3), "where a function belongs"),
        (BackendFactory("mine", print, dtypes=("float16",)), "has dtypes ('float16',), not a tuple of float32"),
        (BackendFactory("mine", print, keeps=["bfloat16"]), "has keeps"),
        ("mine", "is no treadle_plugin_api.backend_factory.BackendFactory"),
    ],
)
def test_bad_backends_are_refused(built_in, backend, reason):
    """A registration that breaks the contract makes the plugin fail, with its reason."""
    manager = PluginManager([built_in, plugin(backend)])
    assert reason in next(one for one in manager.plugins if one.name == "backends").reason
    assert manager.backends.names == ()


def test_two_plugins_cannot_share_a_name(built_in):
    """Numbers must not depend on which of two was found first."""
    manager = PluginManager([built_in, plugin(COUNTING, name="one"), plugin(COUNTING, name="two")])
    assert [one.status for one in manager.plugins if one.name in ("one", "two")] == ["failed", "failed"]


def test_an_unknown_backend_names_those_there_are():
    """The error lists what could be asked for."""
    with pytest.raises(ConfigError, match="'mine'; available: auto, numpy, counting"):
        make_backend("mine", "float32", "fast", {"counting": COUNTING})


def test_a_number_type_that_the_backend_lacks_is_refused():
    """float64 is not quietly computed in float32."""
    with pytest.raises(ConfigError, match="'counting' computes in float32, not in float64"):
        make_backend("counting", "float64", "fast", {"counting": COUNTING})


def test_a_backend_that_cannot_be_made_is_a_readable_error():
    """What a plugin's factory raises comes with the backend's name."""

    def broken(dtype, numerics):
        raise RuntimeError("no such instruction")

    with pytest.raises(ConfigError, match="'broken' cannot be made: RuntimeError: no such instruction"):
        make_backend("broken", "float32", "fast", {"broken": BackendFactory("broken", broken)})


def test_auto_takes_the_preferred_one_where_it_suits(monkeypatch):
    """`auto` is the preferred backend when it is there and has the number type, NumPy's otherwise."""
    monkeypatch.setattr(decoder, "AUTO_BACKEND", "counting")
    plugged = {"counting": COUNTING}
    cases = [("float32", plugged), ("float64", plugged), ("float32", {})]
    names = [make_backend("auto", dtype, "fast", others).name for dtype, others in cases]
    assert names == ["counting", "numpy", "numpy"]


def test_auto_falls_back_on_numpy(monkeypatch, caplog):
    """Where the preferred backend cannot be made, NumPy's computes, and the log says why."""

    def broken(dtype, numerics):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(decoder, "AUTO_BACKEND", "broken")
    assert make_backend("auto", "float32", "fast", {"broken": BackendFactory("broken", broken)}).name == "numpy"
    assert "no such instruction" in caplog.text


KEEPING = BackendFactory("keeping", lambda dtype, numerics: Counting(dtype), keeps=("int8",))


@pytest.mark.parametrize("name", ["auto", "keeping"])
def test_a_quantised_model_gets_a_backend_that_multiplies_with_it(name):
    """By its name, or as `auto`, which otherwise takes NumPy's."""
    plugged = {"counting": COUNTING, "keeping": KEEPING}
    assert make_backend(name, "float32", "fast", plugged, quantize="int8").name == "counting"


@pytest.mark.parametrize(
    ("name", "quantize", "plugged", "message"),
    [
        ("counting", "int8", [COUNTING, KEEPING], "int8, but .* 'counting' .* in float32; keeping does in float32"),
        ("keeping", "int4", [COUNTING, KEEPING], "quantize is int4, but .* 'keeping' .* no installed one does"),
        ("auto", "int8", [COUNTING], "quantize is int8, but .* 'auto' .* treadle-kernels has one"),
        ("numpy", "int8", [KEEPING], "quantize is int8, but the compute backend 'numpy' does not take it"),
    ],
)
def test_a_backend_that_widens_is_refused(name, quantize, plugged, message):
    """The error names the option, and the backends that could be asked for."""
    with pytest.raises(ConfigError, match=message):
        make_backend(name, "float32", "fast", {one.name: one for one in plugged}, quantize=quantize)


def test_an_unknown_number_of_bits_is_refused():
    """The error says which there are."""
    with pytest.raises(ValueError, match="quantize must be int8 or int4, but is 'int2'"):
        make_backend("auto", "float32", "fast", quantize="int2")
