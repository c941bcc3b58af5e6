"""Files of FAST tokenizers: what upstream saves is read, all else is refused with a sentence."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deft_policies.errors import CheckpointError
from deft_policies.fast.files import is_fast_folder, read_codec
from tests.policies.fast.test_codec import FOLDERS, GOLDEN

MOST_MEMORY = 2**26  # that refusing a file may take


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "fast"
    shutil.copytree(GOLDEN / "bytes", copy)
    return copy


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", FOLDERS)
def test_tokenizers_of_both_alphabets_are_read(name: str) -> None:
    config = json.loads((GOLDEN / name / "processor_config.json").read_text())
    codec = read_codec(GOLDEN / name)
    assert is_fast_folder(GOLDEN / name)
    assert (codec.scale, codec.min_token) == (config["scale"], config["min_token"])
    assert len(codec.pieces) == config["vocab_size"]
    assert codec.num_steps is codec.action_dim is None


def test_sizes_of_a_chunk_are_read_where_they_are(folder: Path) -> None:
    edit(
        folder / "processor_config.json",
        lambda config: config.update(time_horizon=16, action_dim=6),
    )
    codec = read_codec(folder)
    assert (codec.num_steps, codec.action_dim) == (16, 6)


def test_the_tokenizer_may_lie_where_transformers_5_puts_it(folder: Path) -> None:
    known = read_codec(folder).pieces
    below = folder / "bpe_tokenizer"
    below.mkdir()
    (folder / "tokenizer.json").rename(below / "tokenizer.json")
    assert read_codec(folder).pieces == known


def test_merges_may_be_written_as_one_text(folder: Path) -> None:
    codes = read_codec(folder).encode_coefficients([0] * 56)
    edit(
        folder / "tokenizer.json",
        lambda file: file["model"].update(
            merges=[" ".join(one) for one in file["model"]["merges"]]
        ),
    )
    assert read_codec(folder).encode_coefficients([0] * 56) == codes


def test_code_beside_the_files_is_not_run(folder: Path) -> None:
    (folder / "processing_action_tokenizer.py").write_text("raise SystemExit('run')")
    read_codec(folder)


def set_in(*keys: str, value: object) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def add_piece(name: str, number: int) -> Callable[[dict[str, Any]], object]:
    return set_in("model", "vocab", name, value=number)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (set_in("model", "type", value="WordPiece"), "expected 'BPE'"),
        (set_in("added_tokens", value=[{"id": 0, "content": "x"}]), "added_tokens"),
        (set_in("normalizer", value={"type": "NFC"}), "normalizer"),
        (set_in("pre_tokenizer", value=None), "pre_tokenizer.type"),
        (set_in("pre_tokenizer", "type", value="Split"), "pre_tokenizer.type"),
        (set_in("pre_tokenizer", "add_prefix_space", value=True), "add_prefix_space"),
        (set_in("pre_tokenizer", "use_regex", value=False), "use_regex"),
        (set_in("model", "dropout", value=0.5), "dropout"),
        (set_in("model", "unk_token", value="!"), "unk_token"),
        (set_in("model", "byte_fallback", value=True), "byte_fallback"),
        (set_in("model", "vocab", value={}), "0 pieces"),
        (set_in("model", "vocab", value=[]), "vocab"),
        (set_in("model", "vocab", value={f"{i}": i for i in range(33_000)}), "33000 pieces"),
        (add_piece("new", 2**40), "without a gap"),
        (add_piece("new", 0), "without a gap"),
        (add_piece("new", -1), "without a gap"),
        (add_piece("new", "x"), "vocab.new"),  # type: ignore[arg-type]
        (add_piece("", 448), "0 characters"),
        (add_piece("x" * 5000, 448), "5000 characters"),
        (add_piece("\ud800", 448), "no text"),
        (set_in("model", "merges", value=[["!"]]), r"merges\[0\]"),
        (set_in("model", "merges", value=[["!", 5]]), r"merges\[0\]"),
        (set_in("model", "merges", value=["! "]), r"merges\[0\]"),
        (set_in("model", "merges", value=[["!", "?"]]), "vocab does not hold"),
        (set_in("model", "merges", value=7), "merges"),
    ],
)
def test_other_tokenizers_are_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    edit(folder / "tokenizer.json", change)
    with pytest.raises(CheckpointError, match=problem):
        read_codec(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", 0),
        ("scale", -10),
        ("scale", "10"),
        ("scale", None),
        ("min_token", 0.5),
        ("min_token", -(2**70)),
        ("time_horizon", 0),
        ("time_horizon", 10**9),
        ("action_dim", 10**9),
    ],
)
def test_other_processors_are_refused(folder: Path, field: str, value: object) -> None:
    edit(folder / "processor_config.json", set_in(field, value=value))
    with pytest.raises(CheckpointError, match=field):
        read_codec(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "processor_config.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"[" * 2**15,
        b'{"model":' * 2**12,
        b'{"scale": ' + b"9" * 2**15 + b"}",
        b'{"scale": 1e999, "min_token": 0}',
        b'{"model": {"vocab": ' + b"[" + b"[]," * 2**18 + b"[]]}}",
    ],
)
def test_broken_files_are_refused_and_cost_little(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=name):
            read_codec(folder)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["tokenizer.json", "processor_config.json"])
def test_a_file_of_a_terabyte_is_not_read(folder: Path, name: str) -> None:
    os.truncate(folder / name, 2**40)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="of any such file"):
            read_codec(folder)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_not_waited_for(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert not is_fast_folder(folder)
    with pytest.raises(CheckpointError, match="is missing"):
        read_codec(folder)
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match="is no file"):
        read_codec(folder)
