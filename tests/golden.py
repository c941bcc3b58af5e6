"""Reads tests/golden, so that tests speak of cases and arrays instead of files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

GOLDEN = Path(__file__).parent / "golden"
TINY_OPENVLA = GOLDEN / "tiny_openvla"
CHAIN_FRAMES = ("synth256", "synth128", "synth360x300")


@dataclass(frozen=True, eq=False)
class GoldenCase:
    """One picture and instruction, and what OpenVLA's own code makes of them in float32."""

    number: int
    instruction: str
    statistics_key: str
    prompt_ids: tuple[int, ...]
    pixel_values_sha256: str
    tokens: tuple[int, ...]
    top2_ids: tuple[tuple[int, int], ...]
    margins: tuple[float, ...]
    action: NDArray[np.float64]

    @property
    def image_path(self) -> Path:
        return GOLDEN / "images" / f"case_{self.number:02d}.png"

    @property
    def has_image(self) -> bool:
        return self.image_path.exists()

    def image(self) -> NDArray[np.uint8]:
        """The picture as an observation carries it: RGB, uint8 [height, width, 3]."""
        return load_rgb(self.image_path)


@dataclass(frozen=True)
class PromptCase:
    """An instruction under a template (`openvla`, `v01` or `raw`), and its ids."""

    template: str
    instruction: str
    prompt: str
    ids: tuple[int, ...]
    model_ids: tuple[int, ...]


def load_rgb(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        return np.array(picture.convert("RGB"))


def chain_image(frame: str, step: str) -> NDArray[np.uint8]:
    """A frame of the LIBERO chain: step `0_input`, `2_jpeg`, `3_lanczos3` or `4_crop`."""
    return load_rgb(GOLDEN / "images" / "libero_chain" / f"{frame}.{step}.png")


@lru_cache(maxsize=1)
def cases() -> tuple[GoldenCase, ...]:
    return tuple(
        GoldenCase(
            number=one["case"],
            instruction=one["instruction"],
            statistics_key=one["unnorm_key"],
            prompt_ids=tuple(one["prompt_ids"]),
            pixel_values_sha256=one["pixel_values_sha256"],
            tokens=tuple(one["tokens"]),
            top2_ids=tuple((first, second) for first, second in one["top2_ids"]),
            margins=tuple(one["top2_margins"]),
            action=np.array(one["action"], dtype=np.float64),
        )
        for one in json.loads((GOLDEN / "expected.json").read_text())["cases"]
    )


def cases_with_image() -> tuple[GoldenCase, ...]:
    return tuple(case for case in cases() if case.has_image)


@lru_cache(maxsize=1)
def prompts() -> tuple[PromptCase, ...]:
    return tuple(
        PromptCase(
            template=one["template"],
            instruction=one["instruction"],
            prompt=one["prompt"],
            ids=tuple(one["ids"]),
            model_ids=tuple(one["model_ids"]),
        )
        for one in json.loads((GOLDEN / "prompts.json").read_text())
    )


@lru_cache(maxsize=1)
def tensor_shapes_7b() -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the 982 tensors of openvla-7b."""
    shapes = json.loads((GOLDEN / "openvla7b_tensor_shapes.json").read_text())
    return {name: tuple(shape) for name, shape in shapes.items()}


@lru_cache(maxsize=1)
def arrays() -> Mapping[str, NDArray[np.float32]]:
    """Intermediate results: `dinov2_XX`, `patch_embeddings_XX`, ... (see the README)."""
    return _load_npz(GOLDEN / "expected.npz")


@lru_cache(maxsize=1)
def action_table() -> Mapping[str, NDArray[np.float64]]:
    """`ids`, `normalised`, and `unnorm_K_{key,q01,q99,mask,tokens,actions}` for K = 0, 1, 2."""
    return _load_npz(GOLDEN / "action_table.npz")


@lru_cache(maxsize=1)
def draft_arrays() -> Mapping[str, NDArray[np.float32]]:
    """Inputs and trees of the draft head, `cXX_rN_...` (see the README)."""
    loaded = dict(_load_npz(GOLDEN / "draft_head" / "expected.npz"))
    rows = {tree["name"][:6]: tree["rows"] for tree in draft_expected()["trees"]}
    for name in [name for name in loaded if "_r2_" in name]:
        if name.endswith(("in_embeds", "in_hidden", "prefix_hidden")):
            first_round = name.replace("_r2_", "_r1_")
            loaded[first_round] = loaded[name][: rows[first_round[:6]]]
    return loaded


@lru_cache(maxsize=1)
def draft_expected() -> Mapping[str, list[dict[str, object]]]:
    """`trees` and `variants` of draft_head/expected.json, as they are."""
    return json.loads((GOLDEN / "draft_head" / "expected.json").read_text())


def write_draft_head(directory: Path) -> Path:
    """Write the draft head in the published layout, the repeated embedding included."""
    import torch
    from safetensors import safe_open

    weights = torch.load(GOLDEN / "draft_head" / "pytorch_model_without_embedding.bin")
    with safe_open(TINY_OPENVLA / "model.safetensors", "pt") as target:
        embedding = target.get_tensor("language_model.model.embed_tokens.weight")
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"embed_tokens.weight": embedding.half(), **weights}, directory / "pytorch_model.bin"
    )
    (directory / "config.json").write_bytes((GOLDEN / "draft_head" / "config.json").read_bytes())
    return directory


def _load_npz(path: Path) -> Mapping[str, NDArray[np.float32]]:
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}
