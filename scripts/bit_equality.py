"""Whether a token has the same bits alone as among others, and where it first has not.

The slow twin is plain decoding: one row, one token a pass. Used by tests on small decoders, and by
`scripts.bench gpu` on whole ones, whose passes are captured.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deft_policies.decoding.captured import WIDTHS, bucket, riders_of
from deft_policies.decoding.target import PassRow, Prompt, Scores, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.formats import Quantization
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.quantization import quantize_linears
from deft_policies.model.sizes import LlamaSizes, TokenRange
from deft_policies.model.vla import OpenVLAModel

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels

# A decoder of the small policies that ship; one whose heads share keys; a layer of OpenVLA-7B.
SMALL = LlamaSizes(448, 192, 512, 3, 6, 6, 32, max_positions=512)
SHARED_KEYS = replace(SMALL, num_kv_heads=2)
WIDE = LlamaSizes(448, 4096, 11008, 1, 32, 32, 128, max_positions=512)
# Parents of nodes: the best path first, then branches; every second node another branch; all
# guesses side by side.
TREES = {
    "comb": (-1, 0, 1, 2, 0, 1, 2, 4),
    "woven": (-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8),
    "star": (-1, *[0] * 12),
}
CHAIN = tuple(range(-1, 44))
_FIRST_BIN = 192  # of 448 tokens
_ROOM = 64  # positions behind a prompt


@dataclass(frozen=True)
class Case:
    """Drafts in one pass: behind prompts that were computed before, or riding in a prefill."""

    name: str
    prompts: list[Prompt]
    tokens: list[list[int]]  # [row][node]
    parents: Sequence[int]  # of nodes, the same in every row
    rides: bool = False
    keeps_hidden: bool = True  # of a prompt that they ride behind

    @property
    def trees(self) -> list[DraftTree]:
        """The drafts of each row."""
        return [tree_of(tokens, self.parents) for tokens in self.tokens]

    @property
    def paths(self) -> list[tuple[int, list[int]]]:
        """Rows with the nodes from the root to each leaf."""
        leaves = [node for node in range(len(self.parents)) if node not in self.parents]
        rows = range(len(self.tokens))
        return [(row, _path_to(leaf, self.parents)) for row in rows for leaf in leaves]

    def plain_tokens(self, row: int, path: Sequence[int]) -> list[int]:
        """What plain decoding writes behind the prompt to come along a path."""
        tokens = [self.tokens[row][node] for node in path]
        return tokens[1:] if self.rides else tokens  # a rider's root ends the prompt


def tree_of(tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    """A tree of these tokens."""
    is_chain = list(parents) == list(range(-1, len(parents) - 1))
    return DraftTree(list(tokens), list(parents), [""] * len(tokens), is_chain=is_chain)


def _path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


@dataclass(frozen=True)
class Along:
    """What plain decoding has computed, the prompt's own scores first."""

    prompt: Prompt
    tokens: list[int]
    logits: Tensor  # [token, vocabulary]
    hidden: Tensor  # [token, width]


@dataclass(frozen=True)
class Computed:
    """Scores of the nodes of each row, copied: captured passes overwrite theirs."""

    logits: list[Tensor]  # [row][node, vocabulary]
    hidden: list[Tensor]  # [row][node, width]

    @staticmethod
    def of(scores: Scores, rows: Sequence[PassRow]) -> "Computed":
        """Of every node of these rows."""
        where = [scores.nodes(index, row.tree) for index, row in enumerate(rows)]
        logits, hidden = scores.logits, scores.hidden
        return Computed(
            [logits[one].clone() for one in where], [hidden[one].clone() for one in where]
        )


