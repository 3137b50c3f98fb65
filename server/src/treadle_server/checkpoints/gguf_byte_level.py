"""Byte-level BPE vocabularies of GGUF files.

GGUF names the way text is cut before the merges by a word (`tokenizer.ggml.pre`); the table below gives each word the
pre-tokenizer of the models it stands for, and a word outside it is refused: a near miss would give wrong ids without a
sign.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from treadle_server.checkpoints.gguf_vocabulary import Vocabulary
from treadle_server.errors import CheckpointError, UnsupportedModelError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Words that begin with capitals, and words that end small, of GPT-4o and of Mistral's Tekken.
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = _CASED % (_SHORT, _SHORT, r"\p{N}{1,3}")
_TEKKEN = _CASED % ("", "", r"\p{N}")
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How text is cut into words before the merges.

    Attributes:
        patterns: each cuts the pieces of the one before; without any, GPT-2's pattern does.
        single_digits: whether every digit is a word first.
        normalize: whether text is brought to Unicode's NFC.
        ignore_merges: whether a word that is a token is one, whatever the merges say.
        falcon: whether punctuation is cut off before GPT-2's pattern, and digits in threes after it.
        add_bos: what holds when the file does not say whether a text begins with BOS.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    normalize: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    falcon: bool = False


_CUTS = {
    "gpt-2": Cut(),
    "olmo": Cut(normalize=True),  # and GPT-NeoX, whose tokenizer it is
    "smollm": Cut(single_digits=True),
    "phi-2": Cut(),
    "starcoder": Cut(single_digits=True),
    "refact": Cut(single_digits=True),
    "llama-bpe": Cut(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": Cut(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": Cut(patterns=(_LLAMA3,)),
    "smaug-bpe": Cut(patterns=(_LLAMA3,)),
    "gpt-4o": Cut(patterns=(_GPT4O,)),
    "tekken": Cut(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
    "bloom": Cut(patterns=(_BLOOM,)),
    "falcon": Cut(falcon=True),
    "command-r": Cut(single_digits=True, normalize=True, add_bos=True),
    "stablelm2": Cut(patterns=(_QWEN2,), normalize=True),
    "qwen2": Cut(patterns=(_QWEN2,), normalize=True),
    "deepseek-r1-qwen": Cut(patterns=(_QWEN2,), normalize=True),
}


def build_byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer without its special frame; raises UnsupportedModelError naming an unknown pre-tokenizer."""
    cut = find_cut(vocabulary)
    tokenizer = Tokenizer(_bpe(vocabulary, cut))
    tokenizer.normalizer = normalizers.NFC() if cut.normalize else None
    tokenizer.pre_tokenizer = _pre_tokenizer(cut)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added_tokens())
    return tokenizer


def find_cut(vocabulary: Vocabulary) -> Cut:
    """Return how the file's text is cut; raises UnsupportedModelError naming a word that is not in the table."""
    pre = vocabulary.file.get("tokenizer.ggml.pre", str)
    if pre is None or pre not in _CUTS:
        raise UnsupportedModelError(
            f"{vocabulary.file.path}: tokenizer.ggml.pre = {pre!r} is not supported; "
            f"supported are {', '.join(sorted(_CUTS))}"
        )
    return _CUTS[pre]


def _bpe(vocabulary: Vocabulary, cut: Cut) -> models.BPE:
    try:
        merges = [_pair(merge) for merge in vocabulary.strings("tokenizer.ggml.merges")]
        return models.BPE(vocabulary.ids(), merges, ignore_merges=cut.ignore_merges)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(
            f"{vocabulary.file.path}: the vocabulary and its merges do not fit together: {error}"
        ) from error


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _pre_tokenizer(cut: Cut) -> pre_tokenizers.PreTokenizer:
    if cut.falcon:
        return pre_tokenizers.Sequence(_falcon_steps())
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.patterns))
    return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


def _falcon_steps() -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Punctuation(behavior="contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
    ]
