"""VLA-0's shapes: Qwen2.5-VL-3B with random weights, as it is served and without fused kernels."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from deft_policies.families.vla0.network import Vla0Config, Vla0Network
from deft_policies.model.graphs import Tensors
from deft_policies.model.qwen_vision import FRAMES, PATCH, QwenVisionSizes
from deft_policies.model.random_weights import STATISTICS_KEY, unit_statistics
from deft_policies.model.sizes import LlamaSizes
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.setting import Setting
from scripts.bench.gpu.small_networks import PICTURES, ask, draw

WIDTHS = (1, 16, 128)
_ROOM = 1024  # positions behind a prompt: its longest text
_NUM_TOKENS = 12  # that answers are written with


def qwen(size: str) -> Vla0Config:
    """Sizes as the published files have them, or as small as can be."""
    if size == "7b":
        llm = LlamaSizes(
            _NUM_TOKENS, 2048, 11008, 36, 16, 2, 128, max_positions=4096, has_qkv_bias=True
        )
        vision = QwenVisionSizes(1280, 3420, 32, 16, 2048, 112, frozenset((7, 15, 23, 31)))
        return _config(llm, vision, 151936, (16, 24, 24))
    llm = LlamaSizes(_NUM_TOKENS, 32, 48, 2, 4, 2, 8, max_positions=2048, has_qkv_bias=True)
    return _config(llm, QwenVisionSizes(32, 48, 2, 2, 32, 112, frozenset((1,))), 64, (2, 1, 1))


def _config(
    llm: LlamaSizes, vision: QwenVisionSizes, vocab_size: int, sections: tuple[int, ...]
) -> Vla0Config:
    statistics = {STATISTICS_KEY: unit_statistics()}
    ids = tuple(range(_NUM_TOKENS))
    return Vla0Config(llm, vision, vocab_size, sections, True, ids, statistics)


def vla0(setting: Setting) -> Iterator[Row]:
    """A prefill, passes by width and the tower, all captured."""
    config = qwen(setting.size.name)
    network = draw(setting, partial(Vla0Network, config))
    side = 16  # patches of a picture's side
    patches = setting.random(PICTURES, side**2, 3 * FRAMES * PATCH**2)
    return ask(
        setting, network, "vla0", length=setting.size.prompt, widths=WIDTHS, room=_ROOM,
        see=partial(_see, network, (side, side)), frames=patches, is_served_fused=True,
    )  # fmt: skip


def _see(network: Vla0Network, grid: tuple[int, int], patches: Tensor) -> Tensors:
    return (network.vision(patches, grid),)
