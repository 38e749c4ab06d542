"""Tokenizers of folders agree with transformers; those of GGUF files with the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from entmtp.errors import CheckpointError, InputError, UnsupportedModelError
from entmtp.loading.tokenizers import convert_gguf_tokenizer, load_tokenizer
from entmtp.tokenizer import TextStream
from tiny_gguf import CHAT_TEMPLATE, make_tensors, vocabulary, write_gguf

CHAT = [{"role": "system", "content": "Be brief ."}, {"role": "user", "content": "hello  user"}]
TEXTS = [
    "",
    "hello user",
    " hello  <|im_start|>user\nhe said: héllo 日本 🙂<|im_end|>",
    "a , b n't",
]


def make_folder(folder: Path, *, bos: bool = False, **settings: Any) -> Path:
    """A byte-level BPE tokenizer in the files that transformers writes."""
    tokens = vocabulary()
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "h")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", pair=None, special_tokens=[("<|endoftext|>", 0)]
        )
    backend.add_special_tokens(tokens[:3])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    return folder


@pytest.mark.parametrize("bos", [False, True])
def test_agrees_with_transformers(bos: bool, tmp_path: Path) -> None:
    """Encoding, with BOS where the tokenizer adds one, decoding and the chat."""
    folder = make_folder(tmp_path, bos=bos)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.encode("he")[0] == 0) == bos
    chat = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == chat
    assert ours.vocab_size == len(theirs)
    assert ours.eos_ids == {theirs.eos_token_id}


def test_streams_whole_characters(tmp_path: Path) -> None:
    """A character of several tokens comes out once, whole."""
    tokenizer = load_tokenizer(make_folder(tmp_path))
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode("日 🙂")]
    assert "".join(pieces) == "日 🙂"
    assert "\ufffd" not in "".join(pieces)


def test_eos_is_what_any_file_names(tmp_path: Path) -> None:
    """The tokenizer's own, generation_config's list and config's number."""
    folder = make_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    assert load_tokenizer(folder).eos_ids == {0, 1, 2, 5}


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.content }}\n{% endfor %}{{ messages | tojson }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}<{{ strftime_now('%Y')[:1] }}>"
        "{{ pad_token }}{{ tools is none }}",
    ],
)
def test_templates_have_what_transformers_gives(template: str, tmp_path: Path) -> None:
    """Loop controls, block trimming, plain JSON, generation marks, the special tokens."""
    folder = make_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(folder)
    chat = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert load_tokenizer(folder).encode_chat(CHAT) == chat


def test_named_templates(tmp_path: Path) -> None:
    """Of several templates the default is taken; without one the names are told."""
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "hello"}]
    folder = make_folder(tmp_path, chat_template=named)
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == "hello"
    make_folder(tmp_path, chat_template=named[:1])
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="rag but none named 'default'"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
    ],
)
def test_refused_messages_are_an_input_error(template: str, message: str, tmp_path: Path) -> None:
    """Whether the template says so, breaks the sandbox or trips over the messages."""
    folder = make_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match=message):
        load_tokenizer(folder).encode_chat(CHAT)


def test_model_without_template(tmp_path: Path) -> None:
    """Raw text still works; a chat is refused."""
    folder = make_folder(tmp_path)
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hello") == [vocabulary().index("hello")]
    with pytest.raises(InputError, match="no chat template"):
        tokenizer.encode_chat(CHAT)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """A folder without tokenizer, a broken tokenizer.json, a broken template."""
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a valid tokenizer"):
        load_tokenizer(tmp_path)
    make_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(CheckpointError, match="chat template of the model is not valid"):
        load_tokenizer(tmp_path)


def test_older_files_go_through_transformers(tmp_path: Path) -> None:
    """vocab.json and merges.txt without tokenizer.json; nonsense in them is an error."""
    made = make_folder(tmp_path / "made")
    model = json.loads((made / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(TEXTS[1]) == load_tokenizer(made).encode(TEXTS[1])
    assert tokenizer.eos_ids == {2}
    (folder / "vocab.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"add its tokenizer\.json"):
        load_tokenizer(folder)


def test_gguf_tokenizer_is_converted(tmp_path: Path) -> None:
    """Special tokens, the chat template and the digits of the file's pre-tokenizer."""
    path, folder = tmp_path / "m.gguf", tmp_path / "tokenizer"
    write_gguf(path, make_tensors(), extra={"tokenizer.ggml.eot_token_id": 0})
    convert_gguf_tokenizer(path, folder)
    tokenizer = load_tokenizer(folder)
    tokens = vocabulary()
    ids = tokenizer.encode("hello <|im_start|>user\nhe<|im_end|>")
    assert [tokens[i] for i in ids] == [
        *("hello", "Ġ", "<|im_start|>", "user", "Ċ", "he", "<|im_end|>")
    ]
    assert [tokens[i] for i in tokenizer.encode("a  20")] == ["a", "Ġ", "Ġ", "2", "0"]
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.encode_chat(CHAT)[0] == 1
    assert sorted(file.name for file in folder.iterdir()) == [
        *("generation_config.json", "tokenizer.json", "tokenizer_config.json")
    ]


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    """Better none than one that splits otherwise than the model learnt."""
    path = tmp_path / "m.gguf"
    write_gguf(path, make_tensors(), pre="esperanto")
    with pytest.raises(UnsupportedModelError, match="'esperanto' is not supported"):
        convert_gguf_tokenizer(path, tmp_path / "tokenizer")
    assert list((tmp_path / "tokenizer").iterdir()) == []


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    """A lone surrogate, as a terminal makes it of a stray byte, is an error of the user's."""
    tokenizer = load_tokenizer(make_folder(tmp_path))
    for encode in (
        tokenizer.encode,
        lambda t: tokenizer.encode_chat([{"role": "user", "content": t}]),
    ):
        with pytest.raises(InputError, match="not valid Unicode"):
            encode("a\udcff")


def make_vicuna_folder(folder: Path) -> Path:
    """A sentencepiece tokenizer.model alone, as Llama and Vicuna folders carry it."""
    from sentencepiece import SentencePieceTrainer

    folder.mkdir(parents=True)
    text = folder / "text.txt"
    text.write_text("USER: hello there ASSISTANT: hello, how are you? Quietly polite.\n" * 20)
    SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=60,
        model_type="bpe",
        minloglevel=2,
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= {"add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_a_sentencepiece_model_is_read(tmp_path: Path) -> None:
    """Ids are those of transformers, with BOS where the folder asks for it."""
    folder = make_vicuna_folder(tmp_path / "some-llama")
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("hello there") == theirs("hello there")["input_ids"]
    assert ours.encode("hello there")[0] == 1
    assert ours.decode(ours.encode("hello there")) == "hello there"
    with pytest.raises(InputError, match="no chat template"):
        ours.encode_chat(CHAT)


def test_a_vicuna_folder_has_its_conversation_format(tmp_path: Path) -> None:
    """System text, USER and ASSISTANT turns, the end token after each answer; no other role."""
    tokenizer = load_tokenizer(make_vicuna_folder(tmp_path / "vicuna-7b-v1.3"))
    turns = [("user", "hello there"), ("assistant", "hello"), ("user", "are you polite?")]
    ids = tokenizer.encode_chat([{"role": r, "content": c} for r, c in turns])
    text = tokenizer.decode(ids)
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert text.endswith("USER: hello there ASSISTANT: helloUSER: are you polite? ASSISTANT:")
    with pytest.raises(InputError, match="role system"):
        tokenizer.encode_chat(CHAT)
