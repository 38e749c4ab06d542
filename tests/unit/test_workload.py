"""Prompt files: every layout that is read, and what is said about those that are not."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from entmtp.errors import InputError
from entmtp.workload import PromptRecord, prompts_digest, read_prompts

Write = Callable[..., Path]
OWN = {"id": "sums/1", "task": "math", "turns": ["What is 1 + 1?"]}
LAYOUTS = {
    "own": (
        {**OWN, "turns": ["Hello.", "And then?"], "reference": "Hi.", "source": "us"},
        PromptRecord("sums/1", "math", ("Hello.", "And then?"), "Hi."),
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/7",
            "prompt": "def one():\n",
            "canonical_solution": "    return 1\n",
            "entry_point": "one",
            "test": "assert one() == 1",
        },
        PromptRecord("HumanEval/7", "code", ("def one():\n",), "    return 1\n"),
    ),
    "mbpp": (
        {"task_id": 12, "text": "Write f.", "code": "f = 1", "test_list": ["assert f", "f == 1"]},
        PromptRecord(
            "mbpp/12",
            "code",
            ("Write f.\nYour code should pass these tests:\n\nassert f\nf == 1",),
            "f = 1",
        ),
    ),
    "mbpp sanitised": (
        {"task_id": 3, "prompt": "Write g.", "test_list": ["assert g"]},
        PromptRecord(
            "mbpp/3", "code", ("Write g.\nYour code should pass these tests:\n\nassert g",), None
        ),
    ),
    "gsm8k": (
        {"question": "How many?", "answer": "Two.\n#### 2"},
        PromptRecord("gsm8k/0", "math", ("How many?",), "Two.\n#### 2"),
    ),
    "sharegpt": (
        {
            "id": "abc_0",
            "conversations": [
                {"from": "human", "value": "Hello"},
                {"from": "gpt", "value": "Hi!"},
                {"from": "human", "value": "  \n"},
                {"from": "human", "value": "Bye"},
            ],
        },
        PromptRecord("abc_0", "chat", ("Hello", "Bye"), None),
    ),
    "sharegpt opened by the model": (
        {
            "conversations": [
                {"from": "gpt", "value": "(continued)"},
                {"from": "human", "value": "Go on"},
            ]
        },
        PromptRecord("sharegpt/0", "chat", ("Go on",), None),
    ),
    "mt-bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        PromptRecord("question/81", "writing", ("Write.", "Again."), None),
    ),
    "spec-bench": (
        {"question_id": 9, "category": "qa", "turns": ["Who?"], "reference": [["She", "Her"]]},
        PromptRecord("question/9", "qa", ("Who?",), "She"),
    ),
    "prompt": ({"prompt": "Once"}, PromptRecord("prompt/0", "text", ("Once",), None)),
    "text": (
        {"id": 5, "task": "story", "text": "Once"},
        PromptRecord("prompt/5", "story", ("Once",), None),
    ),
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write records, one a line; strings are lines as they are."""

    def write_lines(*lines: object) -> Path:
        file = tmp_path / "prompts.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        file.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return file

    return write_lines


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_told_from_its_fields(write: Write, layout: str) -> None:
    """A record of every supported layout gives the same record type."""
    fields, expected = LAYOUTS[layout]
    assert read_prompts(write(fields)) == [expected]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_reads_like_lines(write: Write, layout: str) -> None:
    """One JSON array of objects, over several lines, holds the same records."""
    fields, expected = LAYOUTS[layout]
    assert read_prompts(write(json.dumps([fields], indent=2))) == [expected]


def test_gzip_is_recognised(tmp_path: Path) -> None:
    """A compressed file is read whatever its name."""
    file = tmp_path / "prompts.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(OWN).encode()))
    assert read_prompts(file)[0].id == "sums/1"


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    """A byte order mark, blank lines, CRLF and Unicode line breaks in a text do no harm."""
    file = tmp_path / "prompts.jsonl"
    line = '{"prompt": "a\u2028b\u0085 "}\r\n'
    file.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\n\r\n" + line.encode())
    assert [record.turns for record in read_prompts(file)] == [("a\u2028b\u0085 ",)] * 2


def test_limit_stops_reading(write: Write) -> None:
    """Lines past the limit are not looked at, so a damaged tail does not matter."""
    file = write({"prompt": "a"}, {"prompt": "b"}, "{damaged")
    assert [record.id for record in read_prompts(file, limit=2)] == ["prompt/0", "prompt/1"]


def test_limit_above_the_number_of_records_reads_all(write: Write) -> None:
    """A limit is an upper bound, not a demand."""
    assert len(read_prompts(write({"prompt": "a"}), limit=9)) == 1


def test_a_conversation_without_a_user_is_passed_over(write: Write) -> None:
    """It holds no prompt; the limit counts what is returned."""
    silent = {"id": "a", "conversations": [{"from": "gpt", "value": "x"}]}
    empty = {"id": "b", "conversations": []}
    spoken = {"id": "c", "conversations": [{"from": "human", "value": "x"}]}
    assert [r.id for r in read_prompts(write(silent, empty, spoken), limit=1)] == ["c"]


