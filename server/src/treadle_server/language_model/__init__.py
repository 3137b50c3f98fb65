"""The in-process API: load a model, stream text from it, score text. It is also what the server serves."""

from treadle_server.language_model.generation import Generation, gather
from treadle_server.language_model.model import LanguageModel
from treadle_server.language_model.preview import Previewer, preview_logits
from treadle_server.language_model.spec import (
    Choice,
    Delta,
    FinishInfo,
    GenerationEvent,
    GenerationResult,
    GenerationSpec,
    PreviewSpec,
    PromptInfo,
    SamplingPreview,
    StageResult,
)
from treadle_server.language_model.trace import Trace
from treadle_server.language_model.validation import RequestLimits

__all__ = [
    "Choice",
    "Delta",
    "FinishInfo",
    "Generation",
    "GenerationEvent",
    "GenerationResult",
    "GenerationSpec",
    "LanguageModel",
    "PreviewSpec",
    "Previewer",
    "PromptInfo",
    "RequestLimits",
    "SamplingPreview",
    "StageResult",
    "Trace",
    "gather",
    "preview_logits",
]
