"""From camera frames to patches and prompts, and from texts to actions, as the original does."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from deft_policies.errors import CheckpointError, NoActionError
from deft_policies.families.vla0.model import read_numbers_text, read_rows_begun, to_actions
from deft_policies.families.vla0.number_pickle import read_arrays
from deft_policies.families.vla0.pictures import make_pictures, to_patches
from deft_policies.families.vla0.prompt import (
    IMAGE_PAD,
    encode_prompt,
    mrope_positions,
    prompt_text,
)
from deft_policies.families.vla0.run_folder import RunFolder, read_run
from tests.golden_vla0 import GOLDEN, VARIANTS, cameras, digest, frames, variant


def tokenizer_of(run: RunFolder) -> Tokenizer:
    return Tokenizer.from_file(str(run.model / "tokenizer.json"))


@pytest.mark.parametrize("name", VARIANTS)
def test_pictures_and_patches_are_the_originals(name: str) -> None:
    run = read_run(GOLDEN / name)
    for frame in frames(name):
        pictures = make_pictures(cameras(frame), run)
        assert [digest(one) for one in pictures] == frame["pictures_sha256"]
        patches = to_patches(torch.from_numpy(np.stack(pictures))).flatten(0, 1)
        assert digest(patches.numpy()) == frame["pixel_values_sha256"]
        assert [[1, *run.grid]] * run.num_pictures == frame["image_grid_thw"]


@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_are_the_originals_to_the_token(name: str) -> None:
    run = read_run(GOLDEN / name)
    tokenizer = tokenizer_of(run)
    for frame in frames(name):
        assert prompt_text(run, frame["instruction"]) == frame["prompt"]
        ids = encode_prompt(tokenizer, run, frame["instruction"])
        assert len(ids) == frame["prompt_length"]
        assert digest(np.array(ids, np.int64)) == frame["prompt_ids_sha256"]


@pytest.mark.parametrize("name", VARIANTS)
def test_text_goes_on_behind_the_longer_side_of_a_picture(name: str) -> None:
    run, details = read_run(GOLDEN / name), variant(name)["details"]
    pad = tokenizer_of(run).token_to_id(IMAGE_PAD)
    positions = mrope_positions(details["prompt_ids"], pad, run.grid)
    assert positions.tolist() == np.array(details["position_ids"]).reshape(3, -1).tolist()
    assert int(positions.max()) + 1 - positions.shape[1] == details["rope_delta"]


@pytest.mark.parametrize("name", VARIANTS)
def test_valid_texts_are_actions_to_the_bit_and_others_are_none(name: str) -> None:
    run = read_run(GOLDEN / name)
    for frame in frames(name):
        if not frame["valid"]:
            with pytest.raises(NoActionError):
                read_numbers_text(frame["text"], frame["ended"], run)
            continue
        actions = to_actions(read_numbers_text(frame["text"], frame["ended"], run), run)
        assert actions.dtype == np.float64
        assert actions.tolist() == frame["actions"]


FINE = " ".join(["500"] * 56)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f" {FINE}",
        f"{FINE} ",
        FINE.replace(" ", "  ", 1),
        " ".join(["500"] * 55),
        " ".join(["500"] * 57),
        " ".join(["500"] * 55 + ["1001"]),
        " ".join(["500"] * 55 + ["9" * 900]),
        FINE.replace("500", "5.0", 1),
    ],
)
def test_a_text_that_is_not_56_numbers_is_no_action(text: str) -> None:
    run = read_run(GOLDEN / "tied")
    assert read_numbers_text(FINE, True, run) == [500] * 56
    with pytest.raises(NoActionError):
        read_numbers_text(text, True, run)


@pytest.mark.parametrize(
    ("text", "num_rows"),
    [
        ("", 0),
        (" ".join(["5"] * 7), 0),  # another digit may follow
        (" ".join(["5"] * 7) + " ", 1),
        (" ".join(["5"] * 15), 2),
        (" ".join(["5"] * 7 + ["1001"] + ["5"] * 20), 1),
        (" ".join(["5"] * 8 + ["00005"] + ["5"] * 20), 1),
        (" ".join(["5"] * 7) + "  " + " ".join(["5"] * 20), 1),
        (" " + " ".join(["5"] * 20), 0),
        (" ".join(["5"] * 70), 7),  # the last row counts once the text has ended
    ],
)
def test_rows_count_once_the_text_goes_on_behind_them(text: str, num_rows: int) -> None:
    assert read_rows_begun(text, read_run(GOLDEN / "tied")) == [5] * 7 * num_rows


@pytest.mark.parametrize("name", VARIANTS)
def test_the_pickle_has_what_the_json_has(name: str, tmp_path: Path) -> None:
    """One was written by numpy 1, the other by numpy 2."""
    run = read_run(GOLDEN / name)
    folder = tmp_path / name
    shutil.copytree(GOLDEN / name, folder)
    (folder / "dataset_stats.json").unlink()
    pickled = read_run(folder)
    for wanted, found in ((run.lowest, pickled.lowest), (run.highest, pickled.highest)):
        assert wanted.dtype == found.dtype
        assert np.array_equal(wanted, found)


class Command:
    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Command()),
        pickle.dumps({"out_ori_act": {"min": np.array([object()])}}),
        pickle.dumps({"out_ori_act": {"min": np.array(["text"])}}),
        b"",
        b"\x80\x04.",
        pickle.dumps([0.0] * 300_000),
    ],
)
def test_a_pickle_of_anything_else_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dataset_stats.pkl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as numbers"):
        read_arrays(path, "out_ori_act")
    assert "executed" not in capsys.readouterr().out


def test_an_array_cannot_ask_for_more_memory_than_its_file_has(tmp_path: Path) -> None:
    whole = pickle.dumps(np.zeros(3), protocol=4)
    path = tmp_path / "dataset_stats.pkl"
    path.write_bytes(whole.replace(b"K\x03\x85", b"J\xff\xff\xff\x7f\x85"))
    with pytest.raises(CheckpointError, match="cannot be read as numbers"):
        read_arrays(path, "out_ori_act")


def test_either_folder_may_be_named() -> None:
    run, model = read_run(GOLDEN / "tied"), read_run(GOLDEN / "tied/model_last")
    assert run.model == model.model
    assert (run.repetition_penalty, read_run(GOLDEN / "untied").repetition_penalty) == (1.05, 1.0)


def test_the_version_that_saved_a_model_says_whether_pictures_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN / "tied", folder)
    path = folder / "model_last/config.json"
    config = json.loads(path.read_text())
    for version, is_named in (("4.51.3", False), ("4.52.4", True), ("5.23.0", True)):
        path.write_text(json.dumps({**config, "transformers_version": version}))
        run = read_run(folder)
        assert run.names_pictures is is_named
        assert ("Picture 1: " in prompt_text(run, "lift it")) is is_named


def test_small_frames_are_brought_to_size() -> None:
    run = replace(read_run(GOLDEN / "tied"), is_tiled=False)
    frame = np.full((100, 80, 3), 77, np.uint8)
    (picture,) = make_pictures([frame], run)
    assert picture.shape == (224, 224, 3)
    assert set(picture.flatten()) <= {76, 77}
