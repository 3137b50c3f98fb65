"""What sampler authors import."""

import subprocess
import sys

import treadle_plugin_api


def test_public_names():
    """The top level is small, and a name leaves it only with a new version of the contract."""
    assert sorted(treadle_plugin_api.__all__) == [
        "API_VERSION", "Field", "Kind", "Knob", "Logits", "MASS_SLACK", "MissingExtraError", "ModelInfo", "PrivateAttr",
        "RequestInfo", "RequestResult", "SamplingContext", "Select", "Stage", "finite", "hookimpl", "hookspec", "keep",
        "softmax64", "top_ids",
    ]  # fmt: skip
    assert all(hasattr(treadle_plugin_api, name) for name in treadle_plugin_api.__all__)


def test_importing_it_loads_no_server():
    """An author's tests need neither the server nor gRPC."""
    code = "import sys, treadle_plugin_api.testing; print(sorted({n.split('.')[0] for n in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "treadle_server" not in loaded
    assert "grpc" not in loaded