class Passes:
    """Passes of a target through one cache, captured or as they come."""

    def __init__(
        self, target: Target, num_rows: int, longest: int, is_captured: bool = False
    ) -> None:
        """Room for prompts of up to `longest` positions and for what follows them."""
        self.target, self.num_rows, self.longest = target, num_rows, longest
        self.is_captured = is_captured
        self.cache = target.new_cache()
        if is_captured:
            target.set_aside(self.cache, _ROOM, _ROOM)
        else:
            self.cache.reserve(num_rows, longest + 2 * _ROOM)
        self._known: list[Along] = []

    def run(self, case: Case) -> Computed:
        """Scores of the case's nodes."""
        if case.rides:
            (prompt,), (tree,) = case.prompts, case.trees
            return self.prefill(prompt, tree, keeps_hidden=case.keeps_hidden)
        for slot, prompt in enumerate(case.prompts):
            self.prefill(prompt, slot=slot)
        return self.verify(case.prompts, case.trees)

    def plain(self, prompt: Prompt, tokens: list[int]) -> Along:
        """Plain decoding of a prompt along tokens; what is known is not computed again."""
        for one in self._known:
            if one.prompt is prompt and one.tokens[: len(tokens)] == tokens:
                return one
        found = [self.prefill(prompt)]
        for place, token in enumerate(tokens):
            found.append(self.verify([prompt], [DraftTree.of_committed([token])], place))
        logits = torch.cat([one.logits[0] for one in found])
        hidden = torch.cat([one.hidden[0] for one in found])
        self._known.append(Along(prompt, tokens, logits, hidden))
        return self._known[-1]

    def prefill(
        self,
        prompt: Prompt,
        tree: DraftTree | None = None,
        slot: int = 0,
        keeps_hidden: bool = False,
    ) -> Computed:
        """The prompt with the tree's guesses."""
        tree = tree or DraftTree.of_committed([prompt.last_token])
        row = PassRow(slot, prompt.length - 1, tree, slot, prompt=prompt, keeps_hidden=keeps_hidden)
        return self._forward([row])

    def verify(
        self, prompts: Sequence[Prompt], trees: Sequence[DraftTree], num_tokens: int = 0
    ) -> Computed:
        """A pass over trees, behind prompts and so many tokens."""
        rows = [
            PassRow(slot, prompt.length + num_tokens, tree, slot)
            for slot, (prompt, tree) in enumerate(zip(prompts, trees, strict=True))
        ]
        return self._forward(rows)

    def _forward(self, rows: Sequence[PassRow]) -> Computed:
        return Computed.of(self.target.forward(self.cache, rows), rows)


def find_difference(case: Case, passes: Passes, twin: Passes) -> str:
    """Where the nodes of a case first differ from the twin's plain decoding; "" where no bit does.

    Layer, operation and node are those of the first operation whose numbers are others.
    """
    computed, offset = passes.run(case), int(not case.rides)
    for row, path in case.paths:
        tokens = case.plain_tokens(row, path)
        along = twin.plain(case.prompts[row], tokens)
        kept = slice(offset, offset + len(path))
        is_equal = torch.equal(computed.logits[row][path], along.logits[kept])
        if not (is_equal and torch.equal(computed.hidden[row][path], along.hidden[kept])):
            with traced(passes) as again, traced(twin) as plain:
                again.run(case)
                plain.plain(case.prompts[row], tokens)
            return _first_difference(again.found[-1], row, path, plain.found[kept])
    return ""


def find_plain_difference(prompt: Prompt, tokens: list[int], passes: Passes, twin: Passes) -> str:
    """The same of plain decoding itself, where the passes of both are made in different ways."""
    found, expected = passes.plain(prompt, tokens), twin.plain(prompt, tokens)
    if torch.equal(found.logits, expected.logits) and torch.equal(found.hidden, expected.hidden):
        return ""
    with traced(passes) as again, traced(twin) as plain:
        again.plain(prompt, tokens)
        plain.plain(prompt, tokens)
    for place, (trace, other) in enumerate(zip(again.found, plain.found, strict=True)):
        where = _first_difference(trace, 0, [0], [other])
        if where != _NOWHERE:
            return f"token {place}: {where}"
    return _NOWHERE


_NOWHERE = "in no operation, when it was computed again"


@dataclass(frozen=True)
class Trace:
    """What the operations of one pass computed."""

    operations: list[tuple[str, Tensor]]  # with layer and name; [row of a matrix, number]
    first: list[int]  # where node 0 of each row lies
    last: list[int]  # the same behind the attention of the last layer, which may leave tokens out

    def row_in(self, index: int, row: int, node: int) -> Tensor:
        """The numbers of one node in an operation."""
        names = [name for name, _ in self.operations]
        last_layer = max(number for number, name in enumerate(names) if name.endswith("attention"))
        is_behind = index >= last_layer
        return self.operations[index][1][(self.last if is_behind else self.first)[row] + node]


