"""config.json to DecoderConfig: defaults, rotary spellings, refusals; tables of names; treadle_classic's formulas."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from treadle_plugin_api.backend import Batch
from treadle_plugin_api.decoder_config import RotaryConfig
from treadle_plugin_api.family import UnsupportedSettingError
from treadle_server.model.decoder import Decoder
from treadle_server.model.families import gpt2, llama, treadle_classic
from treadle_server.model.families.registry import FamilyRegistry
from treadle_server.model.params import Params, param_shapes, random_arrays

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 20,
}
GPT2 = {"vocab_size": 30, "n_embd": 16, "n_head": 4, "n_layer": 1, "n_positions": 8}
CLASSIC = {
    "vocab_size": 11,
    "hidden_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 2,
    "intermediate_size": 9,
    "attention_bias": True,
    "mlp_bias": True,
    "head_bias": True,
    "scale_embedding": True,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_llama_defaults():
    """What a llama config leaves out: as many key heads as query heads, no biases, theta 10,000, an untied head."""
    config = llama.config_from_hf(LLAMA)
    assert (config.attention.num_kv_heads, config.attention.head_dim, config.attention.scale) == (4, 4, 0.5)
    assert config.positions.rotary == RotaryConfig(theta=10000.0)
    assert (config.attention.qkv_bias, config.mlp.bias, config.tied_head) == (False, False, False)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rope_scaling": None, "rope_theta": 5.0}, RotaryConfig(theta=5.0)),
        ({"rope_scaling": {}}, RotaryConfig()),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RotaryConfig(kind="linear", factor=4.0)),
        ({"rope_scaling": {"rope_type": "linear", "type": "x", "factor": 4}}, RotaryConfig(kind="linear", factor=4.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 5.0}, RotaryConfig(theta=7.0)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, RotaryConfig(theta=7.0)),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 9.0},
            RotaryConfig(kind="llama3", theta=9.0, factor=8.0, original_context_length=32),
        ),
    ],
)
def test_rotary_spellings(settings, expected):
    """Every spelling of the rotary settings is read, the newer one first."""
    assert llama.config_from_hf(LLAMA | settings).positions.rotary == expected


@pytest.mark.parametrize(("kind", "context_length"), [("dynamic", 128), ("yarn", 128), ("linear", 32), ("llama3", 32)])
def test_the_context_of_a_stretched_model(kind, context_length):
    """Files with dynamic or yarn scaling give the context before stretching, the others that after it."""
    scaling = {"rope_type": kind, **LLAMA3, "factor": 4.0} if kind == "llama3" else {"rope_type": kind, "factor": 4.0}
    settings = {"max_position_embeddings": 32, "rope_scaling": scaling}
    assert llama.config_from_hf(LLAMA | settings).context_length == context_length


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "type 'su'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "type 'mrope'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, r"mrope_section \[1\]"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types \['sliding_attention'\]"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 32}}, "beta_fast 32"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"rope_interleaved": True}, "rope_interleaved True"),
        ({"logits_scaling": 8.0}, "logits_scaling 8.0"),
    ],
)
def test_arithmetic_that_llama_lacks_is_refused_by_name(settings, message):
    """A setting that would change the numbers raises, naming key and value."""
    with pytest.raises(UnsupportedSettingError, match=message):
        llama.config_from_hf(LLAMA | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "16"}, "hidden_size must be an integer, but is '16'"),
        ({"hidden_size": True}, "hidden_size must be an integer, but is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be between 1 and 2147483647, but is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be between 1 and 10000"),
        ({"vocab_size": 10**400}, "vocab_size must be between 1 and"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be finite"),
        ({"num_attention_heads": 32}, "head_dim must be between 1 and 2147483647, but is 0"),
        ({"num_key_value_heads": 3}, r"num_kv_heads must be a divisor of num_heads \(4\), but is 3"),
        ({"head_dim": 3}, "head_dim must be even"),
        ({"rms_norm_eps": -1.0}, "eps must be 0 or more, but is -1.0"),
        ({"rope_theta": 0}, "theta must be greater than 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be finite"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": 3}}, "rope_scaling.type must be a string, but is 3"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ],
)
def test_values_out_of_range_are_refused_by_name(settings, message):
    """A wrong type or value raises ValueError with key, expectation and value."""
    with pytest.raises(ValueError, match=message):
        llama.config_from_hf(LLAMA | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_function": "xielu"}, "activation_function 'xielu'"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"n_head": 5}, r"n_embd must be a multiple of the number of heads \(5\), but is 16"),
    ],
)
def test_gpt2_refusals(settings, message):
    """GPT-2's unsupported settings are refused by name."""
    with pytest.raises(ValueError, match=message):
        gpt2.config_from_hf(GPT2 | settings)


