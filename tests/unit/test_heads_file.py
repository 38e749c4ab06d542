"""The file of heads: what is saved comes back, and what does not fit is refused by name."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from entmtp.decoder.config import BlockConfig
from entmtp.decoder.rope import RopeScaling
from entmtp.drafters.checkpoint import load_heads, read_heads_file, save_heads
from entmtp.drafters.heads import HeadsConfig, HydraHeads, MedusaHeads, build_heads
from entmtp.errors import CheckpointError

HOT_IDS = (3, 1, 19, 0, 7)


def make_heads(
    kind: str = "hydra", seed: int = 0, *, has_own_output: bool = False
) -> MedusaHeads | HydraHeads:
    """Three heads of two blocks with random weights, for a target of hidden size 8."""
    config = HeadsConfig(kind, 8, 20, 3, 2, embed_scale=2.5, has_own_output=has_own_output)
    heads = build_heads(config, torch.tensor(HOT_IDS))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(generator=generator)
    return heads


def load(file: Path, hidden_size: int = 8, vocab_size: int = 20) -> MedusaHeads | HydraHeads:
    """Load a file for the target that :func:`make_heads` has in mind."""
    return load_heads(file, hidden_size=hidden_size, vocab_size=vocab_size, target="mine")


def rewrite(
    file: Path, tensors: dict[str, Tensor | None] | None = None, **metadata: str | None
) -> None:
    """Change, add or (with ``None``) remove tensors and metadata of a file."""
    with safe_open(file, framework="pt") as reader:
        about = reader.metadata() | metadata
        held = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    held |= tensors or {}
    save_file(
        {name: value for name, value in held.items() if value is not None},
        file,
        metadata={key: value for key, value in about.items() if value is not None},
    )


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """Let every write beyond this length of a file fail, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A sound file of Hydra heads."""
    path = tmp_path / "heads.safetensors"
    save_heads(make_heads(), path, "mine")
    return path


@pytest.mark.parametrize("has_own_output", [False, True])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_come_back_as_they_were_saved(
    tmp_path: Path, kind: str, has_own_output: bool
) -> None:
    """Every tensor and every size survives; the shared output matrix is not stored."""
    heads = make_heads(kind, has_own_output=has_own_output)
    heads.attach_output(torch.ones(len(HOT_IDS), 8))
    save_heads(heads, tmp_path / "h.safetensors", "mine")
    loaded = load(tmp_path / "h.safetensors")
    assert type(loaded) is type(heads)
    assert loaded.config == heads.config
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    for name, value in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.shared_output.numel() == 0


def test_a_file_says_what_it_holds(file: Path) -> None:
    """The description is read without the tensors."""
    about = read_heads_file(file)
    assert about.config == make_heads().config
    assert (about.target, about.hot_vocab_size) == ("mine", len(HOT_IDS))


@pytest.mark.parametrize("has_own_output", [False, True])
def test_quantised_matrices_are_off_by_half_a_step_at_most(
    tmp_path: Path, has_own_output: bool
) -> None:
    """int8 with one scale a row: a step is 1/127 of the row's largest value; vectors are exact."""
    heads = make_heads(has_own_output=has_own_output)
    save_heads(heads, tmp_path / "q.safetensors", "mine", quantize=True)
    loaded = load(tmp_path / "q.safetensors").state_dict()
    for name, value in heads.state_dict().items():
        step = value.abs().amax(dim=-1, keepdim=True) / 127 if value.dim() == 2 else 0
        assert bool(((loaded[name] - value).abs() <= 0.5 * step * (1 + 1e-5)).all()), name


def test_a_quantised_file_is_a_quarter_of_the_size(tmp_path: Path) -> None:
    """Matrices take a byte a weight; the header and the scales weigh little on real heads."""
    config = HeadsConfig("medusa", 256, 300, 2)
    heads = build_heads(config, torch.arange(10))
    save_heads(heads, tmp_path / "full.safetensors", "mine")
    save_heads(heads, tmp_path / "small.safetensors", "mine", quantize=True)
    full, small = ((tmp_path / f"{n}.safetensors").stat().st_size for n in ("full", "small"))
    assert small < 0.28 * full


def test_rows_of_zeros_survive_quantisation(tmp_path: Path) -> None:
    """New heads start at zero; no scale is zero and nothing becomes NaN."""
    heads = build_heads(make_heads("medusa").config, torch.tensor(HOT_IDS))
    save_heads(heads, tmp_path / "q.safetensors", "mine", quantize=True)
    loaded = load(tmp_path / "q.safetensors")
    assert all(bool((p == 0).all()) for p in loaded.parameters())