def _first_difference(trace: Trace, row: int, path: list[int], expected: list[Trace]) -> str:
    """`expected` has a plain pass for every node of the path."""
    for index, (name, _) in enumerate(trace.operations):
        for node, plain in zip(path, expected, strict=True):
            if not torch.equal(trace.row_in(index, row, node), plain.row_in(index, 0, 0)):
                return f"{name}, row {row}, node {node}"
    return _NOWHERE


class TracedPasses(Passes):
    """Also note what operations compute."""

    def __init__(self, like: Passes, noted: list[tuple[str, Tensor]], num_noted: int) -> None:
        """Through a cache of its own; operations note into a list, so many in a pass."""
        super().__init__(like.target, like.num_rows, like.longest, like.is_captured)
        self._noted, self._num_noted = noted, num_noted
        self._tensors: dict[object, list[tuple[str, Tensor]]] = {}
        self.found: list[Trace] = []

    def _forward(self, rows: Sequence[PassRow]) -> Computed:
        """A replay notes nothing, but overwrites what was noted when it was captured."""
        self._noted.clear()
        computed = super()._forward(rows)
        first, last, shape = self._places(rows)
        if self._noted:
            self._tensors[shape] = self._noted[-self._num_noted :]
        copies = [(name, tensor.clone()) for name, tensor in self._tensors[shape]]
        self.found.append(Trace(copies, first, last))
        return computed

    def _places(self, rows: Sequence[PassRow]) -> tuple[list[int], list[int], object]:
        """Where node 0 of each row lies, at first and at last; and what replays have in common."""
        row, prompt = rows[0], rows[0].prompt
        if self.is_captured and prompt is not None:
            first = [prompt.length - 1]
            riders = bucket(row.tree.num_nodes - 1, riders_of(WIDTHS[-1]))
            reserve = self.target.runner.reserve
            padded = None if reserve is None else reserve.padded(prompt.length)
            return first, first if row.keeps_hidden else [0], (riders, padded, row.keeps_hidden)
        if self.is_captured:
            width = bucket(max(row.tree.num_nodes for row in rows))
            places = [row.slot * width for row in rows]
            return places, places, (len(rows), width)
        first, last, num_first, num_last = list[int](), list[int](), 0, 0
        for row in rows:
            before = 0 if row.prompt is None else row.start
            kept = before if row.keeps_hidden else 0
            first.append(num_first + before)
            last.append(num_last + kept)
            num_first += before + row.tree.num_nodes
            num_last += kept + row.tree.num_nodes
        return first, last, object()


@contextmanager
def traced(passes: Passes) -> Iterator[TracedPasses]:
    """Passes of the same target that note what every operation of every layer computes."""
    llama, noted, is_inside = passes.target.passes, list[tuple[str, Tensor]](), False
    watched: list[tuple[Any, str, Any]] = []  # with what was there before

    def note(name: str, tensor: Tensor) -> None:
        noted.append((name, tensor.clone()))

    def watch(owner: Any, method: str, after: Callable[[], str], before: str = "") -> None:
        plain = getattr(owner, method)
        watched.append((owner, method, vars(owner).get(method)))

        def run(*inputs: Any, **others: Any) -> Any:
            nonlocal is_inside
            if is_inside:  # of an operation that is noted as a whole
                return plain(*inputs, **others)
            if before:
                note(before, inputs[-1])
            is_inside = True
            found = plain(*inputs, **others)
            is_inside = False
            note(after(), inputs[0] if found is None else found)  # None: added in place
            return found

        vars(owner)[method] = run

    kernels = passes.target.decoder.kernels
    if llama.is_fused:
        names = _fused_names(len(llama._layers))
        for method in ("rms_norm", "project", "attend", "product", "open"):
            watch(kernels, method, lambda: names[len(noted) % len(names)])
        num_noted = len(names)
    else:
        for number, layer in enumerate(llama._layers):
            at = f"layer {number}, "
            for owner, method, before, after in (
                (layer.qkv, "apply", "attention norm", "qkv"),
                (layer.out, "add_to", "attention", "out"),
                (layer.gate_up, "apply", "MLP norm", "gate_up"),
                (layer.down, "add_to", "silu times up", "down"),
            ):
                watch(owner, method, partial(str, at + after), at + before)
        watch(llama.head, "apply", partial(str, "head"), "final norm")
        num_noted = 2 * len(watched)
    try:
        yield TracedPasses(passes, noted, num_noted)
    finally:
        for owner, method, before in watched:
            if before is None:
                del vars(owner)[method]
            else:
                vars(owner)[method] = before