def test_gpt2_settings_are_read():
    """An own inner width, attention scaled by the layer alone, and the older name of the context length."""
    settings = {"n_positions": None, "n_ctx": 9, "n_inner": 24, "scale_attn_weights": False}
    config = gpt2.config_from_hf(GPT2 | settings | {"scale_attn_by_inverse_layer_idx": True})
    assert (config.context_length, config.mlp.hidden_dim, config.attention.scale) == (9, 24, 1.0)
    assert config.attention.scale_of(3) == 1 / 4


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "layer_types 'chunked_attention'"),
        ("phi3", {"rope_scaling": {"type": "llama3"}}, "type 'llama3'"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn False"),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("starcoder2", {"norm_type": "rms"}, "norm_type 'rms'"),
    ],
)
def test_other_families_refuse_by_name(golden, family, settings, message):
    """Each family names the setting whose arithmetic it does not have."""
    values = golden_config(golden, family) | {"rope_parameters": None} | settings
    with pytest.raises(UnsupportedSettingError, match=message):
        FamilyRegistry().find(family).config_from_hf(values)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must name 2 layers, but names 1"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must have"),
        ("gpt_neo", {"attention_types": [["global"]]}, "attention_types must be a list"),
        ("gpt_neo", {"attention_types": [[["global", "odd"], 1]]}, "attention_types must name global or local"),
        ("mixtral", {"num_local_experts": 10**9}, "num_experts must be so few that all layers have 1000000 or less"),
        ("cohere_qk_norm", {"num_attention_heads": 2**24}, "head_dim"),
        ("mixtral", {"num_experts_per_tok": 9}, r"top_k experts must be 1 to 4, but is 9"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must not be 0"),
        ("opt", {"num_attention_heads": 5}, "hidden_size must be a multiple of the number of heads"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be greater than 0, but is 0"),
        ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar must be greater than 0, but is -4"),
        ("gemma3", {"query_pre_attn_scalar": 0.0}, "query_pre_attn_scalar must be greater than 0"),
        (
            "llama_rope_longrope",
            {"original_max_position_embeddings": 1},
            "original_max_position_embeddings must be at least 2 for longrope, but is 1",
        ),
        ("phi3_longrope", {"rope_parameters": {"rope_type": "longrope", "short_factor": 1}}, "short_factor must be"),
        (
            "phi3_longrope",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": ["x"]}},
            r"rope_parameters.long_factor\[0\] must be a number, but is 'x'",
        ),
    ],
)
def test_other_families_name_values_out_of_range(golden, family, settings, message):
    """A wrong value raises ValueError naming the key and what it must be."""
    values = golden_config(golden, family) | settings
    with pytest.raises(ValueError, match=message):
        FamilyRegistry().find(values["model_type"]).config_from_hf(values)


def golden_config(golden: Path, name: str) -> dict[str, object]:
    """Return config.json of a reference model; `gemma3_text` is in the folder gemma3, `falcon` in falcon_7b."""
    folder = {"gemma3_text": "gemma3", "falcon": "falcon_7b", "mistral": "mistral_sw8"}.get(name, name)
    return json.loads((golden / "models" / folder / "config.json").read_text())


def test_phi3_has_an_original_context_of_its_own(golden):
    """Where config.json has none outside the rotary settings, transformers takes 4096 whatever stands inside."""
    values = golden_config(golden, "phi3_longrope")
    del values["original_max_position_embeddings"]
    assert values["rope_parameters"]["original_max_position_embeddings"] != 4096
    rotary = FamilyRegistry().find("phi3").config_from_hf(values).positions.rotary
    assert rotary.original_context_length == 4096


