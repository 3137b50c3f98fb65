"""`--adapter` and `--model-root`: adapters in this process and on a server, and folders that a server takes by RPC."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from treadle_client import Client

Run = Callable[..., Any]  # the fixtures `treadle` and `serve`
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--json", "--token-ids")


@pytest.fixture(scope="session")
def adapter(golden: Path) -> Path:
    """An adapter of the tiny model."""
    return golden / "adapters" / "llama_plain"


def generated(treadle: Run, *arguments: object) -> tuple[dict[str, Any], list[int]]:
    """Return what was made of the request, and the tokens."""
    document = json.loads(treadle("generate", "the cat", *arguments, *GREEDY).stdout)
    return document["prompt_info"], document["choices"][0]["token_ids"]


def test_an_adapter_is_a_folder_here_and_a_name_there(
    treadle: Run, serve: Run, tiny_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    """In this process `--adapter` loads a folder; with `--target` it names what `serve --adapter` has loaded."""
    _, bare = generated(treadle, "-m", tiny_folder)
    info, changed = generated(treadle, "-m", tiny_folder, "--adapter", adapter)
    assert (info["adapter_version"], changed == bare) == (1, False)
    settings = tmp_path / "settings.toml"
    settings.write_text(f'[adapters.tiny]\ndogs = "{adapter}"\n')
    for arguments in (["--adapter", f"cats={adapter}"], ["--adapter", f"tiny:cats={adapter}"], ["--config", settings]):
        with serve(f"tiny={tiny_folder}", *arguments) as (_, address):
            name = "dogs" if "--config" in arguments else "cats"
            info, tokens = generated(treadle, "--target", address, "--adapter", name)
            assert (info["adapter"], tokens) == (name, changed)
            wrong = treadle("generate", "the", "--target", address, "--adapter", "x", status=2)
            assert f"loaded adapters: {name}" in wrong.stderr


def test_chat_takes_an_adapter(treadle: Run, tiny_folder: Path, adapter: Path) -> None:
    """Answers of a chat come from the adapter too."""
    greedy = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")
    bare = treadle("chat", tiny_folder, *greedy, stdin="hi\n").stdout
    assert treadle("chat", tiny_folder, *greedy, "--adapter", adapter, stdin="hi\n").stdout != bare


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one={tiny}", "--adapter", "cats"], "NAME=FOLDER or MODEL:NAME=FOLDER, got 'cats'"),
        (["one={tiny}", "--adapter", "=x"], "got '=x'"),
        (["one={tiny}", "two={tiny}", "--adapter", "cats=x"], "there are several models; write MODEL:cats=x"),
        (["one={tiny}", "--adapter", "two:cats=x"], "the model 'two'; the served ones are: one"),
        (["one={tiny}", "--adapter", "cats=/absent"], "/absent"),
    ],
)
def test_wrong_adapters_say_why(treadle: Run, tiny_folder: Path, arguments: list[str], message: str) -> None:
    """A server that cannot have its adapters does not start."""
    texts = [text.replace("{tiny}", str(tiny_folder)) for text in arguments]
    assert message in treadle("serve", "--port", "0", *texts, status=1).stderr


def test_model_roots_are_what_rpcs_may_name(serve: Run, tiny_folder: Path, adapter: Path) -> None:
    """`--model-root` may be repeated, and each allows what lies under it."""
    roots = ("--model-root", tiny_folder.parent, "--model-root", adapter)
    with serve(f"tiny={tiny_folder}", *roots) as (_, address), Client(address) as client:
        assert client.update_weights(tiny_folder) == 2
        assert client.load_adapter("cats", adapter).version == 1
