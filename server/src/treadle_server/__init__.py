"""The treadle inference server: load a Hugging Face folder, stream tokens, plug in samplers.

>>> from treadle_server import LanguageModel
>>> lm = LanguageModel.load("path/to/hf-folder")
>>> for event in lm.stream("Once upon a time", max_tokens=32, temperature=0.8, seed=7): ...
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle_server.language_model import LanguageModel

__all__ = ["LanguageModel"]


def __getattr__(name: str) -> object:
    """Import on first use, so that `treadle --help` does not wait for NumPy."""
    if name == "LanguageModel":
        from treadle_server.language_model import LanguageModel

        return LanguageModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