def _fused_names(num_layers: int) -> list[str]:
    """What fused kernels compute in a pass, in order."""
    parts = ("attention norm", "queries", "attention", "out", "MLP norm", "silu times up", "down")
    of_layers = [f"layer {number}, {part}" for number in range(num_layers) for part in parts]
    return [*of_layers, "final norm", "head"]


def make_target(
    sizes: LlamaSizes = SMALL,
    seed: int = 0,
    quantization: Quantization = Quantization.NONE,
    kernels: "FusedKernels | None" = None,
) -> Target:
    """A decoder of random weights in bfloat16; with fused kernels on a GPU."""
    decoder = LlamaDecoder(sizes).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.08, generator=generator)
    decoder.bfloat16().eval()
    for layer in decoder.layers:
        quantize_linears(layer, quantization, torch.device("cpu"))
    if kernels is not None:
        decoder.cuda().kernels = kernels
    return Target(decoder, TokenRange(_FIRST_BIN, sizes.vocabulary - 1))


def prompts_of(target: Target, lengths: list[int], seed: int = 1) -> list[Prompt]:
    """Random embeddings."""
    generator, weight = torch.Generator().manual_seed(seed), target.decoder.embedding.weight
    embeds = torch.randn(len(lengths), max(lengths), weight.shape[1], generator=generator)
    num_words = max(1, target.action_tokens.first)
    last: list[int] = torch.randint(0, num_words, (len(lengths),), generator=generator).tolist()
    rows = zip(embeds.to(weight), lengths, last, strict=True)
    return [Prompt(row[:length], token, slice(1, 5)) for row, length, token in rows]


def tokens_of(target: Target, num_rows: int, num_tokens: int, seed: int = 2) -> list[list[int]]:
    """Random action tokens, [row][token]."""
    generator, bins = torch.Generator().manual_seed(seed), target.action_tokens
    shape = (num_rows, num_tokens)
    found = torch.randint(bins.first, bins.last + 1, shape, generator=generator)
    return [list(map(int, row)) for row in found]


def find_frame_differences(model: OpenVLAModel, count: int) -> list[int]:
    """Which of so many random frames are seen differently alone."""
    size, weight = model.config.image.size, model.decoder.embedding.weight
    shape = (count, 3 * len(model.towers), size, size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(weight)
    among = model.see(pixels)
    alone = [model.see(pixels[row : row + 1])[0] for row in range(count)]
    return [row for row in range(count) if not torch.equal(alone[row], among[row])]


def chain_cases(target: Target, length: int, widths: Sequence[int]) -> Iterator[Case]:
    """Chains behind one prompt, the widest first: plain decoding is the same for all."""
    prompts, (tokens,) = prompts_of(target, [length]), tokens_of(target, 1, max(widths))
    for width in sorted(widths, reverse=True):
        name = f"chain of {width} behind {length}"
        yield Case(name, prompts, [tokens[:width]], range(-1, width - 1))


def tree_case(target: Target, name: str, length: int) -> Case:
    """A tree behind one prompt."""
    parents = TREES[name]
    tokens = tokens_of(target, 1, len(parents))
    return Case(f"{name} behind {length}", prompts_of(target, [length]), tokens, parents)


def rider_case(
    target: Target, parents: Sequence[int], length: int, keeps_hidden: bool = True
) -> Case:
    """A tree that rides behind a prompt in its prefill."""
    prompts, (tokens,) = prompts_of(target, [length]), tokens_of(target, 1, len(parents))
    tokens[0] = prompts[0].last_token
    hidden = "" if keeps_hidden else ", last layer of them alone"
    name = f"{len(parents) - 1} riders behind {length}{hidden}"
    return Case(name, prompts, [tokens], parents, rides=True, keeps_hidden=keeps_hidden)


def batch_case(target: Target, lengths: list[int], parents: Sequence[int]) -> Case:
    """Rows of a batch, each with its own tokens."""
    tokens = tokens_of(target, len(lengths), len(parents))
    name = f"{len(parents)} nodes behind each of {len(lengths)} prompts"
    return Case(name, prompts_of(target, lengths), tokens, parents)
