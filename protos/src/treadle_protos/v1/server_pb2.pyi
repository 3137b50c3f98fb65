from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "protocol_version", "capabilities", "limits", "uptime")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol_version: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    uptime: _duration_pb2.Duration
    def __init__(self, version: _Optional[str] = ..., protocol_version: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., uptime: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_queued_requests", "max_queued_tokens", "max_choices", "max_top_logprobs", "max_stop_sequences", "max_trace_tokens", "max_trace_bytes")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_TRACE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TRACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_queued_requests: int
    max_queued_tokens: int
    max_choices: int
    max_top_logprobs: int
    max_stop_sequences: int
    max_trace_tokens: int
    max_trace_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., max_choices: _Optional[int] = ..., max_top_logprobs: _Optional[int] = ..., max_stop_sequences: _Optional[int] = ..., max_trace_tokens: _Optional[int] = ..., max_trace_bytes: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("model", "num_waiting_requests", "num_waiting_tokens", "num_running_sequences", "kv_cache_bytes", "max_kv_cache_bytes", "num_generated_tokens", "num_weight_versions", "num_paused_sequences", "num_preempted_sequences", "num_preemptions", "prefix_cache_bytes", "max_prefix_cache_bytes", "num_prefix_hit_tokens", "num_prefix_queried_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WEIGHT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAUSED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFIX_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_waiting_requests: int
    num_waiting_tokens: int
    num_running_sequences: int
    kv_cache_bytes: int
    max_kv_cache_bytes: int
    num_generated_tokens: int
    num_weight_versions: int
    num_paused_sequences: int
    num_preempted_sequences: int
    num_preemptions: int
    prefix_cache_bytes: int
    max_prefix_cache_bytes: int
    num_prefix_hit_tokens: int
    num_prefix_queried_tokens: int
    def __init__(self, model: _Optional[str] = ..., num_waiting_requests: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_running_sequences: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., max_kv_cache_bytes: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_weight_versions: _Optional[int] = ..., num_paused_sequences: _Optional[int] = ..., num_preempted_sequences: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., prefix_cache_bytes: _Optional[int] = ..., max_prefix_cache_bytes: _Optional[int] = ..., num_prefix_hit_tokens: _Optional[int] = ..., num_prefix_queried_tokens: _Optional[int] = ...) -> None: ...
