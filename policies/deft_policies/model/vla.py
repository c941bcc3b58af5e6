"""OpenVLA as modules: towers, projector and decoder, every size from the configuration.

The same modules serve inference, where the decoder runs through its cache, and training, where
`forward` runs whole sequences and gradients flow.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deft_policies.model.formats import Quantization
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.packed import PackableLinear
from deft_policies.model.quantization import quantize_linears
from deft_policies.model.sizes import OpenVLAConfig, VlaConfig
from deft_policies.model.tensor_names import tensor_places
from deft_policies.model.vision import Projector, VisionTransformer

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels


class VlaNetwork(nn.Module):
    """What networks of all families have: a decoder, which may be quantised."""

    config: VlaConfig
    decoder: LlamaDecoder

    def __init__(self) -> None:
        super().__init__()
        self.quantization = Quantization.NONE  # of the decoder's matrices
        self.unquantized: list[str] = []  # names of those whose sizes the format cannot group

    def quantize_layer(self, index: int, quantization: Quantization, device: torch.device) -> None:
        """Store the matrices of one decoder layer in fewer bits, once its weights are there."""
        left = quantize_linears(self.decoder.layers[index], quantization, device)
        self.quantization = quantization
        self.unquantized += [f"layers.{index}.{name}" for name in left]

    def describe_quantization(self) -> str:
        """The format, and how many matrices it could not take."""
        name = self.quantization.value
        if not self.unquantized:
            return name
        total = 4 * len(self.decoder.layers)  # qkv, out, gate_up and down
        return f"{name}, but {len(self.unquantized)} of {total} matrices stay as they were"

    def fingerprint(self) -> str:
        """A digest that samples every weight: what was trained for other weights is refused by it.

        Equal for equal checkpoints, in float32 and bfloat16 alike; quantised ones have none that
        others could be compared with.
        """
        digest = hashlib.sha256()
        for name, weight in sorted(self.named_parameters()):
            flat = weight.detach().flatten()
            picked = flat[:: max(1, len(flat) // 1024)].float().cpu()
            digest.update(f"{name} {tuple(weight.shape)}\n".encode())
            digest.update(picked.numpy().tobytes())
        return digest.hexdigest()


class OpenVLAModel(VlaNetwork):
    """Frames and prompt ids to next-token scores."""

    config: OpenVLAConfig

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        self.config = config
        self.towers = nn.ModuleList(VisionTransformer(sizes) for sizes in config.towers)
        self.projector = Projector(config.vision_width, config.llm.width, config.is_fused)
        self.decoder = LlamaDecoder(config.llm)

    @staticmethod
    def empty(config: OpenVLAConfig, device: torch.device, dtype: torch.dtype) -> "OpenVLAModel":
        """Allocate on a device without initialising: to be filled by a loader."""
        with torch.device("meta"):
            model = OpenVLAModel(config).to(dtype)
        allocate(model, device)
        return model.eval()

    def see(self, pixels: Tensor, modulations: Sequence[Tensor | None] | None = None) -> Tensor:
        """Patches [row, patch, width], inputs of the decoder: see `look`."""
        patches: Tensor = self.projector(self.look(pixels, modulations))
        return patches

    def look(self, pixels: Tensor, modulations: Sequence[Tensor | None] | None = None) -> Tensor:
        """Features [row, patch, vision_width] of [row, 3 * tower, height, width], side by side.

        `modulations`, one of each tower, are what an instruction does to the towers' channels.
        """
        views = pixels.chunk(len(self.towers), dim=1)
        changes = modulations or [None] * len(views)
        work = [
            partial(tower, view, change)
            for tower, view, change in zip(self.towers, views, changes, strict=True)
        ]
        seen = run_side_by_side(work, pixels.device)
        return seen[0] if len(seen) == 1 else torch.cat(seen, dim=2)

    def compose(self, patches: Tensor, ids: Tensor) -> Tensor:
        """Decoder inputs [row, position, width]: first id, patches, the other ids.

        `ids` is [row, text] and may be right-padded with any valid id.
        """
        words = self.decoder.embedding(ids)
        return torch.cat((words[:, :1], patches, words[:, 1:]), dim=1)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Teacher-forced hidden states after the final norm, [row, position, width].

        `ids` holds prompt and answer; `decoder.head` turns hidden states into logits.
        """
        hidden: Tensor = self.decoder(self.compose(self.see(pixels), ids))
        return hidden

    def fuse(self, kernels: "FusedKernels") -> None:
        """From now on run inference with these. Before anything is built on the decoder."""
        self.decoder.kernels = kernels
        for tower in self.towers:
            assert isinstance(tower, VisionTransformer)
            tower.kernels = kernels

    def pack_vision(self) -> None:
        """Copy what looks at frames in bfloat16 into a layout that a CPU multiplies faster."""
        for module in (*self.towers.modules(), *self.projector.modules()):
            if isinstance(module, PackableLinear):
                module.pack()

    def named_tensors(self) -> dict[str, Tensor]:
        """Every weight in use under its published name, as a view: writing changes the model."""
        parameters = dict(self.named_parameters())
        return {
            place.name: parameters[place.parameter][place.rows]
            for place in tensor_places(self.config)
            if place.parameter is not None
        }


def run_side_by_side(parts: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    """The results of parts that do not need each other; on a GPU they share the device.

    In a recording the streams become branches of the graph, which costs nothing when it runs.
    """
    if device.type != "cuda" or len(parts) == 1:
        return [part() for part in parts]
    here = torch.cuda.current_stream(device)
    first, *others = parts
    aside = [torch.cuda.Stream(device) for _ in others]  # type: ignore[no-untyped-call]
    results = []
    for stream, part in zip(aside, others, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            results.append(part())
    mine = first()
    for stream, result in zip(aside, results, strict=True):
        here.wait_stream(stream)
        result.record_stream(here)
    return [mine, *results]


def allocate(part: nn.Module, device: torch.device) -> None:
    """Give a module that was laid out on the meta device memory of its own, uninitialised.

    `Module.to_empty` would do, but imports a symbolic algebra system on the way: seconds.
    """
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            empty = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            setattr(module, name, empty)
