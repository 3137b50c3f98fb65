"""Documents to token ids."""

from __future__ import annotations

from treadle_server.datasets.documents import Document
from treadle_server.errors import ChatTemplateError, DataError, InvalidRequestError
from treadle_server.tokenizer.tokenizer import Tokenizer


class DocumentEncoder:
    """Encodes documents as the model will meet them.

    A text gets what the tokenizer puts around texts, such as BOS, and the end-of-sequence token, so that the model
    learns to end. A conversation is what the model's chat template makes of it, with nothing added.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos = min(tokenizer.eos_token_ids, default=None)

    def encode(self, document: Document) -> list[int]:
        """Return a document's ids. Raises DataError naming where it comes from."""
        try:
            if document.messages is not None:
                return self._tokenizer.encode_chat(document.messages, add_generation_prompt=False)
            ids = self._tokenizer.encode(document.text, add_special_tokens=document.starts)
        except (ChatTemplateError, InvalidRequestError) as error:
            raise DataError(f"{document.origin}: {error}") from error
        has_eos = bool(ids) and ids[-1] == self._eos
        if self._eos is not None and document.ends and not has_eos:
            ids.append(self._eos)
        elif has_eos and document.starts and not document.ends:
            ids.pop()  # the tokenizer puts it after every text, but this one goes on
        return ids
