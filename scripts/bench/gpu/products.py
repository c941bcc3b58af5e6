"""What the device can do, and who multiplies how fast and with which bits."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from deft_policies.model.graphs import Tensors
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.quantization import Matrix
from deft_policies.model.vla import OpenVLAModel
from scripts.bench.gpu.asking import Row
from scripts.bench.gpu.setting import Setting

_LEAST_WEIGHTS = 8  # that products rotate over
_CACHES = 4  # times the device's cache that they are large
_LAUNCHES = 100
Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], object]  # rows, weight, bias, out


def ceilings(setting: Setting) -> Iterator[Row]:
    """How fast memory is read and copied, numbers multiplied, and small kernels launched."""
    size, free = setting.size, setting.free_bytes()
    yield {"what": "free memory", "value": free / 1e9, "unit": "GB"}
    source = setting.random(size.copy_bytes // setting.dtype.itemsize)
    copied = torch.empty_like(source)
    copied_ms = setting.median_ms(lambda: copied.copy_(source))
    yield {
        "what": "copy, bytes read and written",
        "value": 2 * size.copy_bytes / copied_ms / 1e9,
        "unit": "TB/s",
    }
    read_ms = setting.median_ms(lambda: source.view(torch.float32).sum())
    yield {"what": "read, by a sum", "value": size.copy_bytes / read_ms / 1e9, "unit": "TB/s"}
    side = size.product_side
    first, second, out = (setting.random(side, side) for _ in range(3))
    multiplied_ms = setting.median_ms(lambda: torch.mm(first, second, out=out))
    yield {
        "what": f"product {side}^3, random numbers",
        "value": 2 * side**3 / multiplied_ms / 1e9,
        "unit": "TFLOP/s",
    }
    few = setting.random(16)

    def add_often(numbers: Tensor) -> Tensors:
        for _ in range(_LAUNCHES):
            numbers.add_(1.0)
        return ()

    launches = setting.new_capture()(add_often, (few,))
    launched_us = 1e3 * setting.median_ms(launches.replay) / _LAUNCHES
    yield {"what": "smallest kernel of a graph", "value": launched_us, "unit": "us"}


def weights(setting: Setting) -> Iterator[Row]:
    """How long the model takes to be made, and whether this device computes rows alike."""
    started = time.monotonic()
    network = setting.network
    setting.wait()
    num_bytes = sum(one.numel() * one.itemsize for one in network.parameters())
    yield {
        "what": "random weights",
        "seconds": time.monotonic() - started,
        "found": f"{num_bytes / 1e9:.2f} GB",
    }
    started = time.monotonic()
    target = setting.new_target(setting.reserve(1), captures=False)
    equality = target.describe_equality()
    seconds = time.monotonic() - started
    yield {"what": "products asked about their bits", "seconds": seconds, "found": equality}


@dataclass(frozen=True)
class Shape:
    """Matrices of one shape, and perhaps their biases."""

    name: str
    weights: Sequence[Tensor]
    biases: Sequence[Tensor] | None = None


def products(setting: Setting) -> Iterator[Row]:
    """Microseconds of each matrix product by rows, and whether others have the bits of ours."""
    network = setting.network
    for shape in decoder_shapes(network.decoder):
        yield from table(setting, shape, setting.size.product_rows)
    for shape, num_rows in vision_shapes(network):
        yield from table(setting, shape, (num_rows,))


def decoder_shapes(decoder: LlamaDecoder) -> Iterator[Shape]:
    """The four of a layer, and the head."""
    layers: list[Any] = list(decoder.layers)
    yield Shape("qkv", [one.attention.qkv.weight for one in layers])
    yield Shape("out", [one.attention.out.weight for one in layers])
    yield Shape("gate_up", [one.mlp.gate_up.weight for one in layers])
    yield Shape("down", [one.mlp.down.weight for one in layers])
    yield Shape("head", [decoder.head.weight])


def vision_shapes(network: OpenVLAModel) -> Iterator[tuple[Shape, int]]:
    """The four of a block of each tower and those of the projector, with the rows of a frame."""
    for tower, sizes in zip(network.towers, network.config.towers, strict=True):
        blocks: Any = tower.blocks
        name = "DINOv2" if sizes.is_dino else "SigLIP"
        for part in ("qkv", "out", "mlp_in", "mlp_out"):
            linears = [getattr(block, part) for block in blocks]
            biased = [one.weight for one in linears], [one.bias for one in linears]
            yield Shape(f"{name} {part}", *biased), sizes.num_patches + sizes.num_leading
    for part in ("fc1", "fc2", "fc3"):
        linear = getattr(network.projector, part)
        if linear is not None:
            shape = Shape(f"projector {part}", [linear.weight], [linear.bias])
            yield shape, network.config.num_patches


def table(setting: Setting, shape: Shape, every: Sequence[int]) -> Iterator[Row]:
    """A row for every number of rows."""
    kept = _rotated(shape.weights, _CACHES * setting.l2_bytes)
    biases = None if shape.biases is None else _repeated(shape.biases, len(kept))
    num_out, num_in = kept[0].shape
    for num_rows in every:
        rows = setting.random(num_rows, num_in)
        found: Row = {"product": f"{shape.name} {num_out}x{num_in}", "rows": num_rows}
        ours: Tensor | None = None
        for name, product, library in _ways(setting):
            outs = torch.zeros(len(kept), num_rows, num_out, dtype=rows.dtype, device=rows.device)
            with library() as told:
                found[f"{name} us"] = _time(setting, product, rows, kept, biases, outs)
            if told:
                found["note"] = told
            if name == "ours":
                ours = outs
                alone = torch.zeros_like(outs[0, :1])
                product(rows[:1], kept[0], None if biases is None else biases[0], alone)
                found["as 1 row"] = torch.equal(alone, outs[0, :1])
            elif ours is not None:
                found[f"{name} as ours"] = compare_bits(outs, ours)
        yield found


def _rotated(weights: Sequence[Tensor], least_bytes: int) -> list[Tensor]:
    """So many that they are read from memory each time; copies where the model has too few."""
    kept, num_bytes = list[Tensor](), 0
    while len(kept) < _LEAST_WEIGHTS or num_bytes < least_bytes:
        one = weights[len(kept) % len(weights)]
        kept.append(one if len(kept) < len(weights) else one.clone())
        num_bytes += one.numel() * one.itemsize
    return kept


def _repeated(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    return [tensors[index % len(tensors)] for index in range(count)]


def _ways(setting: Setting) -> Iterator[tuple[str, Product, Callable[[], Any]]]:
    """Who can multiply here, ours first."""
    kernels = setting.network.decoder.kernels
    if kernels is not None and kernels.multiplies(setting.network.decoder.head.weight):
        yield (
            "ours",
            lambda a, b, bias, out: kernels._multiply(a, Matrix(b, bias), out, None),
            _as_it_is,
        )
    if setting.is_cuda:
        yield "cuBLAS", multiply_by_pytorch, lambda: blas("cublas", may_split=True)
        yield "cuBLASLt", multiply_by_pytorch, lambda: blas("cublaslt", may_split=False)
    else:
        yield "PyTorch", multiply_by_pytorch, _as_it_is


def multiply_by_pytorch(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """[row, in] times weight [out, in], plus a bias."""
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


@contextmanager
def _as_it_is() -> Iterator[str]:
    yield ""


@contextmanager
def blas(library: str, may_split: bool) -> Iterator[str]:
    """A block with this library; says what could not be had.

    Where sums `may_split`, a library may add the parts of one in another order, and in bfloat16.
    """
    matmul, told = torch.backends.cuda.matmul, ""
    before = torch.backends.cuda.preferred_blas_library()
    reduces = matmul.allow_bf16_reduced_precision_reduction
    splits = getattr(matmul, "allow_bf16_reduced_precision_reduction_split_k", None)
    torch.backends.cuda.preferred_blas_library(library)
    try:
        if may_split:
            matmul.allow_bf16_reduced_precision_reduction = True
        else:
            try:
                matmul.allow_bf16_reduced_precision_reduction = (False, False)
            except TypeError:  # before torch 2.10
                matmul.allow_bf16_reduced_precision_reduction = False
                told = "this torch cannot forbid split-K"
        yield told
    finally:
        matmul.allow_bf16_reduced_precision_reduction = (
            reduces if splits is None else (reduces, splits)
        )
        torch.backends.cuda.preferred_blas_library(before)


def _time(
    setting: Setting,
    product: Product,
    rows: Tensor,
    kept: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    outs: Tensor,
) -> float:
    """Microseconds of a product in a graph of one with every weight."""

    def multiply(rows: Tensor) -> Tensors:
        for index, weight in enumerate(kept):
            product(rows, weight, None if biases is None else biases[index], outs[index])
        return ()

    multiply(rows)  # settles libraries, compiles programs
    captured = setting.new_capture()(multiply, (rows,))
    times = setting.milliseconds(captured.replay, max(2, setting.size.repeats // 3))
    return 1e3 * median(times) / len(kept)


def compare_bits(found: Tensor, ours: Tensor) -> str:
    """Whether all bits are the same, or how many numbers are not."""
    if torch.equal(found, ours):
        return "yes"
    return f"{float((found != ours).float().mean()):.2%} differ"
