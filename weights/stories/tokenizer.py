"""The tokenizer: byte-level BPE in which a token never crosses a word, and every Chinese character stands alone.

Alone, because a prompt such as 小猫 must end where the training text had a token's end too, whatever comes next.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END = "<s>", "</s>"
BEGIN_ID, END_ID = 0, 1
_PIECES = r"\p{Han}| ?(?:(?!\p{Han})\p{L})+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def train_tokenizer(stories: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a tokenizer learned from stories (Sennrich et al. 2016, on bytes); it puts BEGIN before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_ID)])
    return tokenizer


def tokenizer_config(context_length: int) -> dict[str, object]:
    """Return tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "bos_token": BEGIN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
