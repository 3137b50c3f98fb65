from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, processors
from treadle_server.errors import ChatTemplateError, CheckpointError, InvalidRequestError
from treadle_server.tokenizer import Detokenizer, Tokenizer

quick = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MESSAGES = [{"role": "user", "content": "hi"}]


def write(folder: Path, name: str, content: object) -> None:
    """Put a JSON file into a model folder."""
    (folder / name).write_text(json.dumps(content), "utf-8")


@given(text=st.text(max_size=30))
@quick
def test_token_bytes_join_to_the_text(tokenizers_by_kind: dict[str, Tokenizer], text: str) -> None:
    """Where every text has its tokens, their bytes spell the text, one space in front aside."""
    for kind, lead in (("byte_level", b""), ("gemma", b""), ("llama2", b" ")):
        tokenizer = tokenizers_by_kind[kind]
        spelt = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
        assert spelt == (lead + text.encode() if text else b"")


def test_token_bytes_of_each_kind(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """Marks of the vocabulary (byte alphabet, U+2581, <0xNN>, ##, </w>) are no part of a token's bytes."""

    def spell(kind: str, token: str) -> bytes:
        tokenizer = tokenizers_by_kind[kind]
        return tokenizer.token_bytes(tokenizer._tokens.index(token))

    assert spell("llama2", "<0x0A>") == b"\n"
    assert spell("llama2", "▁") == b" "
    assert spell("unigram", "▁") == b" "
    assert spell("word_piece", "##o") == b"o"
    assert spell("end_of_word", "the</w>") == b"the "
    assert spell("word_level", "老鼠") == "老鼠".encode()
    assert spell("byte_level", "Ġ") == b" "
    assert spell("byte_level", "née Ω") == "née Ω".encode()
    assert tokenizers_by_kind["word_level"].token_bytes(6) == tokenizers_by_kind["word_level"].token_bytes(-1) == b""


@given(ids=st.lists(st.integers(0, 40), min_size=1, max_size=12))
@quick
def test_text_is_bytes_where_it_says_so(tokenizers_by_kind: dict[str, Tokenizer], ids: list[int]) -> None:
    """Behind a prompt, the text of any tokens is their bytes, unless the tokenizer says that words are set apart."""
    exact = {kind for kind, tokenizer in tokenizers_by_kind.items() if tokenizer.text_is_bytes}
    assert exact >= {"byte_level", "gemma", "llama2"}
    assert exact.isdisjoint({"word_piece", "word_level", "end_of_word", "clean_up"})
    for tokenizer in map(tokenizers_by_kind.__getitem__, exact):
        plain = [i for i in ids if i < tokenizer.vocab_size and not tokenizer.is_special(i)]
        detokenizer = Detokenizer(tokenizer, prompt_ids=tokenizer.encode("a"))
        text = detokenizer.push(plain) + detokenizer.flush()
        assert text == b"".join(map(tokenizer.token_bytes, plain)).decode("utf-8", "replace")


@given(text=st.text(max_size=60), kind=st.sampled_from(["byte_level", "gemma", "llama2", "word_piece", "unigram"]))
@quick
def test_min_tokens_is_a_lower_bound(tokenizers_by_kind: dict[str, Tokenizer], text: str, kind: str) -> None:
    """The cheap bound is never above the true number of tokens."""
    tokenizer = tokenizers_by_kind[kind]
    for repeats in (1, 50):
        assert tokenizer.min_tokens_of(text * repeats) <= len(tokenizer.encode(text * repeats))


def test_min_tokens_holds_where_nfc_shortens_most(tokenizers_by_kind: dict[str, Tokenizer], folder: Path) -> None:
    """Seven bytes that NFC makes two are allowed for."""
    tokenizer = Tokenizer.load(folder)
    tokenizer._backend.normalizer = normalizers.NFC()
    text = "\u1fbe\u0308\u0301" * 100
    assert 0 < tokenizer.min_tokens_of(text) <= len(tokenizer.encode(text))


def test_min_tokens_refuses_megabytes_in_no_time(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """Five megabytes are known to be over a million tokens without being tokenised; no bound is claimed for BERT."""
    start_s = time.process_time()
    assert tokenizers_by_kind["llama2"].min_tokens_of("猫" * 1_700_000) > 100_000
    assert time.process_time() - start_s < 1
    assert tokenizers_by_kind["word_piece"].min_tokens_of("a" * 1000) == 0


def test_offsets_are_characters(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """Each token says which characters it stands for; added special tokens stand for none."""
    tokens = tokenizers_by_kind["word_level"].encode_with_offsets("猫 追 老鼠")
    assert [(token.token_id, token.start, token.end) for token in tokens] == [(0, 0, 1), (1, 2, 3), (2, 4, 6)]
    assert tokenizers_by_kind["llama2"].encode_with_offsets("the")[0] == (1, 0, 0)


def test_special_tokens_are_known(folder: Path) -> None:
    """BOS and EOS come from the configuration, as a string or an object; special ids are the marked ones."""
    write(folder, "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "<s>"})
    write(folder, "tokenizer_config.json", {"eos_token": {"content": "</s>"}, "pad_token": None})
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, frozenset({2}), 299)
    assert [tokenizer.is_special(token_id) for token_id in (2, 3)] == [True, False]
    assert tokenizer.decode([1, 68, 2]) == tokenizer.decode([68])
    assert tokenizer.decode([1], skip_special_tokens=False) == "<s>"


def test_a_folder_without_configuration_is_enough(folder: Path) -> None:
    """tokenizer.json alone gives a tokenizer without BOS, EOS and chat template."""
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, frozenset())
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat(MESSAGES)


@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_is_obeyed(folder: Path, adds: bool) -> None:
    """An explicit add_bos_token beats what tokenizer.json would do; without special tokens no BOS is added."""
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": adds})
    state = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    if not adds:
        template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        state["post_processor"] = json.loads(template.__getstate__())
        write(folder, "tokenizer.json", state)
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.encode("a")[0] == 1) is adds
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1


def test_truncation_and_padding_of_the_file_are_off(folder: Path) -> None:
    """A tokenizer.json saved with truncation or padding does not cut or pad prompts."""
    state = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    state["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    write(folder, "tokenizer.json", state)
    assert len(Tokenizer.load(folder).encode("qwrtzp" * 3)) > 2


def test_chat_ids_have_one_bos(folder: Path) -> None:
    """The template writes BOS and the tokenizer, told to add one to texts, adds none to it."""
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True})
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}", "utf-8")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("hi") == tokenizer.encode_chat(MESSAGES)
    assert tokenizer.encode_chat(MESSAGES).count(1) == 1


