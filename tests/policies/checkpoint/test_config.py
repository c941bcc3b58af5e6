import json
from pathlib import Path

import pytest
import torch

from deft_policies.checkpoint.config import load_config
from deft_policies.checkpoint.open import check_tensors
from deft_policies.errors import CheckpointError
from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.sizes import ResizeStrategy
from deft_policies.model.tensor_names import tensor_places
from deft_policies.model.vla import OpenVLAModel
from tests import golden
from tests.policies.checkpoint.checkpoint_files import edit_json, link_golden

# What the published 7B says of itself; all other sizes are defaults.
PUBLISHED = {
    "image_resize_strategy": "resize-naive",
    "image_sizes": [224, 224],
    "llm_backbone_id": "llama2-7b-pure",
    "model_type": "openvla",
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
    "text_config": {
        "model_type": "llama",
        "pad_token_id": 32000,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    },
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "use_fused_vision_backbone": True,
    "vision_backbone_id": "dinosiglip-vit-so-224px",
}
STATISTICS = {"robot": {"action": {"q01": [0.0] * 7, "q99": [1.0] * 7}}}
NORMALIZATION = {"mean": [0.5] * 3, "std": [0.5] * 3}


def write_config(directory: Path, config: dict[str, object], num_towers: int = 2) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"norm_stats": STATISTICS, **config}))
    processor = {
        "image_resize_strategy": config.get("image_resize_strategy", "letterbox"),
        "means": [[0.25, 0.5, 0.75]] * num_towers,
        "stds": [[0.5] * 3] * num_towers,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def test_sizes_of_the_golden_checkpoint() -> None:
    config = load_config(golden.TINY_OPENVLA)
    assert (config.llm.width, config.llm.mlp_width, config.llm.num_layers) == (64, 172, 2)
    assert (config.llm.num_heads, config.llm.num_kv_heads, config.llm.head_dim) == (4, 4, 16)
    dinov2, siglip = config.towers
    assert (dinov2.is_dino, dinov2.width, dinov2.depth, dinov2.mlp) == (True, 48, 4, 192)
    assert (siglip.is_dino, siglip.heads, siglip.num_used_blocks) == (False, 4, 2)
    assert config.vision_width == 88
    assert config.num_patches == 256
    assert (config.action_tokens.first, config.action_tokens.last) == (31744, 31999)
    assert config.prompt_template is PromptTemplate.OPENVLA


def test_absent_sizes_are_the_defaults_of_the_saving_library(tmp_path: Path) -> None:
    llm = load_config(write_config(tmp_path, PUBLISHED)).llm
    assert llm.norm_eps == 1e-6
    assert (llm.width, llm.mlp_width, llm.num_layers, llm.num_heads) == (4096, 11008, 32, 32)
    assert (llm.num_kv_heads, llm.head_dim) == (32, 128)
    assert (llm.rope_theta, llm.max_positions) == (10000.0, 2048)


def test_a_stated_epsilon_counts(tmp_path: Path) -> None:
    text_config = {"vocab_size": 32064, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    llm = load_config(write_config(tmp_path, {**PUBLISHED, "text_config": text_config})).llm
    assert (llm.norm_eps, llm.rope_theta) == (1e-5, 5e5)


def test_rotary_base_is_found_where_newer_savers_put_it(tmp_path: Path) -> None:
    text_config = {"vocab_size": 32064, "rope_parameters": {"rope_theta": 5e5}}
    llm = load_config(write_config(tmp_path, {**PUBLISHED, "text_config": text_config})).llm
    assert llm.rope_theta == 5e5


def test_tensors_of_the_published_7b_are_exactly_those_expected(tmp_path: Path) -> None:
    """All 982 of them, by name and shape; and the model on the meta device has the used ones."""
    config = load_config(write_config(tmp_path, PUBLISHED))
    places = tensor_places(config)
    published = golden.tensor_shapes_7b()
    assert {place.name: place.shape for place in places} == published
    assert len(published) == 982
    check_tensors(tmp_path, published, places)
    with torch.device("meta"):
        model = OpenVLAModel(config)
    used = sum(parameter.numel() for parameter in model.parameters())
    assert used == 7_541_237_184 - sum(
        torch.Size(place.shape).numel() for place in places if place.parameter is None
    )


def test_a_bare_config_is_the_first_release(tmp_path: Path) -> None:
    """What a missing key means is defined by the original classes: one SigLIP tower on Vicuna."""
    bare = {"model_type": "openvla", "text_config": {"vocab_size": 32064}}
    config = load_config(write_config(tmp_path, bare, num_towers=1))
    assert [tower.is_dino for tower in config.towers] == [False]
    assert config.towers[0].prefix == "vision_backbone.featurizer"
    assert not config.is_fused
    assert config.prompt_template is PromptTemplate.V01
    assert config.image.resize is ResizeStrategy.LETTERBOX
    assert not config.image.is_stretched


def test_the_first_release_is_known_by_its_name_too(tmp_path: Path) -> None:
    by_folder = load_config(write_config(tmp_path / "openvla-v01-7b", PUBLISHED))
    assert by_folder.prompt_template is PromptTemplate.V01
    by_hub_id = load_config(write_config(tmp_path / "abc", PUBLISHED), "openvla/openvla-v01-7b")
    assert by_hub_id.prompt_template is PromptTemplate.V01
    other = load_config(write_config(tmp_path / "v01" / "mine", PUBLISHED))
    assert other.prompt_template is PromptTemplate.OPENVLA


def test_rounded_constants_come_before_the_unrounded_ones() -> None:
    mean, std = load_config(golden.TINY_OPENVLA).image.normalizations[0]
    assert mean == (0.484375, 0.455078125, 0.40625)
    assert std == (0.228515625, 0.2236328125, 0.224609375)


def test_means_and_stds_count_where_nothing_else_is_said(tmp_path: Path) -> None:
    image = load_config(write_config(tmp_path, PUBLISHED)).image
    assert image.normalizations[1][0] == (0.25, 0.5, 0.75)
    assert image.letterbox_fill == (63, 127, 191)


@pytest.mark.parametrize(
    ("size", "is_stretched"), [([224, 224], True), (224, False), ([224], False)]
)
def test_the_processor_says_whether_frames_are_stretched(
    tmp_path: Path, size: object, is_stretched: bool
) -> None:
    directory = link_golden(tmp_path / "copy")
    resize = {"size": size}
    edit_json(
        directory / "preprocessor_config.json",
        lambda content: content.update(tvf_resize_params=[resize, resize]),
    )
    assert load_config(directory).image.is_stretched is is_stretched


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"timm_model_ids": ["resnet50", "vgg"]}, "timm_model_ids names 'resnet50'"),
        ({"timm_model_ids": ["vit_so400m_patch14_siglip_224"]}, "expected 2"),
        ({"timm_override_act_layers": [None, "quick_gelu"]}, "timm_override_act_layers is set"),
        ({"image_sizes": [224, 384]}, "equal sizes"),
        ({"image_sizes": "big"}, "image_sizes: must be a list"),
        ({"n_action_bins": 40000}, "n_action_bins: must be an integer from 2 to 32000"),
        ({"vision_sizes": {"dinov2": {"patch_size": 28}}}, "patches"),
        ({"vision_sizes": {"dinov2": {"heads": 5}}}, "divide the width 1024"),
        ({"text_config": {}}, "text_config.vocab_size is missing"),
        ({"text_config": {"vocab_size": "many"}}, "text_config.vocab_size"),
        ({"text_config": {"vocab_size": 32064, "hidden_act": "gelu"}}, "silu"),
        (
            {"text_config": {"vocab_size": 32064, "tie_word_embeddings": True}},
            "tie_word_embeddings is true",
        ),
        (
            {"text_config": {"vocab_size": 32064, "rope_scaling": {"type": "linear"}}},
            "rope_scaling is set",
        ),
        ({"image_resize_strategy": "squint"}, "image_resize_strategy is 'squint'"),
        ({"norm_stats": {}}, "no norm_stats"),
    ],
)
def test_a_config_that_cannot_be_used_is_an_error_of_one_line(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_config(write_config(tmp_path, {**PUBLISHED, **change}))
    message = str(caught.value)
    assert problem in message
    assert str(tmp_path) in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "is missing"), (b"{", "is not JSON"), (b"[]", "expected an object"), (b"\xff", "JSON")],
)
def test_a_missing_or_damaged_file_is_named(
    tmp_path: Path, name: str, content: bytes | None, problem: str
) -> None:
    directory = write_config(tmp_path, PUBLISHED)
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=problem) as caught:
        load_config(directory)
    assert str(directory / name) in str(caught.value)


