from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from treadle_protos.v1 import generation_pb2 as _generation_pb2
from treadle_protos.v1 import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LossReduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOSS_REDUCTION_UNSPECIFIED: _ClassVar[LossReduction]
    LOSS_REDUCTION_MEAN: _ClassVar[LossReduction]
    LOSS_REDUCTION_SUM: _ClassVar[LossReduction]
LOSS_REDUCTION_UNSPECIFIED: LossReduction
LOSS_REDUCTION_MEAN: LossReduction
LOSS_REDUCTION_SUM: LossReduction

class TrainingBatch(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[TrainingRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[TrainingRow, _Mapping]]] = ...) -> None: ...

class TrainingRow(_message.Message):
    __slots__ = ("text", "messages", "token_ids", "append_eos", "document_lengths", "labels", "weights", "logprobs", "advantages")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    APPEND_EOS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    text: str
    messages: _generation_pb2.Messages
    token_ids: _generation_pb2.TokenIds
    append_eos: bool
    document_lengths: _containers.RepeatedScalarFieldContainer[int]
    labels: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    advantages: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, text: _Optional[str] = ..., messages: _Optional[_Union[_generation_pb2.Messages, _Mapping]] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., append_eos: bool = ..., document_lengths: _Optional[_Iterable[int]] = ..., labels: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ..., logprobs: _Optional[_Iterable[float]] = ..., advantages: _Optional[_Iterable[float]] = ...) -> None: ...

class LossSpec(_message.Message):
    __slots__ = ("name", "reduction", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _value_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    reduction: LossReduction
    options: _containers.MessageMap[str, _value_pb2.Value]
    def __init__(self, name: _Optional[str] = ..., reduction: _Optional[_Union[LossReduction, str]] = ..., options: _Optional[_Mapping[str, _value_pb2.Value]] = ...) -> None: ...

class LossResult(_message.Message):
    __slots__ = ("loss", "reduction", "name", "num_tokens", "rows", "grad_norm")
    LOSS_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    loss: float
    reduction: LossReduction
    name: str
    num_tokens: int
    rows: _containers.RepeatedCompositeFieldContainer[RowResult]
    grad_norm: float
    def __init__(self, loss: _Optional[float] = ..., reduction: _Optional[_Union[LossReduction, str]] = ..., name: _Optional[str] = ..., num_tokens: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RowResult, _Mapping]]] = ..., grad_norm: _Optional[float] = ...) -> None: ...

class RowResult(_message.Message):
    __slots__ = ("logprobs", "token_ids")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class OptimizerSettings(_message.Message):
    __slots__ = ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm", "momentum", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _value_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ...) -> None: ...
    LR_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    GRAD_CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    momentum: float
    options: _containers.MessageMap[str, _value_pb2.Value]
    def __init__(self, lr: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., grad_clip_norm: _Optional[float] = ..., momentum: _Optional[float] = ..., options: _Optional[_Mapping[str, _value_pb2.Value]] = ...) -> None: ...

class ComputeLossRequest(_message.Message):
    __slots__ = ("batch", "loss")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    batch: TrainingBatch
    loss: LossSpec
    def __init__(self, batch: _Optional[_Union[TrainingBatch, _Mapping]] = ..., loss: _Optional[_Union[LossSpec, _Mapping]] = ...) -> None: ...

class ComputeLossResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: LossResult
    def __init__(self, result: _Optional[_Union[LossResult, _Mapping]] = ...) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("batch", "loss", "sequence_number")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    batch: TrainingBatch
    loss: LossSpec
    sequence_number: int
    def __init__(self, batch: _Optional[_Union[TrainingBatch, _Mapping]] = ..., loss: _Optional[_Union[LossSpec, _Mapping]] = ..., sequence_number: _Optional[int] = ...) -> None: ...

class ForwardBackwardResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: LossResult
    def __init__(self, result: _Optional[_Union[LossResult, _Mapping]] = ...) -> None: ...

class OptimStepRequest(_message.Message):
    __slots__ = ("optimizer", "sequence_number")
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    optimizer: OptimizerSettings
    sequence_number: int
    def __init__(self, optimizer: _Optional[_Union[OptimizerSettings, _Mapping]] = ..., sequence_number: _Optional[int] = ...) -> None: ...