@pytest.mark.parametrize(
    "template", ["plain", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "plain"}]]
)
def test_the_template_may_stand_in_the_configuration(folder: Path, template: object) -> None:
    """A template is a string or one of several named ones; a file of its own beats both."""
    write(folder, "tokenizer_config.json", {"chat_template": template})
    assert Tokenizer.load(folder).chat_template.source == "plain"
    (folder / "chat_template.jinja").write_text("file", "utf-8")
    assert Tokenizer.load(folder).chat_template.source == "file"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"model": {"type": "Nope"}}'),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("special_tokens_map.json", b"nope"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, content: bytes) -> None:
    """A file that cannot be read is an error that names it."""
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Tokenizer.load(folder)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    """A folder without tokenizer.json is an error that names the file."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    """Text that is no Unicode text is an error of the request."""
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_threads_agree(tokenizer: Tokenizer) -> None:
    """Encoding and decoding in eight threads at once gives what one thread gives."""
    texts = [f"the {n} 猫 fox 🙂" * 5 for n in range(64)]
    expected = [tokenizer.decode(tokenizer.encode(text)) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: tokenizer.decode(tokenizer.encode(text)), texts)) == expected


def test_a_fork_after_encoding_warns_of_nothing(folder: Path) -> None:
    """A process that has encoded text can fork without the library's warning about parallelism."""
    code = (
        "import os, sys; from pathlib import Path; from treadle_server.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(Path(sys.argv[1])); t.encode('a b ' * 1000)\n"
        "if os.fork() == 0: t.encode('a b ' * 1000); os._exit(0)\n"
        "os.wait()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
