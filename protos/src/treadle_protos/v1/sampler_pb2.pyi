from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAMPLER_KIND_UNSPECIFIED: _ClassVar[SamplerKind]
    SAMPLER_KIND_MASK: _ClassVar[SamplerKind]
    SAMPLER_KIND_PENALTY: _ClassVar[SamplerKind]
    SAMPLER_KIND_TRANSFORM: _ClassVar[SamplerKind]
    SAMPLER_KIND_FILTER: _ClassVar[SamplerKind]
    SAMPLER_KIND_SELECT: _ClassVar[SamplerKind]

class PluginStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLUGIN_STATUS_UNSPECIFIED: _ClassVar[PluginStatus]
    PLUGIN_STATUS_ACTIVE: _ClassVar[PluginStatus]
    PLUGIN_STATUS_BLOCKED: _ClassVar[PluginStatus]
    PLUGIN_STATUS_FAILED: _ClassVar[PluginStatus]
    PLUGIN_STATUS_NOT_INSTALLED: _ClassVar[PluginStatus]
SAMPLER_KIND_UNSPECIFIED: SamplerKind
SAMPLER_KIND_MASK: SamplerKind
SAMPLER_KIND_PENALTY: SamplerKind
SAMPLER_KIND_TRANSFORM: SamplerKind
SAMPLER_KIND_FILTER: SamplerKind
SAMPLER_KIND_SELECT: SamplerKind
PLUGIN_STATUS_UNSPECIFIED: PluginStatus
PLUGIN_STATUS_ACTIVE: PluginStatus
PLUGIN_STATUS_BLOCKED: PluginStatus
PLUGIN_STATUS_FAILED: PluginStatus
PLUGIN_STATUS_NOT_INSTALLED: PluginStatus

class ListSamplersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSamplersResponse(_message.Message):
    __slots__ = ("samplers", "plugins")
    SAMPLERS_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    samplers: _containers.RepeatedCompositeFieldContainer[Sampler]
    plugins: _containers.RepeatedCompositeFieldContainer[Plugin]
    def __init__(self, samplers: _Optional[_Iterable[_Union[Sampler, _Mapping]]] = ..., plugins: _Optional[_Iterable[_Union[Plugin, _Mapping]]] = ...) -> None: ...

class Sampler(_message.Message):
    __slots__ = ("name", "kind", "plugin", "parameters_json_schema", "summary", "num_slow_calls")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOW_CALLS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: SamplerKind
    plugin: str
    parameters_json_schema: str
    summary: str
    num_slow_calls: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[SamplerKind, str]] = ..., plugin: _Optional[str] = ..., parameters_json_schema: _Optional[str] = ..., summary: _Optional[str] = ..., num_slow_calls: _Optional[int] = ...) -> None: ...

class Plugin(_message.Message):
    __slots__ = ("name", "distribution", "version", "status", "reason", "stages", "families", "losses", "optimizers", "backends")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    FAMILIES_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    distribution: str
    version: str
    status: PluginStatus
    reason: str
    stages: _containers.RepeatedScalarFieldContainer[str]
    families: _containers.RepeatedScalarFieldContainer[str]
    losses: _containers.RepeatedScalarFieldContainer[str]
    optimizers: _containers.RepeatedScalarFieldContainer[str]
    backends: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., distribution: _Optional[str] = ..., version: _Optional[str] = ..., status: _Optional[_Union[PluginStatus, str]] = ..., reason: _Optional[str] = ..., stages: _Optional[_Iterable[str]] = ..., families: _Optional[_Iterable[str]] = ..., losses: _Optional[_Iterable[str]] = ..., optimizers: _Optional[_Iterable[str]] = ..., backends: _Optional[_Iterable[str]] = ...) -> None: ...
