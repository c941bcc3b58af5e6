"""What an OFT checkpoint is recognised by, what flags must say, and what is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest, Verdict
from deft_policies.checkpoint.open import locate_checkpoint
from deft_policies.checkpoint.tensor_file import read_tensors
from deft_policies.errors import CheckpointError, RequestError
from deft_policies.families.loading import FAMILIES, examine, find_family, load_policy
from deft_policies.families.options import FAMILY_NAMES, ModelOptions
from deft_policies.model.formats import Precision
from deft_server.__main__ import main as deft
from tests import golden, golden_oft
from tests.golden_oft import OftCase

CASES = golden_oft.cases()


def write(tmp_path: Path, name: str, folder: str = "checkpoint") -> Path:
    return golden_oft.variants()[name].write(tmp_path / folder)


def options_for(
    directory: Path, pictures: int | None = 1, chunk: int | None = 8, key: str | None = None
) -> ModelOptions:
    return ModelOptions(
        checkpoint=str(directory),
        num_pictures=pictures,
        num_steps=chunk,
        precision=Precision.FLOAT32,
        device="cpu",
        statistics_key=key,
    )


def case_of(name: str) -> OftCase:
    return next(case for case in CASES if case.variant.name == name)


def write_cases(path: Path, cases: list[OftCase]) -> Path:
    lines = []
    for case in cases:
        image, *wrists = (str(golden_oft.picture_path(one)) for one in case.fields["images"])
        line = {
            "image": image,
            "wrist_images": wrists,
            "instruction": case.instruction,
            "statistics_key": case.statistics_key,
        }
        lines.append(line if case.state is None else {**line, "state": case.state.tolist()})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", sorted(golden_oft.variants()))
def test_deft_act_recognises_a_fine_tune_and_answers_in_batches(tmp_path: Path, name: str) -> None:
    variant = golden_oft.variants()[name]
    cases = [case for case in CASES if case.variant is variant and case.fields["center_crop"]]
    if name == "l1_2img_proprio":
        cases = [case for case in cases if case.name != "l1_2img_proprio_2"]  # of a client's chain
    source, target = write_cases(tmp_path / "cases.jsonl", cases), tmp_path / "out.jsonl"
    flags = ["--checkpoint", str(write(tmp_path, name)), "--pictures", str(variant.num_pictures)]
    if name != "aloha_film_3img":
        flags += ["--chunk", str(variant.chunk)]
    files = ["--input", str(source), "--output", str(target), "--batch", "3"]
    assert deft(["act", *flags, "--dtype", "float32", *files]) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(lines) == len(cases)
    for case, line in zip(cases, lines, strict=True):
        if variant.has_head:
            np.testing.assert_allclose(line["actions"], case.actions, rtol=0, atol=1e-4)
            assert line["tokens"] == []
        else:
            assert line["tokens"] == case.fields["tokens"]
            assert line["actions"] == case.actions.tolist()
            assert line["passes"] == 1


def test_converted_files_are_read_in_place_of_the_pickles(tmp_path: Path) -> None:
    directory = write(tmp_path, "film_2img_proprio")
    assert deft(["convert", str(directory)]) == 0
    for path in directory.glob("*.pt"):
        path.unlink()
        path.write_bytes(b"no weights")
    options = options_for(directory, pictures=2)
    assert load_policy(options).info.policy == "oft"
    assert family_of(options) == "oft"


def family_of(options: ModelOptions) -> str:
    assert options.checkpoint is not None
    return find_family(locate_checkpoint(options.checkpoint), options).name


def test_files_and_flags_choose_the_family_unless_it_is_named(tmp_path: Path) -> None:
    head = str(write(tmp_path, "l1_1img"))
    tokens = str(write(tmp_path, "discrete", "tokens"))
    assert family_of(ModelOptions(checkpoint=head)) == "oft"
    assert family_of(ModelOptions(checkpoint=str(golden.TINY_OPENVLA))) == "openvla"
    assert family_of(ModelOptions(checkpoint=tokens)) == "openvla"
    assert family_of(ModelOptions(checkpoint=tokens, num_steps=1)) == "openvla"
    assert family_of(ModelOptions(checkpoint=tokens, num_steps=8)) == "oft"
    assert family_of(ModelOptions(checkpoint=tokens, num_pictures=1)) == "oft"
    assert family_of(ModelOptions(checkpoint=head, family="openvla")) == "openvla"
    known = "unknown family 'pi0'; known: vla0, pi0fast, qwenfast, nora, ecot, oft, openvla"
    with pytest.raises(CheckpointError, match=known):
        family_of(ModelOptions(checkpoint=head, family="pi0"))


def test_the_flags_name_every_family() -> None:
    assert sorted(FAMILY_NAMES) == sorted(one.name for one in FAMILIES)


def test_what_drafts_is_refused_for_a_model_that_drafts_nothing(tmp_path: Path) -> None:
    options = options_for(write(tmp_path, "l1_1img"))
    with pytest.raises(CheckpointError, match="--decoding, --radius, --no-guard: .* nothing is"):
        load_policy(replace(options, is_guarded=False, decoding="deft", radius=3))


def test_what_no_file_tells_must_be_said(tmp_path: Path) -> None:
    directory = write(tmp_path, "l1_1img", "calibero")
    head = f"{directory}/action_head--150000_checkpoint.pt tells that an action has 7 numbers"
    with pytest.raises(CheckpointError, match=r"--pictures N .* and --chunk N") as both:
        load_policy(options_for(directory, None, None))
    with pytest.raises(CheckpointError, match=r"add --chunk N \(8") as chunk:
        load_policy(options_for(directory, 1, None))
    with pytest.raises(CheckpointError, match="add --pictures N") as pictures:
        load_policy(options_for(directory, None, 8))
    assert all(head in str(one.value) for one in (both, chunk, pictures))


def test_the_robot_follows_from_the_head_and_not_from_names(tmp_path: Path) -> None:
    """The original looks for `libero`, `aloha` and `bridge` in its command line instead."""
    directory = write(tmp_path, "aloha_film_3img", "runs-libero-bridge")
    policy = load_policy(options_for(directory, pictures=3, chunk=None))
    assert (policy.info.chunk_length, policy.info.action_dim) == (25, 14)
    bridge = load_policy(options_for(write(tmp_path, "l1_1img", "aloha"), chunk=5))
    assert (bridge.info.chunk_length, bridge.info.action_dim) == (5, 7)


def test_limits_are_those_of_the_statistics(tmp_path: Path) -> None:
    motions = load_policy(options_for(write(tmp_path, "l1_1img", "motions")))
    assert motions.action_limits(None).high[6] == 1.0


@pytest.mark.parametrize("sign", ["adapter", "statistics"])
def test_a_folder_that_could_be_of_either_kind_is_refused(tmp_path: Path, sign: str) -> None:
    directory = write(tmp_path, "discrete")
    if sign == "adapter":
        zeros = (golden.TINY_OPENVLA / "dataset_statistics.json").read_bytes()
        (directory / "dataset_statistics.json").unlink()
        (directory / "dataset_statistics.json").write_bytes(zeros)
        reason = "a folder lora_adapter"
    else:
        shutil.rmtree(directory / "lora_adapter")
        reason = r"the proprio statistics of libero_\w+ in .*dataset_statistics.json are filled"
    plain = ModelOptions(checkpoint=str(directory), precision=Precision.FLOAT32, device="cpu")
    with pytest.raises(CheckpointError, match=f"{reason}.*--chunk 1 if .*--chunk 8 --pictures 1"):
        load_policy(plain)
    (finding,) = (one for one in examine(plain) if one.subject == "checkpoint")
    assert finding.verdict is Verdict.BAD
    assert load_policy(replace(plain, num_steps=1)).info.policy == "openvla"
    assert load_policy(options_for(directory)).info.policy == "oft"


def test_openvla_refuses_what_has_a_head_and_chunks(tmp_path: Path) -> None:
    directory = write(tmp_path, "l1_1img")
    with pytest.raises(CheckpointError, match="is the head of an OFT fine-tune; leave --family"):
        load_policy(ModelOptions(checkpoint=str(directory), num_steps=1, family="openvla"))
    with pytest.raises(CheckpointError, match="one action at a time"):
        load_policy(
            ModelOptions(checkpoint=str(golden.TINY_OPENVLA), num_steps=8, family="openvla")
        )


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = read_tensors(path)
    change(tensors)
    path.unlink()
    torch.save(tensors, path)


def drop_a_tensor(directory: Path) -> None:
    path = directory / "action_head--100000_checkpoint.pt"
    edit_tensors(path, lambda tensors: tensors.pop("module.model.fc1.bias"))


def add_a_second_step(directory: Path) -> None:
    (directory / "action_head--50000_checkpoint.pt").write_bytes(b"")


def make_it_diffusion(directory: Path) -> None:
    (directory / "noisy_action_projector--100000_checkpoint.pt").write_bytes(b"")


def drop_the_head(directory: Path) -> None:
    (directory / "action_head--100000_checkpoint.pt").unlink()


def shorten_the_state(directory: Path) -> None:
    path = directory / "dataset_statistics.json"
    text = json.loads(path.read_text())
    for block in text.values():
        block["proprio"] = {name: row[:7] for name, row in block["proprio"].items()}
    path.unlink()
    path.write_text(json.dumps(text))


def drop_a_tower(directory: Path) -> None:
    path = directory / "vision_backbone--100000_checkpoint.pt"
    name = "vision_backbone.featurizer.blocks.0.block.attn.qkv.base_layer.weight"
    edit_tensors(path, lambda tensors: tensors.pop(name))


def drop_a_scale(directory: Path) -> None:
    path = directory / "vision_backbone--100000_checkpoint.pt"
    name = "vision_backbone.featurizer.blocks.1.scale.weight"
    edit_tensors(path, lambda tensors: tensors.pop(name))


def drop_a_factor(directory: Path) -> None:
    path = directory / "vision_backbone--100000_checkpoint.pt"
    name = "vision_backbone.featurizer.blocks.0.block.attn.qkv.lora_B.default.weight"
    edit_tensors(path, lambda tensors: tensors.pop(name))


def hide_code_in_the_head(directory: Path) -> None:
    path = directory / "action_head--100000_checkpoint.pt"
    path.unlink()
    torch.save({"fc1.weight": print}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_a_tensor, "action_head--100000.*fc1.bias"),
        (add_a_second_step, "action_head.*--100000.*--50000"),
        (make_it_diffusion, "diffusion head"),
        (drop_the_head, r"FiLM"),
        (shorten_the_state, r"7 .*proprio_projector.* 8"),
        (drop_a_tower, "featurizer.blocks.0.attn.qkv.weight"),
        (drop_a_scale, "has no vision_backbone.featurizer.blocks.1.scale.weight"),
        (drop_a_factor, "has no vision_backbone.featurizer.blocks.0.attn.qkv.lora_B"),
        (hide_code_in_the_head, "cannot be read"),
    ],
)
def test_a_broken_fine_tune_is_refused_by_file(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    directory = write(tmp_path, "film_2img_proprio")
    damage(directory)
    options = options_for(directory, pictures=2)
    with pytest.raises(CheckpointError, match=message):
        load_policy(options)


def test_the_doctor_says_what_is_missing(tmp_path: Path) -> None:
    directory = write(tmp_path, "l1_1img")
    (bad,) = (one for one in examine(options_for(directory, None)) if one.verdict is Verdict.BAD)
    assert "add --pictures N" in bad.text
    found = examine(options_for(directory))
    assert found[1].text.endswith("oft: 8 actions of 7 from 1 picture(s)")
    assert deft(["doctor", "--checkpoint", str(directory)]) != 0


def test_an_observation_without_what_the_model_reads_is_refused(tmp_path: Path) -> None:
    policy = load_policy(options_for(write(tmp_path, "l1_2img_proprio"), pictures=2))
    frame = np.zeros((64, 64, 3), dtype=np.uint8)
    state = np.zeros(8, dtype=np.float32)
    options = ActOptions(statistics_key="libero_10")
    whole = Observation(frame, "lift", {"side": frame, "left_wrist": frame}, state)
    policy.check(whole, options)
    (answer,) = policy.act([PolicyRequest(whole, options=options)])
    assert answer.chunk.actions.shape == (8, 7)
    for observation, field in (
        (Observation(frame, "lift", {"side": frame}, state), "cameras"),
        (Observation(frame, "lift", {"wrist": frame, "wrist2": frame}, state), "cameras"),
        (Observation(frame, "lift", {"wrist": frame}), "state"),
        (Observation(frame, "lift", {"wrist": frame}, state[:7]), "state"),
        (Observation(frame, "lift " * 3000, {"wrist": frame}, state), "instruction"),
    ):
        with pytest.raises(RequestError) as refused:
            policy.check(observation, options)
        assert refused.value.field == field
    for wrong, field in (
        (ActOptions(statistics_key="libero_10", decoding="lossless"), "decoding"),
        (ActOptions(statistics_key="libero_10", radius=3), "radius"),
        (ActOptions(), "statistics_key"),
    ):
        with pytest.raises(RequestError) as refused:
            policy.check(whole, wrong)
        assert refused.value.field == field


def test_random_weights_answer_without_a_checkpoint() -> None:
    options = ModelOptions(random_weights="small", num_pictures=2, num_steps=8, device="cpu")
    policy = load_policy(options)
    frame = np.zeros((224, 224, 3), dtype=np.uint8)
    seen = Observation(frame, "lift it", {"wrist": frame}, np.zeros(8, dtype=np.float32))
    policy.check(seen, ActOptions())
    policy.warm_up()
    (answer,) = policy.act([PolicyRequest(seen)])
    chunk = answer.chunk
    assert chunk.actions.shape == (8, 7)
    assert np.isfinite(chunk.actions).all()
