"""Text to token ids and back, stop strings and chat templates."""

from treadle_server.tokenizer.chat_template import ChatTemplate
from treadle_server.tokenizer.detokenizer import Detokenizer
from treadle_server.tokenizer.stop import StopMatcher
from treadle_server.tokenizer.tokenizer import Token, Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopMatcher", "Token", "Tokenizer"]