def test_an_interrupted_save_leaves_the_old_file(file: Path) -> None:
    """A disk that fills up costs the new heads, never the old ones, and leaves no litter."""
    before = file.read_bytes()
    with files_end_at(1000), pytest.raises((OSError, SafetensorError)):
        save_heads(make_heads(seed=1), file, "mine")
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_saved_file_has_the_permissions_of_any_new_file(file: Path) -> None:
    """It could once be read by its owner alone, whatever the umask."""
    other = file.with_name("other")
    other.touch()
    assert file.stat().st_mode == other.stat().st_mode


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message says which file."""
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors: no such file of heads"):
        load(tmp_path / "nowhere.safetensors")


def test_a_name_too_long_for_a_file_is_one_of_our_errors() -> None:
    """The operating system refuses such a name with an error of its own, which once got through."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(Path("a" * 300))


@pytest.mark.parametrize("data", [b"", b"heads", b"\x00" * 64, b"PK\x03\x04" + b"x" * 200])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, data: bytes) -> None:
    """Empty, short, zeroed and foreign files give one message."""
    path = tmp_path / "h.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load(path)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.2, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused(file: Path, share: float) -> None:
    """Wherever a copy broke off: inside the header, between tensors, a few bytes before the end."""
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": "pt"}, "not a file of heads"),
        ({"format": None}, "not a file of heads"),
        ({"schema": "2"}, "schema '2'; this version reads 1"),
        ({"schema": None}, "schema None"),
        ({"kind": None}, "metadata: 'kind'"),
        ({"hidden_size": "eight"}, "metadata: .*'eight'"),
        ({"embed_scale": "big"}, "metadata: .*'big'"),
        ({"kind": "eagle"}, "not a set of medusa, hydra, hydra\\+\\+, mtp heads"),
        ({"num_heads": "0"}, "not a set of medusa, hydra, hydra\\+\\+, mtp heads"),
        ({"num_layers": "-1"}, "not a set of medusa, hydra, hydra\\+\\+, mtp heads"),
    ],
    ids=str,
)
def test_bad_metadata_is_refused(file: Path, metadata: dict[str, str | None], message: str) -> None:
    """Another format, another schema, a missing field and a wrong value are told apart."""
    rewrite(file, **metadata)
    with pytest.raises(CheckpointError, match=message):
        load(file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"hot_ids": None}, "'hot_ids' is missing"),
        ({"blocks.1.0.linear.weight": None}, r"1 missing tensor.*blocks\.1\.0\.linear\.weight"),
        ({"extra": torch.ones(2)}, r"1 unexpected tensor.*extra"),
        ({"first.0.linear.bias": torch.ones(9)}, r"has shape \(9,\), but \(8,\) is needed"),
        ({"first.0.linear.bias.scale": torch.ones(8)}, "fits no int8 matrix"),
        ({"nothing.scale": torch.ones(8)}, "fits no int8 matrix"),
        ({"hot_ids": torch.tensor([0, 20])}, "token ids below 20"),
        ({"hot_ids": torch.tensor([-1, 3])}, "token ids below 20"),
        ({"hot_ids": torch.tensor([], dtype=torch.int32)}, "token ids below 20"),
        ({"hot_ids": torch.tensor([[1, 2]])}, "token ids below 20"),
        ({"hot_ids": torch.tensor(3)}, "token ids below 20"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tensors_that_do_not_fit_are_refused(
    file: Path, tensors: dict[str, Tensor | None], message: str
) -> None:
    """Missing, unexpected and wrongly shaped tensors, and hot ids outside the vocabulary."""
    rewrite(file, tensors)
    with pytest.raises(CheckpointError, match=message):
        load(file)


def test_a_scale_of_another_length_is_refused(tmp_path: Path) -> None:
    """Scales belong to the rows of their matrix."""
    path = tmp_path / "q.safetensors"
    save_heads(make_heads(), path, "mine", quantize=True)
    rewrite(path, {"blocks.0.0.linear.weight.scale": torch.ones(3)})
    with pytest.raises(CheckpointError, match="fits no int8 matrix"):
        load(path)


def test_a_single_number_with_a_scale_is_refused(tmp_path: Path) -> None:
    """An int8 number without rows once passed the check of its scale and ended in a traceback."""
    path = tmp_path / "q.safetensors"
    save_heads(make_heads(), path, "mine", quantize=True)
    name = "blocks.0.0.linear.weight"
    rewrite(path, {name: torch.zeros((), dtype=torch.int8), f"{name}.scale": torch.ones(())})
    with pytest.raises(CheckpointError, match="fits no int8 matrix"):
        load(path)


def test_heads_of_another_hidden_size_are_refused(file: Path) -> None:
    """The message names both models and both sizes."""
    message = r"trained on mine with a hidden size of 8, but mine has 16"
    with pytest.raises(CheckpointError, match=message):
        load(file, hidden_size=16)


def test_heads_of_another_vocabulary_are_refused(file: Path) -> None:
    """Their token ids would mean other tokens."""
    with pytest.raises(CheckpointError, match=r"vocabulary of 20, but mine has 21"):
        load(file, vocab_size=21)


# -- heads with a block ----------------------------------------------------------------------------

BLOCK = BlockConfig(
    hidden_size=8, intermediate_size=6, num_heads=4, num_kv_heads=2, head_dim=2, qkv_bias=True
)


@pytest.fixture(params=["hydra++", "mtp"])
def block_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A sound file of heads with a block."""
    scaling = RopeScaling("divisors", divisors=(1.5,))
    config = HeadsConfig(request.param, 8, 20, 1, block=replace(BLOCK, rope_scaling=scaling))
    path = tmp_path / "heads.safetensors"
    save_heads(build_heads(config, torch.tensor(HOT_IDS)), path, "mine")
    return path


def test_the_sizes_of_a_block_survive(block_file: Path) -> None:
    """Its rotary scaling included."""
    block = load(block_file).config.block
    assert block == replace(BLOCK, rope_scaling=RopeScaling("divisors", divisors=(1.5,)))


@pytest.mark.parametrize(
    "block",
    [
        None,
        "",
        "null",
        "3",
        "[]",
        "{}",
        '{"hidden_size": 8}',
        json.dumps({**asdict(BLOCK), "extra": 1}),
        json.dumps({**asdict(BLOCK), "rope_scaling": {"kind": "linear"}}),
        json.dumps({**asdict(BLOCK), "hidden_size": 16}),
        json.dumps({**asdict(BLOCK), "num_kv_heads": 3}),
        json.dumps({**asdict(BLOCK), "num_kv_heads": 0}),
        json.dumps({**asdict(BLOCK), "num_heads": "4"}),
        json.dumps({**asdict(BLOCK), "head_dim": 3}),
        "[" * 100_000,
        json.dumps({**asdict(BLOCK), "intermediate_size": 10**30}),
        json.dumps({**asdict(BLOCK), "rms_norm_eps": "small"}),
        json.dumps({**asdict(BLOCK), "rms_norm_eps": 0}),
        json.dumps({**asdict(BLOCK), "rope_theta": None}),
        json.dumps({**asdict(BLOCK), "rope_theta": -5}),
        json.dumps({**asdict(BLOCK), "rope_scaling": {"kind": "new", "divisors": []}}),
        json.dumps({**asdict(BLOCK), "rope_scaling": {"kind": "yarn", "divisors": []}}),
        json.dumps(
            {**asdict(BLOCK), "rope_scaling": {"kind": "linear", "factor": 0, "divisors": []}}
        ),
    ],
    ids=range(23),
)
def test_a_block_that_cannot_be_computed_is_refused(block_file: Path, block: str | None) -> None:
    """Missing, damaged, or of sizes that do not go together."""
    rewrite(block_file, block=block)
    with pytest.raises(CheckpointError, match=r"bad or missing metadata|not a set of medusa"):
        load(block_file)


def test_heads_without_a_block_have_none(file: Path) -> None:
    """One that is stated would be left out."""
    rewrite(file, block=json.dumps(asdict(BLOCK)))
    with pytest.raises(CheckpointError, match="not a set of medusa"):
        load(file)


def test_int8_without_a_scale_is_refused(tmp_path: Path) -> None:
    """Such a matrix once ended in an error of torch."""
    path = tmp_path / "q.safetensors"
    save_heads(make_heads(), path, "mine", quantize=True)
    rewrite(path, {"blocks.0.0.linear.weight.scale": None})
    message = r"'blocks\.0\.0\.linear\.weight' is stored as int8 without a scale"
    with pytest.raises(CheckpointError, match=message):
        load(path)
