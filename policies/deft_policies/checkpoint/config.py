"""Reads an OpenVLA checkpoint's JSON files: configuration, action statistics, tokenizer.

The published 7B leaves most sizes out of `config.json`; the defaults here are those of the
classes it was saved with.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError
from deft_policies.model.prompt import PromptEncoder, PromptTemplate
from deft_policies.model.sizes import (
    DEFAULT_NUM_BINS,
    DINOV2,
    SIGLIP,
    ImageProcessorConfig,
    LlamaSizes,
    Normalization,
    OpenVLAConfig,
    ResizeStrategy,
    TowerConfig,
    TrainingNotes,
    find_action_tokens,
)
from deft_policies.model.statistics import ActionStatistics

CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
TRAINING_FILE = "training.json"
STATISTICS_FILE = "dataset_statistics.json"
QUANTILES, EXTREMES = ("q01", "q99"), ("min", "max")
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
MODEL_TYPE = "openvla"
DINOV2_TIMM_ID = "vit_large_patch14_reg4_dinov2.lvd142m"
SIGLIP_TIMM_ID = "vit_so400m_patch14_siglip_224"
# Absent from the published text_config, so the default of the saving library counts.
_RMS_NORM_EPS = 1e-6
_PAD_TO_MULTIPLE_OF = 64
# Far beyond any model of this kind; a file that says more is damaged, and is not worth allocating.
_MOST_WIDTH, _MOST_MLP, _MOST_LAYERS, _MOST_HEADS = 2**16, 2**18, 1024, 1024
_MOST_TOKENS, _MOST_IMAGE_SIDE = 2**21, 4096
_FUSED_BACKBONES = ("dinosiglip", "dinoclip")
_TOWER_PREFIXES = ("vision_backbone.featurizer", "vision_backbone.fused_featurizer")

# What timm's names mean.
_TIMM_TOWERS = {
    "vit_large_patch14_reg4_dinov2": DINOV2,
    "vit_so400m_patch14_siglip_224": SIGLIP,
    "vit_so400m_patch14_siglip_384": SIGLIP,
}


def load_config(
    directory: Path, name: str = "", statistics_directory: Path | None = None
) -> OpenVLAConfig:
    """Read the configuration of a checkpoint directory.

    `name` is what the user called it (a hub id, say); like the directory's own name it tells the
    first release apart. Statistics may lie in a directory of their own, an adapter's.
    """
    fields = JsonFields.load(
        directory / CONFIG_FILE,
        "expected a directory in OpenVLA's Hugging Face layout",
    )
    model_type = fields.value("model_type", str, "unknown")
    if model_type != MODEL_TYPE:
        raise fields.error(
            "model_type",
            f"is {model_type!r}, expected {MODEL_TYPE!r}; give an OpenVLA checkpoint in its "
            "Hugging Face layout",
        )
    towers = _read_towers(fields)
    llm = _read_llm(fields.section("text_config"))
    size = llm.vocabulary - fields.count("pad_to_multiple_of", _MOST_TOKENS, _PAD_TO_MULTIPLE_OF)
    num_bins = fields.count("n_action_bins", size, DEFAULT_NUM_BINS, least=2)
    return OpenVLAConfig(
        llm=llm,
        towers=towers,
        image=_read_image_processor(directory, towers),
        action_tokens=find_action_tokens(size, num_bins),
        prompt_template=_find_template(fields, directory, name),
        statistics=parse_statistics(find_statistics(fields, statistics_directory or directory)),
        training=load_training(directory),
    )


def load_training(directory: Path) -> TrainingNotes:
    """What `python -m tiny_libero_recipe train` noted; published checkpoints have no such file."""
    path = directory / TRAINING_FILE
    if not path.exists():
        return TrainingNotes()
    fields = JsonFields.load(path, "remove or repair it")
    prompts = fields.values("prompts", str, ())
    known = [template.value for template in PromptTemplate]
    if unknown := [prompt for prompt in prompts if prompt not in known]:
        raise fields.error("prompts", f"names {unknown[0]!r}; known: {', '.join(known)}")
    held_out = fields.section("held_out")
    return TrainingNotes(
        fields.values("instructions", str),
        fields.value("assets", str, ""),
        prompts,
        {suite: held_out.value(suite, str) for suite in held_out.names},
    )


def _read_towers(fields: JsonFields) -> tuple[TowerConfig, ...]:
    backbone = fields.value("vision_backbone_id", str, "siglip-vit-so400m")
    ids = fields.values("timm_model_ids", str, (SIGLIP_TIMM_ID,))
    is_fused = fields.value(
        "use_fused_vision_backbone", bool, backbone.startswith(_FUSED_BACKBONES)
    )
    expected = 2 if is_fused else 1
    if len(ids) != expected:
        raise fields.error("timm_model_ids", f"has {len(ids)} entries, expected {expected}")
    sizes = fields.values("image_sizes", int, (224,) * expected)
    if not all(1 <= size <= _MOST_IMAGE_SIDE for size in sizes):
        raise fields.error("image_sizes", f"must be 1 to {_MOST_IMAGE_SIDE}, got {list(sizes)}")
    if len(sizes) != expected or len(set(sizes)) != 1:
        raise fields.error("image_sizes", f"must be {expected} equal sizes, got {list(sizes)}")
    if any(fields.items("timm_override_act_layers", ())):
        raise fields.error("timm_override_act_layers", "is set; only timm's own are supported")
    towers = tuple(
        _read_tower(fields, timm_id, prefix, sizes[0])
        for timm_id, prefix in zip(ids, _TOWER_PREFIXES, strict=False)
    )
    if len({tower.num_patches for tower in towers}) != 1:
        raise fields.error("vision_sizes", "gives the towers different numbers of patches")
    return towers


def _read_tower(fields: JsonFields, timm_id: str, prefix: str, image_size: int) -> TowerConfig:
    usual = _TIMM_TOWERS.get(timm_id.partition(".")[0])
    if usual is None:
        raise fields.error(
            "timm_model_ids", f"names {timm_id!r}; known: {', '.join(sorted(_TIMM_TOWERS))}"
        )
    sizes = fields.section("vision_sizes").section("dinov2" if usual.is_dino else "siglip")
    tower = replace(
        usual,
        prefix=prefix,
        width=sizes.count("width", _MOST_WIDTH, usual.width),
        depth=sizes.count("depth", _MOST_LAYERS, usual.depth),
        heads=sizes.count("heads", _MOST_HEADS, usual.heads),
        mlp=sizes.count("mlp", _MOST_MLP, usual.mlp),
        image_size=image_size,
        patch_size=sizes.count("patch_size", image_size, 14),
    )
    if tower.width % tower.heads:
        raise sizes.error("heads", f"must divide the width {tower.width}")
    if tower.depth < 2:
        raise sizes.error("depth", "must be at least 2: the last block is never used")
    return tower


def _read_llm(fields: JsonFields) -> LlamaSizes:
    for key, only in (("model_type", "llama"), ("hidden_act", "silu")):
        if fields.value(key, str, only) != only:
            raise fields.error(key, f"is {fields.value(key, str)!r}; only {only!r} is supported")
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if fields.value(key, bool, False):
            raise fields.error(key, "is true; only false is supported")
    if fields.has("rope_scaling"):
        raise fields.error("rope_scaling", "is set; only unscaled rotary positions are supported")
    width = fields.count("hidden_size", _MOST_WIDTH, 4096)
    heads = fields.count("num_attention_heads", _MOST_HEADS, 32)
    kv_heads = fields.count("num_key_value_heads", heads, heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"must divide the {heads} heads")
    head_width = fields.count("head_dim", _MOST_WIDTH, max(width // heads, 1))
    if head_width % 2:
        raise fields.error("head_dim", f"is {head_width}, but positions turn pairs of features")
    # Newer savers nest the angle base in rope_parameters.
    rope_theta = fields.section("rope_parameters").value("rope_theta", float, 10000.0)
    rms_norm_eps = fields.value("rms_norm_eps", float, _RMS_NORM_EPS)
    rope_theta = fields.value("rope_theta", float, rope_theta)
    if rms_norm_eps <= 0 or rope_theta <= 0:
        raise fields.error("rms_norm_eps", "and rope_theta must be above 0")
    return LlamaSizes(
        vocabulary=fields.count("vocab_size", _MOST_TOKENS),
        width=width,
        mlp_width=fields.count("intermediate_size", _MOST_MLP, 11008),
        num_layers=fields.count("num_hidden_layers", _MOST_LAYERS, 32),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_width,
        norm_eps=rms_norm_eps,
        rope_theta=rope_theta,
        max_positions=fields.count("max_position_embeddings", _MOST_TOKENS, 2048),
    )


def _read_image_processor(directory: Path, towers: tuple[TowerConfig, ...]) -> ImageProcessorConfig:
    fields = JsonFields.load(
        directory / PREPROCESSOR_FILE, "copy it from the checkpoint this one was fine-tuned from"
    )
    known = {known_strategy.value: known_strategy for known_strategy in ResizeStrategy}
    strategy = fields.value("image_resize_strategy", str, ResizeStrategy.LETTERBOX.value)
    if strategy not in known:
        raise fields.error("image_resize_strategy", f"is {strategy!r}; known: {', '.join(known)}")
    resize = known[strategy]
    normalizations = _read_normalizations(fields)
    if len(normalizations) != len(towers):
        raise fields.error(
            "tvf_normalize_params",
            f"has {len(normalizations)} entries for {len(towers)} vision towers",
        )
    return ImageProcessorConfig(
        resize=resize,
        size=towers[0].image_size,
        is_stretched=_is_stretched(fields, resize, towers[0].image_size),
        letterbox_fill=_read_fill(fields),
        normalizations=normalizations,
    )


def _is_stretched(fields: JsonFields, resize: ResizeStrategy, size: int) -> bool:
    """True if the file asks for height and width, false if for the shorter side alone."""
    if not fields.has("tvf_resize_params"):
        return resize is ResizeStrategy.NAIVE
    asked = {
        section.values("size", int) if section.is_list("size") else (section.value("size", int),)
        for section in fields.sections("tvf_resize_params")
    }
    if asked not in ({(size,)}, {(size, size)}):
        raise fields.error("tvf_resize_params", f"must ask every tower for size {size}")
    return asked == {(size, size)}


def _read_normalizations(fields: JsonFields) -> tuple[Normalization, ...]:
    # The rounded constants the model was trained with are in tvf_normalize_params; `means` and
    # `stds` of the same file are the unrounded ones.
    if fields.has("tvf_normalize_params"):
        sections = fields.sections("tvf_normalize_params")
        pairs = [
            (section.values("mean", float), section.values("std", float)) for section in sections
        ]
    else:
        pairs = list(zip(fields.rows("means"), fields.rows("stds"), strict=False))
    if not all(len(mean) == len(std) == 3 and 0.0 not in std for mean, std in pairs):
        raise fields.error("tvf_normalize_params", "must hold three means and stds per tower")
    return tuple(pairs)


def _read_fill(fields: JsonFields) -> tuple[int, ...]:
    fill: tuple[int, ...] = (0, 0, 0)
    if fields.has("tvf_letterbox_fill"):
        fill = fields.values("tvf_letterbox_fill", int)
    elif fields.has("means"):
        # One fill for all towers: the original computes it per tower and keeps the last.
        fill = tuple(int(255 * mean) for mean in fields.rows("means")[-1])
    if len(fill) != 3:
        raise fields.error("tvf_letterbox_fill", "must hold three channels")
    return fill


def _find_template(fields: JsonFields, directory: Path, name: str) -> PromptTemplate:
    # The peers look for "v01" in the path alone; the language model tells the same story even
    # when the folder was renamed.
    names = (directory.name, name)
    is_first_release = any("openvla-v01" in one for one in names)
    is_vicuna = fields.value("llm_backbone_id", str, "vicuna-v15-7b").startswith("vicuna")
    return PromptTemplate.V01 if is_first_release or is_vicuna else PromptTemplate.OPENVLA


def find_statistics(config: JsonFields, directory: Path) -> JsonFields:
    """The statistics that belong to a `config.json`, by key and as they are written.

    A `dataset_statistics.json` of the directory replaces the config's own `norm_stats`.
    """
    path = directory / STATISTICS_FILE
    if path.exists():
        return JsonFields.load(path, f"restore {STATISTICS_FILE}")
    statistics = config.section("norm_stats")
    if not statistics.names:
        raise CheckpointError(
            f"{config.path} has no norm_stats, and its folder no {STATISTICS_FILE}; copy "
            f"the {STATISTICS_FILE} of the fine-tuning run into {config.path.parent}"
        )
    return statistics


def parse_statistics(
    fields: JsonFields, block: str = "action", ends: tuple[str, str] = QUANTILES
) -> Mapping[str, ActionStatistics]:
    """Read statistics by key from an object in OpenVLA's layout.

    The `block` of states is `proprio`, which data sets may leave out. `ends` are the two rows of it
    that become -1 and 1.
    """
    if not fields.names:
        raise CheckpointError(f"{fields.path} holds no statistics; expected one entry per data set")
    data_sets = {key: fields.section(key) for key in fields.names}
    return {
        key: _parse_one(data_set, block, ends)
        for key, data_set in data_sets.items()
        if block == "action" or data_set.has(block)
    }


def _parse_one(data_set: JsonFields, block: str, ends: tuple[str, str]) -> ActionStatistics:
    fields = data_set.section(block)
    low, high = (np.array(fields.values(end, float), dtype=np.float64) for end in ends)
    mask = fields.values("mask", bool) if fields.has("mask") else (True,) * len(low)

    mean, std, minimum, maximum = (
        np.array(fields.values(name, float), dtype=np.float64) if fields.has(name) else None
        for name in ("mean", "std", "min", "max")
    )
    try:
        return ActionStatistics(
            low=low,
            high=high,
            mask=np.array(mask, dtype=np.bool_),
            mean=mean,
            std=std,
            minimum=minimum,
            maximum=maximum,
            num_transitions=data_set.value("num_transitions", int, 0),
            num_trajectories=data_set.value("num_trajectories", int, 0),
        )
    except ValueError as error:
        raise data_set.error(block, f"{' and '.join(ends)}: {error}") from None


def load_encoder(directory: Path, template: PromptTemplate, text_vocab_size: int) -> PromptEncoder:
    """Read a checkpoint's tokenizer, which must fit the decoder's vocabulary."""
    path = directory / TOKENIZER_FILE
    tokenizer = load_tokenizer(directory)
    # The padding id lies behind the text vocabulary and never appears in a prompt.
    if tokenizer.get_vocab_size(with_added_tokens=False) > text_vocab_size:
        raise CheckpointError(
            f"{path} has {tokenizer.get_vocab_size(with_added_tokens=False)} pieces, the "
            f"decoder has room for {text_vocab_size}; copy the tokenizer of this checkpoint"
        )
    return PromptEncoder(tokenizer, template, path)


def load_tokenizer(directory: Path, only: Mapping[str, str] | None = None) -> Tokenizer:
    """Read `tokenizer.json`. Parts that are named by `only` must be of this type, or not there.

    The library knows normalizers and decoders that make any text as long as they like.
    """
    path = directory / TOKENIZER_FILE
    remedy = f"copy {TOKENIZER_FILE} from the checkpoint this one was fine-tuned from"
    if not path.exists():
        raise CheckpointError(f"{path} is missing; {remedy}")
    fields = JsonFields.load(path, remedy)
    if fields.section("model").value("type", str, "unknown") != "BPE":
        raise fields.error("model.type", "is not BPE, which the tokenizers of Llama and Qwen are")
    for part, expected in (only or {}).items():
        kind = fields.section(part).value("type", str, expected)
        if kind != expected:
            raise fields.error(f"{part}.type", f"is {kind!r}, expected {expected!r}")
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
        raise CheckpointError(f"{path} is not a tokenizer ({error}); {remedy}") from None
    # Of no prompt: transformers turns off both, too, and a file may ask for a billion blanks.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
