"""Model families that plugins bring: registered, isolated, and loaded by the models that need them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from treadle_plugin_api import hookimpl
from treadle_server import LanguageModel
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.errors import CheckpointError
from treadle_server.model.families.llama import LLAMA
from treadle_server.plugins import PluginManager
from treadle_server.plugins.discovery import PluginSource

MINE = replace(LLAMA, model_type="mine")


def plugin(*families: object, name: str = "families") -> PluginSource:
    """A foreign plugin that registers the given families."""

    @hookimpl
    def treadle_register_families(register):
        for family in families:
            register(family)

    module = SimpleNamespace(treadle_register_families=treadle_register_families)
    return PluginSource(name, f"dist-{name}", "1.0", lambda: module)


def status_of(manager: PluginManager, name: str = "families"):
    """The line of one plugin."""
    return next(one for one in manager.plugins if one.name == name)


@pytest.fixture
def my_folder(golden, tmp_path):
    """A llama whose config.json says that it is a `mine`."""
    folder = shutil.copytree(golden / "models" / "llama_plain", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mine"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_family_of_a_plugin_is_served(built_in, golden, my_folder):
    """A folder of the plugin's model_type loads through LanguageModel and gives llama's logits."""
    manager = PluginManager([built_in, plugin(MINE)], strict=True)
    assert (status_of(manager).status, status_of(manager).families) == ("active", ("mine",))
    ids = [5, 6, 7]
    with (
        LanguageModel.load(my_folder, plugins=manager) as mine,
        LanguageModel.load(golden / "models" / "llama_plain", plugins=manager) as llama,
    ):
        np.testing.assert_array_equal(mine.logits(ids), llama.logits(ids))


@pytest.mark.parametrize(
    ("families", "reason"),
    [
        ([LLAMA], "model_type 'llama' is built in"),
        ([MINE, MINE], "model_type 'mine' is built in, or registered twice"),
        (["llama"], "family 'llama' is no treadle_plugin_api.family.Family"),
        ([replace(LLAMA, model_type="")], "has no model_type"),
    ],
)
def test_bad_families_fail_their_plugin_alone(built_in, families, reason):
    """The plugin is listed with the reason, and the built-in families stay."""
    manager = PluginManager([built_in, plugin(*families)])
    assert status_of(manager).status == "failed"
    assert reason in status_of(manager).reason
    assert manager.families.find("llama") is LLAMA
    assert manager.families.find("mine") is None


def test_two_plugins_with_one_model_type_both_fail(built_in):
    """Which numbers a folder gives must not depend on the order of plugins; each reason names the other."""
    manager = PluginManager([built_in, plugin(MINE), plugin(MINE, name="others")])
    assert manager.families.find("mine") is None
    assert "model_type 'mine' of 'families'" in status_of(manager).reason
    assert "dist-families" in status_of(manager, "others").reason


def changed(name: str, **changes: object):
    """Llama's table with changes in the entries of some tensors."""
    return lambda config: tuple(
        replace(entry, **changes) if name in entry.file_name else entry for entry in LLAMA.tensor_table(config)
    )


def test_a_table_may_come_in_any_sequence(my_folder):
    """A list or a generator holds the entries as well as a tuple."""
    for kind in (list, iter):
        family = replace(MINE, tensor_table=lambda config, kind=kind: kind(LLAMA.tensor_table(config)))
        load_checkpoint(my_folder, PluginManager([plugin(family)]).families).close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_from_hf": lambda values: values["nope"]}, "is broken: KeyError: 'nope'"),
        ({"tensor_table": lambda config: 1 / 0}, "is broken: ZeroDivisionError"),
        ({"tensor_table": lambda config: LLAMA.tensor_table(config)[1:]}, "tensor table lacks 'embedding.weight'"),
        ({"tensor_table": lambda config: LLAMA.tensor_table(config) * 2}, "tensor table names twice"),
        ({"config_from_hf": lambda values: None}, "config_from_hf returned None"),
        ({"tensor_table": lambda config: None}, "TypeError"),
        ({"tensor_table": lambda config: iter(LLAMA.tensor_table(config)[1:])}, "lacks 'embedding.weight'"),
        ({"tensor_table": lambda config: ("a", "b")}, "holds 'a', not a TensorEntry"),
        ({"tensor_table": changed("q_proj", params=())}, r"q_proj.*params \(\), not a tuple of names"),
        ({"tensor_table": changed("q_proj", params="attention.q")}, "q_proj.*params 'attention.q'"),
        ({"tensor_table": changed("q_proj", params=(1,))}, r"q_proj.*params \(1,\)"),
        ({"tensor_table": changed("q_proj", file_name=None)}, "file_name that is no string"),
        ({"tensor_table": changed("q_proj", file_name="same")}, "two entries for the tensor 'same'"),
        ({"tensor_table": changed("q_proj", groups=3)}, r"groups=3, which do not divide \d+ rows"),
        ({"tensor_table": changed("q_proj", groups=0)}, "groups=0, not an integer from 1 on"),
        ({"tensor_table": changed("q_proj", stacked=3)}, "stacked=3, which does not divide"),
        ({"tensor_table": changed("q_proj", stacked="x")}, "stacked='x', not an integer"),
        ({"tensor_table": changed("q_proj", transposed=1)}, "transposed=1, not True or False"),
        ({"tensor_table": changed("q_proj", transposed=True, groups=2)}, "is transposed, which only a matrix"),
        ({"tensor_table": changed("layernorm", transposed=True)}, "is transposed, which only a matrix"),
        ({"other_tables": (lambda config: None,)}, "TypeError"),
        ({"other_tables": None}, "TypeError"),
        ({"ignored": ("(",)}, "ignored is .*missing"),
        ({"ignored": "abc"}, "ignored is 'abc', not a tuple"),
        ({"ignored": (1,)}, r"ignored is \(1,\)"),
        ({"optional_prefix": None}, "optional_prefix is None, not a string"),
    ],
)
def test_a_family_that_breaks_at_load_is_named(my_folder, changes, message):
    """Whatever foreign code raises becomes a CheckpointError naming the family."""
    families = PluginManager([plugin(replace(MINE, **changes))]).families
    with pytest.raises(CheckpointError, match=f"family of model_type 'mine' .*{message}"):
        load_checkpoint(my_folder, families)
