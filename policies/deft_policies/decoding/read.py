"""The one read of a round: what the host wants to know of a pass, by answer and node.

Whatever rules need of logits and hidden states is computed on the device before; everything then
comes to the host in one copy.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.rule import (
    ChoosingRule,
    DeviceRule,
    ScoredNodes,
    TreeRule,
)
from deft_policies.decoding.plugins import ask_rule
from deft_policies.decoding.sampling import (
    ANSWER,
    exponential,
    target_odds,
    top_gap,
)
from deft_policies.decoding.sequence import PassResult, Sequence
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import PolicyError
from deft_policies.model.staging import to_device


@dataclass
class _Slices:
    """Where the numbers of one answer are among those that are read."""

    greedy: slice
    sums: slice
    answer: int
    drawn: slice | None = None
    gaps: slice | None = None
    measured: slice | None = None
    chosen: slice | None = None


class Reading:
    """What the target predicts for every sequence's tree, being copied to the host.

    Numbers of the device are joined as float64, in which token ids are exact, and copied at once.
    """

    def __init__(
        self,
        sequences: Items[Sequence],
        trees: Items[DraftTree],
        scores: Scores,
    ) -> None:
        nodes = [scores.nodes(row, tree) for row, tree in enumerate(trees)]
        for sequence, tree, span in zip(sequences, trees, nodes, strict=True):
            if sequence.grammar is not None:
                scores.change(span, sequence.grammar.adjust(scores.logits[span], sequence, tree))
        self._parts = [scores.for_host.flatten()]
        self._size = len(self._parts[0])
        self._slices = []
        # Once for all where all want them, which is the usual case: a call costs more than a row.
        all_gaps: int | None = None
        if len(sequences) > 1 and all(sequence.wants_margins for sequence in sequences):
            all_gaps = self._add(_gaps(scores.logits, scores.best)).start
        for sequence, tree, span in zip(sequences, trees, nodes, strict=True):
            first, stop = 3 * span.start, 3 * span.stop
            slices = _Slices(slice(first, stop, 3), slice(first + 1, stop, 3), first + 2)
            logits, rule = scores.logits[span], sequence.method.rule
            if sequence.method.temperature > 0.0:
                slices.drawn = self._add(draw_tokens(sequence, tree, logits))
                if tree.odds is not None and isinstance(rule, ChoosingRule):
                    with sequence.failing():
                        slices.chosen = self._add(choose(rule, sequence, tree, logits))
            if all_gaps is not None:
                slices.gaps = slice(all_gaps + span.start, all_gaps + span.stop)
            elif sequence.wants_margins:
                slices.gaps = self._add(_gaps(logits, scores.best[span]))
            if tree.has_guesses and isinstance(rule, (DeviceRule, TreeRule)):
                hidden, greedy = scores.hidden[span], scores.best[span]
                with sequence.failing():
                    measured = measure(rule, sequence, tree, logits, hidden, greedy)
                    slices.measured = None if measured is None else self._add(measured)
            self._slices.append(slices)
        is_cuda = self._parts[0].is_cuda
        # A copy, where it is not copied to the host: the next pass overwrites the scores.
        is_joined = len(self._parts) > 1 or not is_cuda
        self._numbers = torch.cat(self._parts) if is_joined else self._parts[0]
        self._parts.clear()
        self._event = None
        if is_cuda:
            on_host = torch.empty(self._size, dtype=torch.float64, pin_memory=True)
            on_host.copy_(self._numbers, non_blocking=True)
            self._numbers, self._event = on_host, torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def _add(self, values: Tensor) -> slice:
        """Have values [number] copied, too; where they will be."""
        first, self._size = self._size, self._size + len(values)
        self._parts.append(values.double())
        return slice(first, self._size)

    def finish(self) -> list[PassResult]:
        """Wait for the copy, but not for later work; return the result of each sequence."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._numbers.tolist()

        def ints(where: slice) -> list[int]:
            return list(map(int, numbers[where]))

        return [
            PassResult(
                answer=int(numbers[one.answer]),
                predictions=ints(one.drawn or one.greedy),
                greedy=ints(one.greedy),
                is_finite=all(map(isfinite, numbers[one.sums])),
                gaps=numbers[one.gaps] if one.gaps else [],
                measured=numbers[one.measured] if one.measured else [],
                chosen=_pair(ints(one.chosen)) if one.chosen else None,
            )
            for one in self._slices
        ]


