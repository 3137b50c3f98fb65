from treadle_protos.v1 import generation_pb2 as _generation_pb2
from treadle_protos.v1 import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TraceRequest(_message.Message):
    __slots__ = ("model", "adapter", "text", "token_ids", "messages", "layers", "what")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    adapter: str
    text: str
    token_ids: _generation_pb2.TokenIds
    messages: _generation_pb2.Messages
    layers: _containers.RepeatedScalarFieldContainer[int]
    what: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., adapter: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., messages: _Optional[_Union[_generation_pb2.Messages, _Mapping]] = ..., layers: _Optional[_Iterable[int]] = ..., what: _Optional[_Iterable[str]] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("info", "part")
    INFO_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    info: TraceInfo
    part: TensorPart
    def __init__(self, info: _Optional[_Union[TraceInfo, _Mapping]] = ..., part: _Optional[_Union[TensorPart, _Mapping]] = ...) -> None: ...

class TraceInfo(_message.Message):
    __slots__ = ("model", "weight_version", "token_ids", "tokens", "names")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    model: str
    weight_version: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., weight_version: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[bytes]] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class TensorPart(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    data: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PreviewSamplingRequest(_message.Message):
    __slots__ = ("model", "adapter", "preset", "text", "token_ids", "messages", "logits", "sampling", "prompt_ids", "output_ids", "eos_ids", "stop_token_ids", "min_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRESET_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    adapter: str
    preset: str
    text: str
    token_ids: _generation_pb2.TokenIds
    messages: _generation_pb2.Messages
    logits: Logits
    sampling: _generation_pb2.SamplingOptions
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    def __init__(self, model: _Optional[str] = ..., adapter: _Optional[str] = ..., preset: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., messages: _Optional[_Union[_generation_pb2.Messages, _Mapping]] = ..., logits: _Optional[_Union[Logits, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingOptions, _Mapping]] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., eos_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class Logits(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class PreviewSamplingResponse(_message.Message):
    __slots__ = ("vocab_size", "initial", "stages", "chosen_token_id", "seed", "knobs")
    class KnobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _value_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ...) -> None: ...
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    vocab_size: int
    initial: StageDistribution
    stages: _containers.RepeatedCompositeFieldContainer[StageDistribution]
    chosen_token_id: int
    seed: int
    knobs: _containers.MessageMap[str, _value_pb2.Value]
    def __init__(self, vocab_size: _Optional[int] = ..., initial: _Optional[_Union[StageDistribution, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[StageDistribution, _Mapping]]] = ..., chosen_token_id: _Optional[int] = ..., seed: _Optional[int] = ..., knobs: _Optional[_Mapping[str, _value_pb2.Value]] = ...) -> None: ...

class StageDistribution(_message.Message):
    __slots__ = ("stage", "kept_ids", "probabilities")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    KEPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    stage: _generation_pb2.Stage
    kept_ids: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, stage: _Optional[_Union[_generation_pb2.Stage, _Mapping]] = ..., kept_ids: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ...) -> None: ...
