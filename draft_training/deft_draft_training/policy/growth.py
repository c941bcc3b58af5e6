"""Makes a trained decoder deeper without changing what it computes.

A shallow policy learns in less time than a deep one. Half-way, layers that add nothing yet are put
between its own, and training goes on from there.
"""

import re
from collections.abc import Mapping

from torch import Tensor

_LAYER = re.compile(r"(.*\bdecoder\.layers\.)(\d+)(\..*)")
_ADDS_TO_STREAM = (".attention.out.weight", ".mlp.down.weight")


def count_layers(weights: Mapping[str, Tensor]) -> int:
    """How many decoder layers a state dict has."""
    found = (_LAYER.fullmatch(name) for name in weights)
    return len({match.group(2) for match in found if match})


def deepened(weights: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The weights of a decoder of `num_layers`, at least as many as there are, that computes alike.

    A new layer is a copy of the one before it whose outputs are zero.
    """
    old = count_layers(weights)
    sources = [number * old // num_layers for number in range(num_layers)]
    grown: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            grown[name] = tensor
            continue
        before, number, rest = match.groups()
        copies = [new for new, source in enumerate(sources) if source == int(number)]
        for new in copies:
            is_silent = new != copies[0] and rest.endswith(_ADDS_TO_STREAM)
            grown[f"{before}{new}{rest}"] = tensor.new_zeros(tensor.shape) if is_silent else tensor
    return grown
