"""Files that lie are refused with a sentence, before anything large is read or laid out."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch as torch_files
from safetensors.numpy import load_file, save_file

from deft_policies.errors import CheckpointError
from deft_policies.families.loading import open_model
from tests.golden_pi0fast import GOLDEN, options_of

WORDS, FAST = "google/paligemma-3b-pt-224", "lerobot/fast-action-tokenizer"
NORMALIZER = "policy_preprocessor_step_3_normalizer_processor.safetensors"
UNNORMALIZER = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
MOST_BYTES = 48 * 2**20  # what opening may take at once; a whole checkpoint has some 3 MB here
LAYER = "model.paligemma_with_expert.paligemma.model.language_model.layers."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "quantile", tmp_path / "quantile"))


def refusal(folder: Path, **options: Any) -> str:
    """What is said; nothing large may be allocated on the way."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_model(options_of(str(folder), family="pi0fast", **options))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert len(text) < 1000
    return text


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def steps(content: Any, name: str) -> Any:
    return next(one for one in content["steps"] if one["registry_name"] == name)


CONFIGS: dict[str, tuple[Callable[[Any], object], str]] = {
    "another type": (lambda c: c.update(type="pi05"), "type"),
    "a chunk without end": (lambda c: c.update(chunk_size=10**12), "chunk_size"),
    "an action without end": (
        lambda c: c["output_features"]["action"].update(shape=[10**9]),
        "action",
    ),
    "answers without end": (lambda c: c.update(max_decoding_steps=10**9), "max_decoding_steps"),
    "prompts without end": (lambda c: c.update(tokenizer_max_length=0), "tokenizer_max_length"),
    "no cameras": (lambda c: c.update(input_features={}), "cameras"),
    "a tokenizer above": (lambda c: c.update(text_tokenizer_name="../../etc"), "folder below"),
    "an absolute tokenizer": (lambda c: c.update(action_tokenizer_name="/etc"), "folder below"),
    "other pictures": (lambda c: c.update(image_resolution=[448, 448]), "image_resolution"),
    "drawn answers": (lambda c: c.update(temperature=0.7), "temperature"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_lies_is_refused(name: str, folder: Path) -> None:
    change, word = CONFIGS[name]
    edit(folder / "config.json", change)
    assert word in refusal(folder)


PIPELINES: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "a file elsewhere": (
        "policy_preprocessor.json",
        lambda c: steps(c, "normalizer_processor").update(state_file="../config.json"),
        "state_file",
    ),
    "no normaliser": (
        "policy_postprocessor.json",
        lambda c: c.update(steps=[]),
        "unnormalizer_processor",
    ),
    "an unknown mode": (
        "policy_preprocessor.json",
        lambda c: steps(c, "normalizer_processor")["config"]["norm_map"].update(STATE="MAGIC"),
        "MAGIC",
    ),
    "prompts without end": (
        "policy_preprocessor.json",
        lambda c: steps(c, "tokenizer_processor")["config"].update(max_length=10**9),
        "max_length",
    ),
    "a step of its own": (
        "policy_preprocessor.json",
        lambda c: c["steps"].append({"registry_name": 7}),
        "registry_name",
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_that_lies_is_refused(name: str, folder: Path) -> None:
    file, change, word = PIPELINES[name]
    edit(folder / file, change)
    assert word in refusal(folder)


STATISTICS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "missing": (NORMALIZER, lambda s: s.pop("observation.state.q01"), "observation.state.q01"),
    "not finite": (
        NORMALIZER,
        lambda s: s.update({"observation.state.q99": np.full(8, np.nan, np.float32)}),
        "NaN",
    ),
    "of two lengths": (
        NORMALIZER,
        lambda s: s.update({"observation.state.q99": np.zeros(7, np.float32)}),
        "length",
    ),
    "of another robot": (
        UNNORMALIZER,
        lambda s: s.update(
            {"action.q01": np.zeros(6, np.float32), "action.q99": np.ones(6, np.float32)}
        ),
        "6 numbers",
    ),
    "without end": (
        UNNORMALIZER,
        lambda s: s.update({"action.q01": np.zeros(2**24, np.uint8)}),
        "1024",
    ),
    "a table": (
        UNNORMALIZER,
        lambda s: s.update({"action.q01": np.zeros((7, 7), np.float32)}),
        "[7, 7]",
    ),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_that_lie_are_refused(name: str, folder: Path) -> None:
    file, change, word = STATISTICS[name]
    stored = load_file(folder / file)
    change(stored)
    save_file(stored, folder / file)
    assert word in refusal(folder)


TOKENIZERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "another kind": (lambda c: c["model"].update(type="WordPiece"), "BPE"),
    "no beginning": (
        lambda c: c.update(added_tokens=c["added_tokens"][3:]) or c["model"]["vocab"].pop("<bos>"),
        "tokenizer",
    ),
    "a text that grows": (
        lambda c: c["normalizer"].update(content="x" * 2**20),
        "characters",
    ),
    "a text that doubles": (
        lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [c["normalizer"]] * 40}),
        "normalizer",
    ),
    "an answer that doubles": (
        lambda c: c["decoder"]["decoders"].extend(
            [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40
        ),
        "decoder",
    ),
    "decoders in decoders": (
        lambda c: c.update(decoder={"type": "Sequence", "decoders": [c["decoder"]]}),
        "decoder",
    ),
    "a word without end": (
        lambda c: c["model"]["vocab"].update({"y" * 2**20: 1200}),
        "1048576 characters",
    ),
    "no end": (lambda c: c["model"]["vocab"].pop("|"), "token"),
    "more words than rows": (
        lambda c: c["model"]["vocab"].update({f"word{one}": 5000 + one for one in range(900)}),
        "rows of a table",
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_lies_is_refused(name: str, folder: Path) -> None:
    change, word = TOKENIZERS[name]
    edit(folder / WORDS / "tokenizer.json", change)
    assert word in refusal(folder)


def test_padding_and_cutting_that_a_tokenizer_asks_for_are_not_done(folder: Path) -> None:
    padding = {
        "strategy": {"Fixed": 2**40},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    edit(folder / WORDS / "tokenizer.json", lambda c: c.update(padding=padding))
    open_model(options_of(str(folder)))


def test_codes_that_reach_down_to_words(folder: Path) -> None:
    """As many as there are words: some would be the end of answers."""

    def change(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        for one in range(len(vocabulary), 1000):
            vocabulary[f"{one:x}".replace("0", "Ā").replace("1", "ā")] = one

    edit(folder / FAST / "tokenizer.json", change)
    assert "codes" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "policy_preprocessor.json",
        f"{WORDS}/tokenizer.json",
        f"{FAST}/tokenizer.json",
        f"{FAST}/processor_config.json",
        "model.safetensors",
        NORMALIZER,
    ],
)
def test_a_file_of_any_size(name: str, folder: Path) -> None:
    """A gigabyte of zeros, of which the disk holds nothing."""
    with (folder / name).open("wb") as file:
        file.truncate(2**30)
    refusal(folder)


def header_of(shapes: dict[str, list[int]], size: int = 0) -> bytes:
    """A safetensors file with these tensors in bfloat16, and `size` bytes behind its header."""
    entries, at = {}, 0
    for name, shape in shapes.items():
        num = 2 * int(np.prod(shape, dtype=object))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + num]}
        at += num
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


@pytest.mark.parametrize(
    "content",
    [
        (2**62).to_bytes(8, "little") + b"{}",
        header_of({f"{LAYER}0.self_attn.q_proj.weight": [2**40, 2**20]}),
        header_of({"x": [2**63 - 1, 2**63 - 1]}),
        b"\x02\0\0\0\0\0\0\0{}",
    ],
)
def test_a_header_of_the_weights(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refusal(folder)


def test_weights_of_other_sizes_than_their_like(folder: Path) -> None:
    weights = torch_files.load_file(folder / "model.safetensors")
    name = f"{LAYER}0.self_attn.k_proj.weight"
    for change in (
        {name: weights[name][:7].clone()},
        {f"{LAYER}{2**30}.mlp.up_proj.weight": weights[name].clone()},
        {name: weights[name][:0].clone()},
    ):
        torch_files.save_file({**weights, **change}, folder / "model.safetensors")
        refusal(folder)


def test_tokenizers_that_are_nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in real checkpoints, without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.rmtree(folder / "google")
    text = refusal(folder)
    assert WORDS in text
    assert "below" in text


def test_a_checkpoint_of_openpi_is_named(tmp_path: Path) -> None:
    (tmp_path / "params").mkdir()
    assert "Orbax" in refusal(tmp_path)
