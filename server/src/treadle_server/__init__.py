"""The treadle inference server: load a Hugging Face folder, stream tokens, plug in samplers.

>>> from treadle_server import LanguageModel
>>> lm = LanguageModel.load("path/to/hf-folder")
>>> for event in lm.stream("Once upon a time", max_tokens=32, temperature=0.8, seed=7): ...
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle_server.language_model import LanguageModel
    from treadle_server.training import LoraConfig, Trainer

__all__ = ["LanguageModel", "LoraConfig", "Trainer"]


def __getattr__(name: str) -> object:
    """Import on first use, so that `treadle --help` does not wait for NumPy."""
    if name == "LanguageModel":
        from treadle_server.language_model import LanguageModel

        return LanguageModel
    if name in ("LoraConfig", "Trainer"):
        from treadle_server import training

        return training.Trainer if name == "Trainer" else training.LoraConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