def _gaps(logits: Tensor, best: Tensor) -> Tensor:
    """How far each node's likeliest token is above the second, [node].

    Where a grammar leaves one token that is not finite, which no trace can say.
    """
    gaps = top_gap(logits, best)
    return gaps.clamp(max=torch.finfo(gaps.dtype).max)


def _pair(numbers: list[int]) -> tuple[int, int]:
    node, bonus = numbers
    return node, bonus


def draw_tokens(sequence: Sequence, tree: DraftTree, logits: Tensor) -> Tensor:
    """The target's token after each node, [node], drawn at the method's temperature.

    The maximum of p / E over the vocabulary is an exact draw from p. The exponential noise E is a
    hash of the answer's key and of the token's position, so the draw is the same whatever was
    drafted.
    """
    odds = target_odds(logits, sequence.method.temperature)[None]
    keys = to_device([sequence.noise_key], logits.device, torch.int64)
    positions = [sequence.count + depth - tree.root for depth in tree.depths()]
    numbers = to_device([positions], logits.device, torch.int64)
    noise = exponential(keys, ANSWER, numbers, odds.shape[2])
    return (odds / noise).argmax(dim=2)[0]


def choose(rule: ChoosingRule, sequence: Sequence, tree: DraftTree, logits: Tensor) -> Tensor:
    """What a rule that chooses itself says: the last node and the bonus, [2]."""
    return ask_rule(rule, lambda: rule.choose(sequence, tree, logits))


def measure(
    rule: DeviceRule | TreeRule,
    sequence: Sequence,
    tree: DraftTree,
    logits: Tensor,
    hidden: Tensor,
    greedy: Tensor,
) -> Tensor | None:
    """What a rule that needs logits or hidden states says of each node; None: it asks nothing."""
    device = greedy.device
    parents = to_device([max(parent, 0) for parent in tree.parents], device, torch.int64)
    scored = ScoredNodes(
        drafted=to_device(tree.tokens, device, torch.int64),
        expected=greedy[parents],
        parents=parents,
        logits=logits,
        hidden=hidden,
        action_tokens=sequence.action_tokens,
        notes=sequence.notes,
    )
    if isinstance(rule, TreeRule):
        return ask_rule(rule, lambda: rule.measure(scored))
    return ask_rule(rule, lambda: _checked(rule.accepts(scored), tree.num_nodes))


def _checked(answer: Tensor, num_nodes: int) -> Tensor:
    if answer.dtype != torch.bool or answer.shape != (num_nodes,):
        raise PolicyError(
            f"accepts must answer bool [node], here [{num_nodes}], got {answer.dtype} "
            f"{list(answer.shape)}"
        )
    return answer


def note_log_probs(sequence: Sequence, tree: DraftTree, logits: torch.Tensor) -> None:
    """Keep on the device how likely the target was to write each token of the last pass."""
    assert sequence.last is not None
    path = sequence.last.path[tree.root :]
    scaled = logits[path] / (sequence.method.temperature or 1.0)
    tokens = to_device(sequence.tokens[-len(path) :], logits.device, torch.int64)
    log_probs = scaled.log_softmax(dim=1).gather(1, tokens[:, None]).squeeze(1)
    sequence.notes.setdefault("log_probs", []).append((len(sequence.tokens), log_probs))


def read_log_probs(sequence: Sequence) -> None:
    """Read what was kept so; tokens that a grammar has forced were certain."""
    log_probs = list[float]()
    for stop, part in sequence.notes.get("log_probs", []):
        log_probs += [0.0] * (stop - len(part) - len(log_probs)) + part.tolist()
    log_probs += [0.0] * (len(sequence.tokens) - len(log_probs))
    sequence.log_probs = tuple(log_probs[: sequence.spec.max_tokens])
