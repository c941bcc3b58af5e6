"""Unmerged LoRA adapters in PEFT's layout: low-rank changes that are added to weights at load."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from deft_policies.checkpoint.config import CONFIG_FILE
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.tensor_file import Shape, StoredTensor, list_names, read_header
from deft_policies.errors import CheckpointError

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_FOLDER = "lora_adapter"  # in which OFT's training puts it, next to its other files
_PREFIX = "base_model.model."
_WRAPPER = re.compile(r"\.(modules_to_save|base_layer)(?=\.)")
_MOST_REPEATS = 3  # of a pattern: matching takes a module's length to that power
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")


# Two matrices whose product changes a weight, [rank, in] and [out, rank], and a scale.
_Factors = tuple[StoredTensor, StoredTensor, float]


class LoraAdapter:
    """Changes to some weights of a model, under the published names of these weights."""

    def __init__(self, directory: Path) -> None:
        """Read an adapter directory's configuration and headers."""
        self._path = directory / ADAPTER_FILE
        remedy = f"copy the adapter's {ADAPTER_CONFIG_FILE} and {ADAPTER_FILE}"
        fields = JsonFields.load(directory / ADAPTER_CONFIG_FILE, remedy)
        _check_kind(fields)
        # The checkpoint that the adapter was trained on, as its trainer called it.
        self.base = fields.value("base_model_name_or_path", str, "")
        self._replaced: dict[str, StoredTensor] = {}
        self._factors = self._pair_factors(fields)

    @property
    def targets(self) -> frozenset[str]:
        """Published names of the weights that change."""
        return frozenset(self._factors) | frozenset(self._replaced)

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise `CheckpointError` unless every change fits the weight it is for."""
        foreign = self.targets - set(shapes)
        if foreign:
            raise CheckpointError(
                f"{self._path} changes weights that the base does not have: {list_names(foreign)}; "
                f"give the base it was trained on ({self.base or 'not named in its config'})"
            )
        wrong = [
            name for name in self.targets if set(self._shapes_of_changes(name)) != {shapes[name]}
        ]
        if wrong:
            raise CheckpointError(
                f"{self._path} has changes of another shape than the base's weights: "
                f"{list_names(wrong)}; give the base it was trained on"
            )

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight with its change, in float32 so that it is rounded only once.

        Factors that are stored in half precision like the weight are merged as PEFT merges them
        there: product, change and sum are each rounded, so that answers are the merged model's.
        """
        if name in self._replaced:
            weight = self._replaced[name].read(weight.device)
        if name not in self._factors:
            return weight
        *factors, scale = self._factors[name]
        down, up = (factor.read(weight.device) for factor in factors)
        product = up.float().flatten(1) @ down.float().flatten(1)
        if down.dtype == weight.dtype:
            product = product.to(weight.dtype)
            return weight + (product * scale).view(weight.shape)
        return weight.float() + (product * scale).view(weight.shape)

    def _shapes_of_changes(self, name: str) -> Iterator[Shape]:
        if name in self._replaced:
            yield self._replaced[name].shape
        if name in self._factors:
            down, up = (factor.shape for factor in self._factors[name][:2])
            fits = len(up) == len(down) > 1 and up[1] == down[0] and not any(n > 1 for n in up[2:])
            yield (up[0], *down[1:]) if fits else ()

    def _pair_factors(self, fields: JsonFields) -> dict[str, _Factors]:
        sides: dict[str, dict[str, StoredTensor]] = {}
        for stored in read_header(self._path).values():
            name = stored.name.removeprefix(_PREFIX)
            match = _FACTOR.fullmatch(name)
            if match is None:
                # PEFT saves modules that were trained whole, and some of those it adapted.
                self._replaced[_WRAPPER.sub("", name)] = stored
            else:
                sides.setdefault(match["module"], {})[match["side"]] = stored
        lonely = [module for module, factors in sides.items() if len(factors) != 2]
        if lonely:
            raise CheckpointError(
                f"{self._path} has only one of two factors for {list_names(lonely)}; save the "
                "adapter again"
            )
        return {
            f"{module}.weight": (factors["A"], factors["B"], _scale(fields, module))
            for module, factors in sides.items()
        }


def find_adapter(directory: Path) -> Path | None:
    """Where a directory has an adapter instead of a whole model; None if it has a model."""
    if (directory / ADAPTER_CONFIG_FILE).exists():
        return directory
    folder = directory / ADAPTER_FOLDER
    has_one = (folder / ADAPTER_CONFIG_FILE).exists() and not (directory / CONFIG_FILE).exists()
    return folder if has_one else None


def _check_kind(fields: JsonFields) -> None:
    kind = fields.value("peft_type", str, "LORA")
    if kind != "LORA":
        raise fields.error("peft_type", f"is {kind!r}; only LORA adapters can be merged")
    for key in ("use_dora", "fan_in_fan_out"):
        if fields.value(key, bool, False):
            raise fields.error(key, "is true; merge the adapter with PEFT before loading")
    if fields.value("bias", str, "none") != "none":
        raise fields.error("bias", "is not none; merge the adapter with PEFT before loading")


def _scale(fields: JsonFields, module: str) -> float:
    rank = _by_pattern(fields.section("rank_pattern"), module, fields.value("r", float))
    if rank < 1:
        raise fields.error("r", f"is {rank:g} for {module}, expected 1 or more")
    alpha = _by_pattern(fields.section("alpha_pattern"), module, fields.value("lora_alpha", float))
    return alpha / math.sqrt(rank) if fields.value("use_rslora", bool, False) else alpha / rank


def _by_pattern(patterns: JsonFields, module: str, default: float) -> float:
    """The value of the first pattern that the module's name ends in, as PEFT matches them."""
    for pattern in patterns.names:
        _check_pattern(patterns, pattern)
        if re.match(rf"(.*\.)?({pattern})$", module):
            return patterns.value(pattern, float)
    return default


def _check_pattern(patterns: JsonFields, pattern: str) -> None:
    """Refuse what is no pattern, and what could keep us looking for hours."""
    repeats = re.findall(r"[*+{]", pattern)
    if len(repeats) > _MOST_REPEATS or re.search(r"\)\s*[*+{]", pattern):
        raise patterns.error(
            pattern, f"repeats a group, or has more than {_MOST_REPEATS} repetitions"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise patterns.error(pattern, f"is no regular expression: {error}") from None
