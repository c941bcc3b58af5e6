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

from deft_policies.decoding.target import Prompts, Scores, Target, bucket
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
    """Drafts in one pass: behind prompts that were computed before, or riding in their prefill."""

    name: str
    prompts: Prompts
    tokens: Tensor  # [row, node]
    parents: Sequence[int]  # of nodes, the same in every row
    rides: bool = False

    @property
    def tree(self) -> DraftTree:
        """The drafts."""
        if list(self.parents) == list(range(-1, len(self.parents) - 1)):
            return DraftTree.chain(self.tokens)
        given = torch.tensor(self.parents, device=self.tokens.device).expand_as(self.tokens)
        return replace(DraftTree.chain(self.tokens), parents=given, is_chain=False)

    @property
    def paths(self) -> list[tuple[int, list[int]]]:
        """Rows with the nodes from the root to each leaf."""
        leaves = [node for node in range(len(self.parents)) if node not in self.parents]
        rows = range(len(self.tokens))
        return [(row, _path_to(leaf, self.parents)) for row in rows for leaf in leaves]

    def plain_tokens(self, row: int, path: Sequence[int]) -> list[int]:
        """What plain decoding writes behind the prompt to come along a path."""
        tokens: list[int] = self.tokens[row, list(path)].tolist()
        return tokens[1:] if self.rides else tokens  # a rider's root ends the prompt


def _path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


@dataclass(frozen=True)
class Along:
    """What plain decoding has computed, the prompt's own scores first."""

    prompts: Prompts
    row: int
    tokens: list[int]
    logits: Tensor  # [token, vocabulary]
    hidden: Tensor  # [token, width]


class Passes:
    """Passes of a target through one cache, captured or eager. What they return are copies."""

    def __init__(
        self, target: Target, num_rows: int, longest: int, is_captured: bool = False
    ) -> None:
        """Room for prompts of up to `longest` positions, padding included, and what follows."""
        self.target, self.num_rows, self.longest = target, num_rows, longest
        self.is_captured = is_captured
        self.cache = target.new_cache()
        room = num_rows, longest + 2 * _ROOM
        if is_captured:
            self.cache.fix(*room)
        else:
            self.cache.reserve(*room)
        self._known: list[Along] = []

    def run(self, case: Case) -> Scores:
        """Scores of the case's nodes."""
        if case.rides:
            return self.prefill(case.prompts, case.tree)
        self.prefill(case.prompts, DraftTree.root_only(case.prompts.last_tokens))
        return self.score(case.tree)

    def plain(self, prompts: Prompts, row: int, tokens: list[int]) -> Along:
        """Plain decoding of a prompt's row along tokens; what is known is not computed again."""
        for one in self._known:
            if one.prompts is prompts and one.row == row and one.tokens[: len(tokens)] == tokens:
                return one
        alone = row_of(prompts, row)
        found = [self.prefill(alone, DraftTree.root_only(alone.last_tokens))]
        for token in tokens:
            root = alone.last_tokens.new_full((1,), token)
            found.append(self.score(DraftTree.root_only(root)))
        logits, hidden = (
            torch.cat([getattr(one, name)[0] for one in found]) for name in ("logits", "hidden")
        )
        self._known.append(Along(prompts, row, tokens, logits, hidden))
        return self._known[-1]

    def prefill(self, prompts: Prompts, tree: DraftTree) -> Scores:
        """The prompts with the tree's guesses; behind the prompts a next pass begins."""
        scores, _ = self.target.prefill(self.cache, 0, prompts, tree)
        self._keep_root(len(prompts.lengths))
        return _copied(scores)

    def score(self, tree: DraftTree) -> Scores:
        """A pass over a tree; behind its root a next one begins."""
        scores = self.target.score(self.cache, tree)
        self._keep_root(len(tree.tokens))
        return _copied(scores)

    def _keep_root(self, num_rows: int) -> None:
        path = torch.zeros(num_rows, 1, dtype=torch.int64, device=self.target.device)
        self.cache.keep(path, 1, in_place=True)


def _copied(scores: Scores) -> Scores:
    """Captured passes overwrite what they return."""
    return Scores(scores.logits.clone(), scores.hidden.clone())


