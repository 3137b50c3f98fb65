"""Everything a sampler author imports: the two bases, the hook marker, and the primitives all stages share.

    from treadle_plugin_api import Field, SamplingContext, Stage, hookimpl, keep, top_ids

The conformance suite is `treadle_plugin_api.testing.check_stage`.
"""

from pydantic import Field, PrivateAttr

from treadle_plugin_api.context import ModelInfo, SamplingContext
from treadle_plugin_api.extras import MissingExtraError
from treadle_plugin_api.hookspecs import hookimpl, hookspec
from treadle_plugin_api.logits import MASS_SLACK, Logits, finite, keep, softmax64, top_ids
from treadle_plugin_api.observers import RequestInfo, RequestResult
from treadle_plugin_api.sampling import API_VERSION, Kind, Knob, Select, Stage

__all__ = [
    "API_VERSION",
    "MASS_SLACK",
    "Field",
    "Kind",
    "Knob",
    "Logits",
    "MissingExtraError",
    "ModelInfo",
    "PrivateAttr",
    "RequestInfo",
    "RequestResult",
    "SamplingContext",
    "Select",
    "Stage",
    "finite",
    "hookimpl",
    "hookspec",
    "keep",
    "softmax64",
    "top_ids",
]
