"""Rotary scaling as configs state it: the frequencies of transformers, or a clear refusal."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from entmtp.decoder.rope import RopeScaling, RotationTable, inverse_frequencies
from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.target.hf_config import config_from_dict, config_to_dict
from fakes import tiny_config

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 2048,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 4}},
    "linear-3": {"rope_scaling": {"rope_type": "linear", "factor": 2.7}},
    "llama3": {
        "rope_parameters": {**LLAMA3, "rope_theta": 500000.0},
        "max_position_embeddings": 131072,
        "head_dim": 128,
    },
    "llama3-whole": {
        "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    },
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1000000.0},
    "yarn-5": {"rope_parameters": {**YARN, "rope_theta": 1000000}, "rope_theta": 10000.0},
    "yarn-mscale": {"rope_scaling": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "yarn-half-mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0}},
    "yarn-given": {"rope_scaling": {**YARN, "attention_factor": 1.3, "mscale": 1.0}},
    "yarn-betas": {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    "yarn-equal-betas": {"rope_scaling": {**YARN, "beta_fast": 4, "beta_slow": 4}},
    "yarn-shrinks": {"rope_scaling": {**YARN, "factor": 0.5}},
    "yarn-nulls": {"rope_scaling": {**YARN, "attention_factor": None, "beta_fast": None}},
    "yarn-short": {"rope_scaling": {**YARN, "original_max_position_embeddings": 3}},
    "yarn-beside": {"rope_scaling": YARN, "original_max_position_embeddings": 1024},
}


def read(**changes: Any) -> Any:
    """The config of a llama with these keys."""
    data = {**SIZES, "model_type": "llama", **copy.deepcopy(changes)}
    return config_from_dict(json.loads(json.dumps(data)), Path("config.json"))


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    """To the last bit, at real sizes, and so is the factor on cosine and sine."""
    theirs = LlamaConfig(**SIZES | copy.deepcopy(SCALINGS[name]))
    function = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]]
    frequencies, growth = function(theirs)
    ours = read(**SCALINGS[name])
    assert torch.equal(inverse_frequencies(ours), frequencies)
    assert ours.rope_scaling.attention_factor == growth
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


def test_the_factor_of_yarn_is_on_cosine_and_sine() -> None:
    """A rotation by yarn lengthens, one by another kind does not."""
    for changes, length in ((SCALINGS["yarn-given"], 1.3), (SCALINGS["llama3"], 1.0)):
        table = RotationTable(read(**changes), 8, torch.float64, torch.device("cpu"))
        cos, sin = table.at(torch.tensor([0, 7, 4000]), 4001)
        expected = torch.full_like(cos, length)
        torch.testing.assert_close((cos**2 + sin**2).sqrt(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 10240),
        (SCALINGS["linear-3"], 11059),
        (
            {
                "rope_scaling": {
                    "type": "linear",
                    "factor": 2.0,
                    "original_max_position_embeddings": 1024,
                }
            },
            4096,
        ),
        ({"rope_scaling": YARN}, 8192),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 16384),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 512}}, 4096),
        (SCALINGS["yarn-shrinks"], 4096),
        (SCALINGS["llama3"], 131072),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096}}, 4096),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, 4096),
        ({"model_type": "mistral", "rope_scaling": YARN, "sliding_window": 6000}, 6000),
        ({"model_type": "mistral", "rope_scaling": YARN, "sliding_window": None}, 8192),
    ],
)
def test_linear_and_yarn_widen_the_context_window(changes: dict[str, Any], window: int) -> None:
    """The original context times the factor, but not less than stated; a sliding window caps it."""
    config = read(**changes)
    assert config.context_window == window
    assert config.is_window_capped == (window == 6000)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mimo"])
@pytest.mark.parametrize("name", SCALINGS)
def test_a_config_is_written_as_it_was_read(name: str, family: str) -> None:
    """Scaling and context window come back, also where a sliding window caps it."""
    changes = {**SCALINGS[name], "model_type": family, "sliding_window": None}
    capped = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    for more in ({}, capped, {"num_nextn_predict_layers": 2}):
        config = read(**changes | more)
        data = json.loads(json.dumps(config_to_dict(config)))
        assert config_from_dict(data, Path("config.json")) == config


@given(
    kind=st.sampled_from(["linear", "yarn", "llama3"]),
    factor=st.one_of(st.integers(1, 64).map(float), st.floats(1e-6, 1e6)),
    positions=st.integers(1, 10**7),
    original=st.one_of(st.none(), st.integers(1, 10**7)),
    window=st.one_of(st.none(), st.integers(1, 10**7)),
)
def test_any_scaling_is_written_as_it_was_read(
    kind: str, factor: float, positions: int, original: int | None, window: int | None
) -> None:
    """Whatever the factor, and wherever the window ends."""
    rope = {"rope_type": kind, "factor": factor, "low_freq_factor": 1, "high_freq_factor": 4}
    config = read(
        model_type="mistral",
        rope_scaling={**rope, "original_max_position_embeddings": original},
        max_position_embeddings=positions,
        sliding_window=window,
    )
    assert config_from_dict(config_to_dict(config), Path("config.json")) == config


@pytest.mark.parametrize(
    "scaling",
    [RopeScaling("linear", 1000.0), RopeScaling("yarn", 4.0, 100), RopeScaling("linear", 1e29)],
)
def test_a_window_below_the_scaled_one_cannot_be_written(scaling: RopeScaling) -> None:
    """A config.json states the original context, from which the window follows."""
    with pytest.raises(CheckpointError, match=r"cannot state .*context_window = 256"):
        config_to_dict(tiny_config(rope_scaling=scaling, context_window=256))


def test_transformers_reads_what_is_written() -> None:
    """The frequencies survive a round trip through our config.json."""
    for changes in SCALINGS.values():
        config = read(**changes)
        theirs = LlamaConfig(**config_to_dict(config))
        frequencies, growth = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs)
        assert torch.equal(inverse_frequencies(config), frequencies)
        assert growth == config.rope_scaling.attention_factor


def test_divisors_cannot_be_written() -> None:
    """A config.json has no place for them."""
    scaling = RopeScaling("divisors", divisors=(1.0,) * 32)
    config = read()
    values = {**vars(config), "rope_scaling": scaling}
    with pytest.raises(CheckpointError, match=r"32 divisors.*use the GGUF file itself"):
        config_to_dict(type(config)(**values))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dynamic", "change with the length of the text, which makes the keys wrong"),
        ("longrope", "outgrows the original context, which makes the keys wrong"),
        ("su", "outgrows the original context"),
        ("mrope", "its positions have several dimensions"),
        ("proportional", "it rotates only part of each head"),
        ("ntk", "its frequencies are not known here"),
        (7, "its frequencies are not known here"),
    ],
)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_other_kinds_are_refused_with_the_reason(kind: object, reason: str, place: str) -> None:
    """The message says why, and what is supported, whatever else is missing."""
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        read(**{place: {"rope_type": kind, "type": "linear"}})
    assert f"rotary scaling of type {kind!r} is not supported" in str(error.value)
    assert "supported are default, linear, llama3, yarn" in str(error.value)


@pytest.mark.parametrize("value", [0, -1.0, "4", True, math.nan, math.inf, 1e300, [4]])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_senseless_factor_is_refused(kind: str, value: object) -> None:
    """Key and value are named; damage is not taken for an unsupported model."""
    rope = {**(LLAMA3 if kind == "llama3" else YARN), "rope_type": kind, "factor": value}
    with pytest.raises(
        CheckpointError, match=r"factor is .*, but must be a number above 0"
    ) as error:
        read(rope_scaling=rope)
    assert repr(value) in str(error.value)
    assert error.type is CheckpointError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "factor is None"),
        ({"rope_scaling": {**YARN, "beta_slow": 0}}, "beta_slow is 0"),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, r"beta_fast is 0\.5.*beta_slow of 1\.0"),
        ({"rope_scaling": {**YARN, "attention_factor": -1}}, "attention_factor is -1"),
        ({"rope_scaling": {**YARN, "mscale": "a", "mscale_all_dim": 1}}, "mscale is 'a'"),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate is 'no'"),
        ({"rope_scaling": YARN, "rope_theta": 1}, r"\(rope_theta\) is 1\.0, but yarn needs"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 1 << 60},
            "original_max_position_embeddings is 1152921504606846976, not a positive integer below",
        ),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor is None"),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1}},
            r"high_freq_factor is 1\.0.* of 1\.0",
        ),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], not an object"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn', not an object"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling says rope_type = 'yarn', but rope_parameters say 'default'",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8.0}},
            r"rope_scaling says factor = 4\.0, but rope_parameters say 8\.0",
        ),
    ],
)
def test_damage_is_named(changes: dict[str, Any], message: str) -> None:
    """Key, value and what it should be, in one line."""
    with pytest.raises(CheckpointError, match=message) as error:
        read(**changes)
    assert error.type is CheckpointError
    assert "\n" not in str(error.value)


def test_both_places_may_agree() -> None:
    """Files for old and new versions of transformers state the scaling twice."""
    config = read(rope_scaling=YARN, rope_parameters={**YARN, "factor": 4, "rope_theta": 5000.0})
    assert config.rope_scaling.factor == 4
    assert config.rope_theta == 5000.0