@pytest.mark.parametrize("switch", [{"use_sliding_window": False}, {"use_sliding_window": None}])
def test_layer_types_of_smollm3_slide_whatever_the_switch_says(golden, switch):
    """As transformers masks by `layer_types`; `use_sliding_window` only chooses where there are none."""
    find = FamilyRegistry().find("smollm3").config_from_hf
    values = golden_config(golden, "smollm3_window") | switch
    assert find(values).attention.windows == (8, None, 8)
    assert find({**values, "layer_types": None}).attention.windows == ()


def test_there_is_a_reference_model_of_every_family(golden):
    """No built-in family but our own goes without a fixture."""
    types = {json.loads(path.read_text())["model_type"] for path in golden.glob("models/*/config.json")}
    assert {*FamilyRegistry()} - types <= {"treadle_classic"}


@pytest.mark.parametrize("name", sorted(path.name for path in (GOLDEN / "models").iterdir()))
def test_tables_name_every_parameter_once(golden, name):
    """Each of a family's tables covers the canonical parameters exactly, the head included; no file name repeats."""
    values = golden_config(golden, name)
    family = FamilyRegistry().find(values["model_type"])
    config = family.config_from_hf(values)
    for table in (family.tensor_table(config), *(other(config) for other in family.other_tables)):
        named = [param for entry in table for param in entry.params]
        assert sorted(named) == sorted({*param_shapes(config), "head.weight"})
        assert len({entry.file_name for entry in table}) == len(table)


@pytest.mark.parametrize(
    ("family", "values"), [(llama.LLAMA, LLAMA), (gpt2.GPT2, GPT2), (treadle_classic.TREADLE_CLASSIC, CLASSIC)]
)
def test_tables_of_small_configs_name_every_parameter_once(family, values):
    """The same for the configs of this file, with defaults left out."""
    config = family.config_from_hf(values)
    named = [param for entry in family.tensor_table(config) for param in entry.params]
    assert sorted(named) == sorted({*param_shapes(config), "head.weight"})


def test_a_registered_name_is_never_replaced():
    """A second family of the same model_type is refused."""
    with pytest.raises(ValueError, match="'llama' is registered already"):
        FamilyRegistry([llama.LLAMA])


def test_treadle_classic_is_the_original_transformers_decoder():
    """Logits equal the formulas of the 2017 paper, written out with whole matrices."""
    config = treadle_classic.config_from_hf(CLASSIC)
    weights = random_arrays(config, seed=1, scale=0.4)
    ids = np.array([3, 1, 4, 1, 5])
    decoder = Decoder(config, Params.from_arrays(weights), dtype="float64")
    logits = decoder.head(decoder.forward(Batch.of([ids])))
    np.testing.assert_allclose(logits, _classic(weights, ids), atol=1e-12)


def _classic(weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    rows, columns = np.arange(len(ids))[:, None], np.arange(6)[None, :]
    angles = rows / 10000 ** (columns // 2 * 2 / 6)
    x = w["embedding.weight"][ids] * np.sqrt(6) + np.where(columns % 2 == 0, np.sin(angles), np.cos(angles))
    for layer in range(2):
        p = f"layers.{layer}."
        x = _classic_norm(w, p + "attention_norm", x + _classic_attention(w, p + "attention.", x))
        hidden = np.maximum(_classic_linear(w, p + "mlp.up", x), 0)
        x = _classic_norm(w, p + "mlp_norm", x + _classic_linear(w, p + "mlp.down", hidden))
    return _classic_linear(w, "head", x)


def _classic_linear(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _classic_norm(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _classic_attention(w: dict[str, np.ndarray], prefix: str, x: np.ndarray) -> np.ndarray:
    q, k, v = (_classic_linear(w, prefix + name, x) for name in "qkv")
    heads = []
    for head in (slice(0, 2), slice(2, 4)):
        scores = np.where(np.tri(len(x), dtype=bool), q[:, head] @ k[:, head].T / np.sqrt(2), -np.inf)
        odds = np.exp(scores)
        heads.append(odds / odds.sum(-1, keepdims=True) @ v[:, head])
    return _classic_linear(w, prefix + "o", np.concatenate(heads, axis=1))
