"""pi0-FAST's shapes: PaliGemma-3B with random weights, as it is served and with fused kernels."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from deft_policies.families.pi0fast.network import TABLE, PaliGemma, Pi0FastConfig
from deft_policies.families.pi0fast.pictures import SIDE
from deft_policies.model.graphs import Tensors
from deft_policies.model.sizes import LlamaSizes, TowerConfig
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.setting import Setting
from scripts.bench.gpu.small_networks import PICTURES, ask, draw

WIDTHS = (1, 16, 64)
_CODES = 2048  # words that answers are written with
_ROOM = 256  # positions behind a prompt


def paligemma(size: str) -> tuple[Pi0FastConfig, int]:
    """Sizes as the published files have them, or as small as can be; positions of a prompt."""
    if size == "7b":
        llm = LlamaSizes(_CODES, 2048, 16384, 18, 8, 1, 256, gate="gelu_tanh")
        tower, length = TowerConfig(False, "", width=1152, depth=27, heads=16, mlp=4304), 768
    else:
        llm = LlamaSizes(32, 16, 24, 2, 4, 1, 8, gate="gelu_tanh")
        tower, length = TowerConfig(False, "", width=16, depth=2, heads=2, mlp=24), 32
    return Pi0FastConfig(llm, tower, llm.vocabulary, (TABLE,), (), {}), length


def pi0fast(setting: Setting) -> Iterator[Row]:
    """A prefill of two pictures, passes by width and the tower, all captured."""
    config, length = paligemma(setting.size.name)
    network = draw(setting, partial(PaliGemma, config))
    pixels = setting.random(PICTURES, 3, SIDE, SIDE)
    return ask(
        setting, network, "pi0-fast", length=length, widths=WIDTHS, room=_ROOM,
        see=partial(_see, network), frames=pixels, is_served_fused=False,
    )  # fmt: skip


def _see(network: PaliGemma, pixels: Tensor) -> Tensors:
    return (network.see(pixels),)