def find_difference(case: Case, passes: Passes, twin: Passes) -> str:
    """Where the nodes of a case first differ from the twin's plain decoding; "" where no bit does.

    Layer, operation and node are those of the first operation whose numbers are others.
    """
    scores, offset = passes.run(case), int(not case.rides)
    for row, path in case.paths:
        tokens = case.plain_tokens(row, path)
        along = twin.plain(case.prompts, row, tokens)
        kept = slice(offset, offset + len(path))
        is_equal = torch.equal(scores.logits[row, path], along.logits[kept])
        if not (is_equal and torch.equal(scores.hidden[row, path], along.hidden[kept])):
            with traced(passes) as again, traced(twin) as plain:
                again.run(case)
                plain.plain(case.prompts, row, tokens)
            return _first_difference(again.found[-1], row, path, plain.found[kept])
    return ""


def find_plain_difference(prompts: Prompts, tokens: list[int], passes: Passes, twin: Passes) -> str:
    """The same of plain decoding itself, where the passes of both are made in different ways."""
    found, expected = passes.plain(prompts, 0, tokens), twin.plain(prompts, 0, tokens)
    if torch.equal(found.logits, expected.logits) and torch.equal(found.hidden, expected.hidden):
        return ""
    with traced(passes) as again, traced(twin) as plain:
        again.plain(prompts, 0, tokens)
        plain.plain(prompts, 0, tokens)
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
    num_nodes: int  # of every row, padding among them
    num_slots: int  # the same of a prefill's positions and guesses; 0 of another pass
    lengths: list[int]  # of prompts, [row]

    def row_in(self, tensor: Tensor, row: int, node: int) -> Tensor:
        """The numbers of one node; the last layer of a prefill may compute nodes alone."""
        if self.num_slots and len(tensor) >= len(self.lengths) * self.num_slots:
            return tensor[row * self.num_slots + self.lengths[row] - 1 + node]
        return tensor[row * self.num_nodes + node]


def _first_difference(trace: Trace, row: int, path: list[int], expected: list[Trace]) -> str:
    """`expected` has a plain pass for every node of the path."""
    for index, (name, tensor) in enumerate(trace.operations):
        for node, plain in zip(path, expected, strict=True):
            found = trace.row_in(tensor, row, node)
            if not torch.equal(found, plain.row_in(plain.operations[index][1], 0, 0)):
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

    def prefill(self, prompts: Prompts, tree: DraftTree) -> Scores:
        """The same, noted."""
        num_nodes, num_positions = tree.num_nodes, prompts.embeds.shape[1]
        reserve = self.target.runner.reserve
        if self.is_captured and reserve is not None:
            num_nodes, num_positions = bucket(num_nodes), reserve.padded(num_positions)
        lengths: list[int] = prompts.lengths.tolist()
        shape = (len(lengths), num_nodes, num_positions, prompts.keep_hidden)
        return self._note(
            shape, lengths, num_positions + num_nodes - 1, partial(super().prefill, prompts, tree)
        )

    def score(self, tree: DraftTree) -> Scores:
        """The same, noted."""
        num_nodes = bucket(tree.num_nodes) if self.is_captured else tree.num_nodes
        shape = (len(tree.tokens), num_nodes)
        return self._note(shape, [0] * len(tree.tokens), 0, partial(super().score, tree))

    def _note(
        self,
        shape: tuple[int, ...],
        lengths: list[int],
        num_slots: int,
        run: Callable[[], Scores],
    ) -> Scores:
        """A replay notes nothing, but overwrites what was noted when it was captured."""
        self._noted.clear()
        scores = run()
        if self._noted:
            self._tensors[shape] = self._noted[-self._num_noted :]
        copies = [(name, tensor.clone()) for name, tensor in self._tensors[shape]]
        self.found.append(Trace(copies, shape[1], num_slots, lengths))
        return scores