def test_a_processor_for_another_number_of_towers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="2 vision towers"):
        load_config(write_config(tmp_path, PUBLISHED, num_towers=1))


def golden_with(directory: Path, section: str, name: str, value: object) -> Path:
    """The golden checkpoint with one field of `config.json` changed."""
    link_golden(directory)

    def change(fields: dict[str, object]) -> None:
        holder = fields
        for part in section.split(".") if section else []:
            holder = holder[part]  # type: ignore[assignment]
        holder[name] = value

    edit_json(directory / "config.json", change)
    return directory


@pytest.mark.parametrize("value", [0, -1, 10**9, 10**400])
@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("text_config", "vocab_size"),
        ("text_config", "hidden_size"),
        ("text_config", "intermediate_size"),
        ("text_config", "num_hidden_layers"),
        ("text_config", "num_attention_heads"),
        ("text_config", "num_key_value_heads"),
        ("text_config", "head_dim"),
        ("text_config", "max_position_embeddings"),
        ("vision_sizes.dinov2", "width"),
        ("vision_sizes.dinov2", "depth"),
        ("vision_sizes.siglip", "heads"),
        ("vision_sizes.siglip", "mlp"),
        ("vision_sizes.siglip", "patch_size"),
    ],
)
def test_a_size_that_no_model_has_is_refused_at_once(
    tmp_path: Path, section: str, name: str, value: int
) -> None:
    """Nine zeros too many allocated for 25 seconds, and no heads divided by zero."""
    with pytest.raises(CheckpointError, match=name):
        load_config(golden_with(tmp_path / "c", section, name, value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, 10**400])
def test_numbers_of_the_configuration_are_finite_and_above_zero(
    tmp_path: Path, value: float
) -> None:
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        load_config(golden_with(tmp_path / "c", "text_config", "rms_norm_eps", value))


@pytest.mark.parametrize(("low", "message"), [(2.0, "q01"), (float("nan"), "finite")])
def test_statistics_that_are_swapped_or_not_finite_are_refused(
    tmp_path: Path, low: float, message: str
) -> None:
    """Swapped, they once served actions far outside the robot's range."""
    bad = {"robot": {"action": {"q01": [0.0] * 6 + [low], "q99": [1.0] * 7}}}
    config = {**PUBLISHED, "norm_stats": bad}
    with pytest.raises(CheckpointError, match=message):
        load_config(write_config(tmp_path / "c", config))
