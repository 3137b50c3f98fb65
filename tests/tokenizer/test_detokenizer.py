from __future__ import annotations

import functools
import itertools
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from treadle_server.tokenizer import Detokenizer, Tokenizer
from treadle_server.tokenizer.decoding import StripText

quick = settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
WORDS = [
    "the",
    " fox",
    "doesn't",
    " , ",
    " .",
    "  ",
    "aa",
    "a",
    "123",
    "안녕",
    "猫",
    "老鼠",
    "é",
    "🙂",
    "👩‍👩‍👧",
    "née Ω",
    "\n",
    "'ve",
]
texts = st.one_of(st.lists(st.sampled_from(WORDS)).map("".join), st.text(max_size=20))


def pushes(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: object) -> list[str]:
    """What a detokenizer returns when it gets `ids` in pieces that end at `cuts`."""
    detokenizer = Detokenizer(tokenizer, **options)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise(edges)]
    return [*pieces, detokenizer.flush()]


cuts = st.lists(st.integers(0, 1000), max_size=40)


@given(text=texts, cuts=cuts, skip=st.booleans())
@quick
def test_pieces_of_a_text_join_to_the_library_s_text(
    tokenizer: Tokenizer, text: str, cuts: list[int], skip: bool
) -> None:
    """For the ids of any text and any split, the joined pieces are what the library decodes from all ids at once."""
    ids = tokenizer.encode(text)
    assert "".join(pushes(tokenizer, ids, cuts, skip_special_tokens=skip)) == library_text(tokenizer, ids, skip)


@given(data=st.data(), cuts=cuts, skip=st.booleans())
@quick
def test_pieces_of_any_ids_join_to_the_decoded_text(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    """For arbitrary ids, ill-formed bytes included, the joined pieces are the decoded text."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    joined = "".join(pushes(tokenizer, ids, cuts, skip_special_tokens=skip))
    assert joined == tokenizer.decode(ids, skip)
    theirs = library_text(tokenizer, ids, skip)
    if "\ufffd" not in theirs or not has_byte_fallback(tokenizer):
        assert joined == theirs


@given(first=texts, second=texts, cuts=cuts)
@quick
def test_after_a_prompt_only_new_text_comes(tokenizer: Tokenizer, first: str, second: str, cuts: list[int]) -> None:
    """With `prompt_ids` the pieces are what the new ids add to the text of the prompt."""
    prompt, ids = tokenizer.encode(first), tokenizer.encode(second, add_special_tokens=False)
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    added = "".join(pushes(tokenizer, ids, cuts, prompt_ids=prompt))
    assert whole.endswith(added)
    shared = whole[: len(whole) - len(added)]
    assert before.startswith(shared)


@given(text=texts)
@quick
def test_no_piece_holds_half_a_character(tokenizers_by_kind: dict[str, Tokenizer], text: str) -> None:
    """Token by token, no replacement character shows for a text that has none."""
    for kind in ("byte_level", "llama2", "gemma"):
        ids = tokenizers_by_kind[kind].encode(text.replace("\ufffd", ""))
        assert not any("\ufffd" in piece for piece in pushes(tokenizers_by_kind[kind], ids, list(range(len(ids)))))


def test_a_space_at_the_start_is_kept_after_a_prompt(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """A SentencePiece word loses its space at the start of a text, and keeps it after a prompt."""
    tokenizer = tokenizers_by_kind["llama2"]
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert "".join(pushes(tokenizer, ids, [])) == "the fox"
    assert "".join(pushes(tokenizer, ids, [], prompt_ids=tokenizer.encode("over"))) == " the fox"


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
def test_a_character_comes_with_its_last_byte(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    """Of a character in several tokens nothing comes before the last one, and all of it then."""
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("🧶🧶", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, prompt_ids=tokenizer.encode("a"))
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert [piece for piece in pieces if piece.strip()] == ["🧶", "🧶"]
    assert pieces[-1] == "🧶"


@pytest.mark.parametrize(("kind", "expected"), [("byte_level", "\ufffda"), ("gemma", "\ufffd\ufffda")])
def test_ill_formed_bytes_are_not_held(tokenizers_by_kind: dict[str, Tokenizer], kind: str, expected: str) -> None:
    """Bytes that can no longer become a character come out as replacement characters with the next token."""
    tokenizer = tokenizers_by_kind[kind]
    broken = [
        *tokenizer.encode("🧶", add_special_tokens=False)[-4:-2],
        *tokenizer.encode("a", add_special_tokens=False),
    ]
    pieces = pushes(tokenizer, broken, [0, 1, 2, 3])
    assert pieces[-2:] == [expected, ""]


def test_complete_characters_survive_a_broken_run(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """In a run of byte tokens a stray byte costs one replacement character and spoils no other character."""
    tokenizer = tokenizers_by_kind["gemma"]
    yarn = tokenizer.encode("🧶", add_special_tokens=False)
    assert tokenizer.decode([*yarn, yarn[-1], *yarn]) == "🧶\ufffd🧶"


def test_a_cut_tail_comes_at_the_end(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """A character that is never finished becomes a replacement character when flushed."""
    detokenizer = Detokenizer(tokenizers_by_kind["byte_level"])
    assert detokenizer.push(tokenizers_by_kind["byte_level"].encode("a🧶")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_unknown_ids_add_nothing(tokenizer: Tokenizer) -> None:
    """Ids outside the vocabulary, as padded embeddings can yield, add no text."""
    assert tokenizer.decode([-1, tokenizer.vocab_size, 10**12]) == ""


def test_clean_up_waits_for_the_next_token(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """A space that clean-up may remove is held until the next token decides."""
    tokenizer = tokenizers_by_kind["clean_up"]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode("the fox . the")]
    assert "".join(pieces) + detokenizer.flush() == "the fox. the"


@given(text=st.text("a ", max_size=8), cut=st.integers(0, 8), start=st.integers(0, 3), stop=st.integers(0, 3))
@quick
def test_strip_waits_for_the_end(text: str, cut: int, start: int, stop: int) -> None:
    """Up to so many spaces go off both ends of the whole text, wherever it is cut (the library panics on some)."""
    step = StripText(" ", start, stop)
    got = "".join([*step.push([text[:cut]]), *step.push([text[cut:]]), *step.flush()])
    front = text[min(start, len(text) - len(text.lstrip(" "))) :]
    assert got == front[: len(front) - min(stop, len(front) - len(front.rstrip(" ")))]


def test_a_long_text_takes_time_in_proportion(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """Ten times the tokens, one by one, take far less than a hundred times the time."""
    tokenizer = tokenizers_by_kind["llama2"]
    ids = tokenizer.encode("the quick 안녕 🧶 fox " * 100)

    def cost_s(repeats: int) -> float:
        detokenizer, start_s = Detokenizer(tokenizer), time.process_time()
        for token_id in ids * repeats:
            detokenizer.push([token_id])
        return time.process_time() - start_s

    assert cost_s(10) < 40 * max(min(cost_s(1) for _ in range(3)), 1e-3)


def library_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """What `tokenizers` decodes, cleaned up as transformers does where the tokenizer asks for it."""
    text = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    pairs = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")]
    pairs += [(" 's", "'s"), (" 've", "'ve"), (" 're", "'re")]
    return functools.reduce(lambda done, pair: done.replace(*pair), pairs, text) if tokenizer._clean_up else text


def has_byte_fallback(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer spells unknown characters as byte tokens."""
    return "ByteFallback" in str(tokenizer._decoder)