@contextmanager
def traced(passes: Passes) -> Iterator[TracedPasses]:
    """Passes of the same target that note what every operation of every layer computes."""
    llama, noted = passes.target._passes, list[tuple[str, Tensor]]()
    watched: list[tuple[Any, str, Any]] = []  # with what was there before

    def note(name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            noted.append((name, tensor.clone()))

    def watch(owner: Any, method: str, before: str, after: str) -> None:
        plain = getattr(owner, method)
        watched.append((owner, method, vars(owner).get(method)))

        def run(*inputs: Any) -> Any:
            note(before, inputs[-1])
            found = plain(*inputs)
            note(after, inputs[0] if found is None else found)  # None: added in place
            return found

        vars(owner)[method] = run

    for number, layer in enumerate(llama._layers):
        at = f"layer {number}"
        watch(layer.qkv, "apply", f"{at}, attention norm", f"{at}, qkv")
        watch(layer.out, "add_to", f"{at}, attention", f"{at}, out")
        watch(layer.gate_up, "apply", f"{at}, MLP norm", f"{at}, gate_up")
        watch(layer.down, "add_to", f"{at}, silu times up", f"{at}, down")
    watch(llama.head, "apply", "final norm", "head")
    try:
        yield TracedPasses(passes, noted, 2 * len(watched))
    finally:
        for owner, method, before in watched:
            if before is None:
                del vars(owner)[method]
            else:
                vars(owner)[method] = before


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


def prompts_of(target: Target, lengths: list[int], seed: int = 1) -> Prompts:
    """Random embeddings, padded to the longest."""
    generator, weight = torch.Generator().manual_seed(seed), target.decoder.embedding.weight
    embeds = torch.randn(len(lengths), max(lengths), weight.shape[1], generator=generator)
    num_words = max(1, target.action_tokens.first)
    tokens = torch.randint(0, num_words, (len(lengths),), generator=generator)
    counts, tokens = torch.tensor(lengths).to(weight.device), tokens.to(weight.device)
    return Prompts(embeds.to(weight), counts, tokens, slice(1, 5))


def row_of(prompts: Prompts, row: int) -> Prompts:
    """A row of a batch as a batch of its own, without padding."""
    length = int(prompts.lengths[row])
    return Prompts(
        prompts.embeds[row : row + 1, :length],
        prompts.lengths[row : row + 1],
        prompts.last_tokens[row : row + 1],
        prompts.patches,
        keep_hidden=prompts.keep_hidden,
    )


def tokens_of(target: Target, num_rows: int, num_tokens: int, seed: int = 2) -> Tensor:
    """Random action tokens, [row, token]."""
    generator, bins = torch.Generator().manual_seed(seed), target.action_tokens
    shape = (num_rows, num_tokens)
    return torch.randint(bins.first, bins.last + 1, shape, generator=generator).to(target.device)


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
    prompts, tokens = prompts_of(target, [length]), tokens_of(target, 1, max(widths))
    for width in sorted(widths, reverse=True):
        name = f"chain of {width} behind {length}"
        yield Case(name, prompts, tokens[:, :width], range(-1, width - 1))


def tree_case(target: Target, name: str, length: int) -> Case:
    """A tree behind one prompt."""
    parents = TREES[name]
    tokens = tokens_of(target, 1, len(parents))
    return Case(f"{name} behind {length}", prompts_of(target, [length]), tokens, parents)


def rider_case(
    target: Target, parents: Sequence[int], length: int, keeps_hidden: bool = True
) -> Case:
    """A tree that rides behind a prompt in its prefill."""
    prompts = replace(prompts_of(target, [length]), keep_hidden=keeps_hidden)
    tokens = tokens_of(target, 1, len(parents))
    tokens[:, 0] = prompts.last_tokens
    hidden = "" if keeps_hidden else ", last layer of them alone"
    name = f"{len(parents) - 1} riders behind {length}{hidden}"
    return Case(name, prompts, tokens, parents, rides=True)


def batch_case(target: Target, lengths: list[int], parents: Sequence[int]) -> Case:
    """Rows of a batch, each with its own tokens."""
    tokens = tokens_of(target, len(lengths), len(parents))
    name = f"{len(parents)} nodes behind each of {len(lengths)} prompts"
    return Case(name, prompts_of(target, lengths), tokens, parents)
