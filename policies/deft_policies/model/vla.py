"""OpenVLA as modules: towers, projector and decoder, every size from the configuration.

The same modules serve inference, where the decoder runs through its cache, and training, where
`forward` runs whole sequences and gradients flow.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft_policies.model.cpu_products import PackableLinear
from deft_policies.model.formats import Quantization
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.quantization import Matrix, quantize_linears
from deft_policies.model.sizes import LAYER_NORM_EPS, OpenVLAConfig, TowerConfig, VlaConfig
from deft_policies.model.tensor_names import tensor_places

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

    def fuse(self, kernels: "FusedKernels") -> None:
        """From now on run inference with these. Before anything is built on the decoder."""
        fuse(self, kernels)

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

        Equal for equal checkpoints in whatever format they are served: every number is taken as
        bfloat16 rounds it. Quantised ones have none that others could be compared with.
        """
        digest = hashlib.sha256()
        for name, weight in sorted(self.named_parameters()):
            flat = weight.detach().flatten()
            picked = flat[:: max(1, len(flat) // 1024)].bfloat16().float().cpu()
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


@runtime_checkable
class RunsKernels(Protocol):
    """A module that runs with fused kernels where it has some: decoders, towers, their layers."""

    kernels: "FusedKernels | None"


def fuse(part: nn.Module, kernels: "FusedKernels") -> None:
    """Have everything of a part run inference with these from now on."""
    for module in part.modules():
        if isinstance(module, RunsKernels):
            module.kernels = kernels


@cache
def _stream_aside(device: torch.device, number: int) -> "torch.cuda.Stream":
    """Always the same ones: whatever multiplies on a stream leaves it a workspace for good."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def run_side_by_side(parts: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    """The results of parts that do not need each other; on a GPU they share the device.

    In a recording the streams become branches of the graph, which costs nothing when it runs.
    """
    if device.type != "cuda" or len(parts) == 1:
        return [part() for part in parts]
    current = torch.cuda.current_stream(device)
    first, *others = parts
    aside = [_stream_aside(device, number) for number in range(len(others))]
    results = []
    for stream, part in zip(aside, others, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results.append(part())
    mine = first()
    for stream, result in zip(aside, results, strict=True):
        current.wait_stream(stream)
        result.record_stream(current)
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


class Projector(nn.Module):
    """An MLP: three layers for the fused towers (inner width 4 x vision), two for a single one."""

    def __init__(self, vision_width: int, width: int, is_fused: bool) -> None:
        super().__init__()
        inner = 4 * vision_width if is_fused else width
        self.fc1 = PackableLinear(vision_width, inner, has_gelu=True)
        self.fc2 = PackableLinear(inner, width, has_gelu=is_fused)
        self.fc3 = PackableLinear(width, width) if is_fused else None

    def forward(self, patches: Tensor) -> Tensor:
        """[row, patch, vision_width] to [row, patch, width]."""
        projected: Tensor = self.fc2(self.fc1(patches))
        return projected if self.fc3 is None else self.fc3(projected)


class Block(nn.Module):
    """Pre-norm attention and MLP, each scaled per channel where the tower has LayerScale."""

    def __init__(self, sizes: TowerConfig) -> None:
        super().__init__()
        width, eps = sizes.width, LAYER_NORM_EPS
        self.num_heads = sizes.heads
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.qkv = PackableLinear(width, 3 * width)
        self.out = PackableLinear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp_in = PackableLinear(width, sizes.mlp, has_gelu=True)
        self.mlp_out = PackableLinear(sizes.mlp, width)
        self.scale1 = nn.Parameter(torch.ones(width)) if sizes.is_dino else None
        self.scale2 = nn.Parameter(torch.ones(width)) if sizes.is_dino else None

    def forward(self, tokens: Tensor, modulation: Tensor | None = None) -> Tensor:
        """[row, token, width] in and out; see `VisionTransformer.forward` for the modulation."""
        mixed = self.attend(self.norm1(tokens))
        tokens = tokens + (mixed if self.scale1 is None else mixed * self.scale1)
        if modulation is not None:
            scale, shift = modulation.unsqueeze(2)
            tokens = tokens * (1 + scale) + shift
        lowered = self.lower(self.norm2(tokens))
        return tokens + (lowered if self.scale2 is None else lowered * self.scale2)

    def lower(self, tokens: Tensor) -> Tensor:
        """The MLP of normalised tokens."""
        lowered: Tensor = self.mlp_out(self.mlp_in(tokens))
        return lowered

    def attend(self, tokens: Tensor) -> Tensor:
        """The attention of normalised tokens."""
        fused = self.qkv(tokens).unflatten(2, (3, self.num_heads, -1)).transpose(1, 3)
        queries, keys, values = fused.unbind(2)  # [row, head, token, head_dim]
        mixed = functional.scaled_dot_product_attention(queries, keys, values)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class VisionTransformer(nn.Module):
    """Pixels to patch features: DINOv2 with registers and LayerScale, or SigLIP.

    A tower yields what its second-to-last block returns, without the final norm. The last block,
    the final norm and SigLIP's pooling head are in every checkpoint and are never used, so they are
    not here.
    """

    def __init__(self, sizes: TowerConfig) -> None:
        super().__init__()
        self.sizes = sizes
        self.patch = nn.Conv2d(3, sizes.width, sizes.patch_size, sizes.patch_size)
        self.position = nn.Parameter(torch.zeros(1, sizes.num_patches, sizes.width))
        if sizes.is_dino:
            self.class_token = nn.Parameter(torch.zeros(1, 1, sizes.width))
            self.registers = nn.Parameter(torch.zeros(1, sizes.num_leading - 1, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_used_blocks))
        self.kernels: FusedKernels | None = None  # for inference

    def forward(self, pixels: Tensor, modulations: Tensor | None = None) -> Tensor:
        """[row, 3, height, width] to [row, patch, width].

        `modulations` [block, 2, row, width] are a scale and a shift of every channel, which each
        block applies to all its tokens between attention and MLP (FiLM).
        """
        tokens = self._embed(pixels)
        if self.sizes.is_dino:
            before = (self.class_token, self.registers)
            wide = [part.expand(len(pixels), -1, -1) for part in before]
            tokens = torch.cat((*wide, tokens), dim=1)
        if self.kernels is None or modulations is not None:
            for index, block in enumerate(self.blocks):
                tokens = block(tokens, None if modulations is None else modulations[index])
        else:
            tokens = self._run_fused(tokens, self.kernels)
        return tokens[:, -self.sizes.num_patches :]

    def _run_fused(self, tokens: Tensor, kernels: "FusedKernels") -> Tensor:
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        normed = blocks[0].norm1(tokens)
        for block, after in zip(blocks, [*blocks[1:], blocks[-1]], strict=True):
            mixed = block.attend(normed)
            tokens, normed = kernels.add_layer_norm(tokens, mixed, block.scale1, block.norm2)
            lowered = block.lower(normed)
            tokens, normed = kernels.add_layer_norm(tokens, lowered, block.scale2, after.norm1)
        return tokens

    def _embed(self, pixels: Tensor) -> Tensor:
        """The patch convolution as one matrix product: its windows do not overlap."""
        size = self.sizes.patch_size
        side = pixels.shape[2] // size
        windows = pixels.reshape(-1, 3, side, size, side, size).permute(0, 2, 4, 1, 3, 5)
        flat = windows.flatten(3).flatten(1, 2)
        weight, bias = self.patch.weight.flatten(1), self.patch.bias
        if self.kernels is None or not self.kernels.multiplies(weight):
            return functional.linear(flat, weight, bias) + self.position
        rows = self.kernels.look(flat.flatten(0, 1), Matrix(weight, bias))
        return rows.view(len(flat), -1, self.sizes.width) + self.position
