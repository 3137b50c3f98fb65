"""The Python client of treadle: stream text from a server, synchronously or with asyncio.

>>> from treadle_client import Client
>>> with Client() as client, client.stream("Once upon a time", max_tokens=32, temperature=0.8) as stream:
...     for chunk in stream:
...         print(chunk.text, end="", flush=True)
"""

from treadle_client._async_client import AsyncClient
from treadle_client._async_stream import AsyncStream
from treadle_client._channel import DEFAULT_TARGET, TlsOptions
from treadle_client._client import Client
from treadle_client._exceptions import (
    ClientClosedError,
    ConflictError,
    DeadlineExceededError,
    InvalidArgumentError,
    MessageTooLargeError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    RequestCancelledError,
    ServerInternalError,
    TreadleClientError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    Violation,
)
from treadle_client._models import (
    Choice,
    Chunk,
    Finish,
    Generation,
    Limits,
    Message,
    Model,
    ModelLoad,
    Plugin,
    Preview,
    PreviewStage,
    PromptInfo,
    Sampler,
    Samplers,
    Score,
    ServerInfo,
    Stage,
    Timings,
    Token,
    TokenLogprob,
    TopLogprob,
    Trace,
    Usage,
)
from treadle_client._options import GenerationOptions, PreviewOptions, Prompt, StageLike
from treadle_client._stream import Stream
from treadle_client._tensors import Tensor

__all__ = [
    "DEFAULT_TARGET",
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "ClientClosedError",
    "ConflictError",
    "DeadlineExceededError",
    "Finish",
    "Generation",
    "GenerationOptions",
    "InvalidArgumentError",
    "Limits",
    "Message",
    "MessageTooLargeError",
    "Model",
    "ModelLoad",
    "NotFoundError",
    "PermissionDeniedError",
    "Plugin",
    "Preview",
    "PreviewOptions",
    "PreviewStage",
    "Prompt",
    "PromptInfo",
    "QueueFullError",
    "RequestCancelledError",
    "Sampler",
    "Samplers",
    "Score",
    "ServerInfo",
    "ServerInternalError",
    "Stage",
    "StageLike",
    "Stream",
    "Tensor",
    "Timings",
    "TlsOptions",
    "Token",
    "TokenLogprob",
    "TopLogprob",
    "Trace",
    "TreadleClientError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "Violation",
]