class OptimStepResponse(_message.Message):
    __slots__ = ("step", "grad_norm")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    step: int
    grad_norm: float
    def __init__(self, step: _Optional[int] = ..., grad_norm: _Optional[float] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("batch", "loss", "optimizer", "sequence_number")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    batch: TrainingBatch
    loss: LossSpec
    optimizer: OptimizerSettings
    sequence_number: int
    def __init__(self, batch: _Optional[_Union[TrainingBatch, _Mapping]] = ..., loss: _Optional[_Union[LossSpec, _Mapping]] = ..., optimizer: _Optional[_Union[OptimizerSettings, _Mapping]] = ..., sequence_number: _Optional[int] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("result", "step", "grad_norm")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    result: LossResult
    step: int
    grad_norm: float
    def __init__(self, result: _Optional[_Union[LossResult, _Mapping]] = ..., step: _Optional[int] = ..., grad_norm: _Optional[float] = ...) -> None: ...

class ZeroGradientsRequest(_message.Message):
    __slots__ = ("sequence_number",)
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    def __init__(self, sequence_number: _Optional[int] = ...) -> None: ...

class ZeroGradientsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("name", "sequence_number")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    name: str
    sequence_number: int
    def __init__(self, name: _Optional[str] = ..., sequence_number: _Optional[int] = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("name", "step", "next_sequence_number")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    next_sequence_number: int
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., next_sequence_number: _Optional[int] = ...) -> None: ...

class LoadCheckpointRequest(_message.Message):
    __slots__ = ("name", "with_optimizer", "sequence_number")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WITH_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    name: str
    with_optimizer: bool
    sequence_number: int
    def __init__(self, name: _Optional[str] = ..., with_optimizer: bool = ..., sequence_number: _Optional[int] = ...) -> None: ...

class LoadCheckpointResponse(_message.Message):
    __slots__ = ("step", "next_sequence_number")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    step: int
    next_sequence_number: int
    def __init__(self, step: _Optional[int] = ..., next_sequence_number: _Optional[int] = ...) -> None: ...

class PublishWeightsRequest(_message.Message):
    __slots__ = ("label", "expected_version", "sequence_number")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    label: str
    expected_version: int
    sequence_number: int
    def __init__(self, label: _Optional[str] = ..., expected_version: _Optional[int] = ..., sequence_number: _Optional[int] = ...) -> None: ...

class PublishWeightsResponse(_message.Message):
    __slots__ = ("publication",)
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    publication: Publication
    def __init__(self, publication: _Optional[_Union[Publication, _Mapping]] = ...) -> None: ...

class Publication(_message.Message):
    __slots__ = ("model", "weight_version", "adapter", "adapter_version", "step")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    model: str
    weight_version: int
    adapter: str
    adapter_version: int
    step: int
    def __init__(self, model: _Optional[str] = ..., weight_version: _Optional[int] = ..., adapter: _Optional[str] = ..., adapter_version: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class GetTrainingStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTrainingStateResponse(_message.Message):
    __slots__ = ("model", "model_type", "dtype", "optimizer", "vocab_size", "context_length", "num_parameters", "num_trainable_parameters", "lora_rank", "step", "num_waiting_batches", "next_sequence_number", "num_queued_calls", "max_queued_calls", "checkpoints", "published", "losses", "uptime")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINABLE_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_BATCHES_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_CALLS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_CALLS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_type: str
    dtype: str
    optimizer: str
    vocab_size: int
    context_length: int
    num_parameters: int
    num_trainable_parameters: int
    lora_rank: int
    step: int
    num_waiting_batches: int
    next_sequence_number: int
    num_queued_calls: int
    max_queued_calls: int
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    published: Publication
    losses: _containers.RepeatedScalarFieldContainer[str]
    uptime: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., model_type: _Optional[str] = ..., dtype: _Optional[str] = ..., optimizer: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., num_parameters: _Optional[int] = ..., num_trainable_parameters: _Optional[int] = ..., lora_rank: _Optional[int] = ..., step: _Optional[int] = ..., num_waiting_batches: _Optional[int] = ..., next_sequence_number: _Optional[int] = ..., num_queued_calls: _Optional[int] = ..., max_queued_calls: _Optional[int] = ..., checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ..., published: _Optional[_Union[Publication, _Mapping]] = ..., losses: _Optional[_Iterable[str]] = ..., uptime: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StreamMetricsRequest(_message.Message):
    __slots__ = ("num_past", "past_only")
    NUM_PAST_FIELD_NUMBER: _ClassVar[int]
    PAST_ONLY_FIELD_NUMBER: _ClassVar[int]
    num_past: int
    past_only: bool
    def __init__(self, num_past: _Optional[int] = ..., past_only: bool = ...) -> None: ...

class StreamMetricsResponse(_message.Message):
    __slots__ = ("step", "loss", "num_tokens", "grad_norm", "lr", "tokens_per_s", "time")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    num_tokens: int
    grad_norm: float
    lr: float
    tokens_per_s: float
    time: _timestamp_pb2.Timestamp
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., num_tokens: _Optional[int] = ..., grad_norm: _Optional[float] = ..., lr: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