BAD_LINES = {
    "no object": ("[1]", r"record 1: 1 is not an object"),
    "a bare string": ('"x"', r"line 1: 'x' is not an object"),
    "half a line": ('{"prompt": "a"', r"line 1, column 15: not JSON"),
    "a damaged array": ('[{"prompt": "a"},\n{"prompt"]', r"line 2, column 10: not JSON"),
    "an endless number": ('{"prompt": ' + "1" * 5000 + "}", r"line 1: not usable as JSON"),
    "too deep": ("[" * 200_000, r"line 1: not usable as JSON"),
    "unknown fields": ({"foo": 1}, r"its fields \(foo\) are those of no known layout .*GSM8K"),
    "no fields": ({}, r"its fields \(none\)"),
    "no turns": ({**OWN, "turns": []}, r"turns is \[\]; .* at least one text"),
    "turns no list": ({**OWN, "turns": "hi"}, r"turns is 'hi'"),
    "a blank turn": ({**OWN, "turns": ["a", " "]}, r"turns\[1\] is ' '; .* not blank"),
    "a number as turn": ({**OWN, "turns": [3]}, r"turns\[0\] is 3"),
    "a blank id": ({**OWN, "id": ""}, r"id is ''"),
    "a truth value as id": ({**OWN, "id": True}, r"id is True"),
    "half a surrogate pair": ('{"prompt": "\\ud800"}', r"prompt holds half a surrogate pair"),
    "conversation no list": ({"conversations": "hi"}, r"conversations is 'hi'"),
    "message no object": ({"conversations": ["hi"]}, r"a message is 'hi'"),
    "message without value": ({"conversations": [{"from": "human"}]}, r"'from' and 'value'"),
    "message of a number": (
        {"conversations": [{"from": "human", "value": 3}]},
        r"value is 3; it must be a text",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_record_is_named(write: Write, name: str) -> None:
    """The message has the file, the place, the value and the way out."""
    line, message = BAD_LINES[name]
    file = write(line)
    with pytest.raises(InputError, match=message) as caught:
        read_prompts(file)
    assert str(caught.value).startswith(f"{file}, ")
    assert "\n" not in str(caught.value)


def test_a_later_record_of_another_layout_is_refused(write: Write) -> None:
    """The first record decides the layout of the whole file."""
    file = write(LAYOUTS["gsm8k"][0], {"question": "And?"})
    with pytest.raises(InputError, match=r"line 2: lacks the field 'answer'.*GSM8K"):
        read_prompts(file)


def test_an_id_occurs_once(write: Write) -> None:
    """Two records of one id would be mixed up in reports."""
    with pytest.raises(InputError, match=r"line 3: the id 'sums/1' was taken by line 1"):
        read_prompts(write(OWN, "", OWN))


def test_bytes_that_are_no_utf8_are_located(tmp_path: Path) -> None:
    """The line is counted, inside an array too."""
    for start, line in ((b'{"prompt": "a"}\n', 2), (b'[{"prompt": "a"},\n\n', 3)):
        file = tmp_path / "prompts.jsonl"
        file.write_bytes(start + b'{"prompt": "\xff"}')
        with pytest.raises(InputError, match=rf"line {line}: byte 0xff is not UTF-8"):
            read_prompts(file)


@pytest.mark.parametrize("content", ["", "\n \n", "[]"])
def test_an_empty_file_is_refused(write: Write, content: str) -> None:
    """No prompts is never what was meant."""
    with pytest.raises(InputError, match="no prompts in it"):
        read_prompts(write(content))


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A missing file, a folder and a path through a file are told apart."""
    with pytest.raises(InputError, match="no such file"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="a directory"):
        read_prompts(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "file" / "prompts.jsonl")


@pytest.mark.parametrize("cut", [5, 30])
def test_truncated_gzip_is_refused(tmp_path: Path, cut: int) -> None:
    """Half a download is not taken for a short file."""
    file = tmp_path / "prompts.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(OWN).encode() * 3)[:cut])
    with pytest.raises(InputError, match="damaged gzip data"):
        read_prompts(file)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(write: Write, limit: int) -> None:
    """Zero prompts is a mistake, not a request."""
    with pytest.raises(InputError, match=f"limit is {limit}; it must be at least 1"):
        read_prompts(write(OWN), limit=limit)


def test_the_digest_names_ids_and_turns_in_order() -> None:
    """It changes with what is decoded, not with task or reference."""
    one = PromptRecord("a", "t", ("x",))
    two = PromptRecord("b", "t", ("y",))
    digest = prompts_digest([one, two])
    assert len(digest) == 16
    assert digest == prompts_digest([PromptRecord("a", "u", ("x",), "r"), two])
    assert digest != prompts_digest([two, one])
    assert digest != prompts_digest([one, PromptRecord("b", "t", ("y", "z"))])
