"""Warming up: capture passes, and measure what plans and widths cost on this machine."""

import logging
import time
from collections.abc import Sequence as Items
from statistics import fmean

from deft_policies.decoding import kinds
from deft_policies.decoding.captured import shapes_of
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.drafts import ModelSource, captured_block, captured_head
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.guard import AMONG, Price, best_width
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import PLAIN, Plan
from deft_policies.decoding.sequence import AnswerSpec, Sequence
from deft_policies.decoding.target import PassRow, Prompt
from deft_policies.decoding.tree import DraftTree
from deft_policies.memory import STEPS_KEPT, SessionMemory

_log = logging.getLogger(__name__)
_WIDTHS = (1, 8, 16, 32, 64, 128)  # of passes over text that are timed
_RUNS = {1: 4, AMONG: 2}  # that are timed, by answers at a time
# Tokens between two edits of an old answer: a pass with the widest drafts of the golden sessions
# writes 8 of a text, and one of a taught policy that writes numbers 5 or 6.
_EDITS_APART, _NUMBERS_APART = 7, 4


def capture(engine: Engine) -> None:
    """Capture every pass and prefill that any method may need. Does nothing without a GPU.

    Heads that read prompts have their hidden states kept by every prefill.
    """
    passes, planner = engine.captured, engine.planner
    if passes is None:
        return
    trained = [kind for kind in (kinds.HEAD, kinds.BLOCK) if planner.has_source(kind)]
    passes.keeps_hidden = bool(trained)
    started, sizes = time.perf_counter(), engine.target.decoder.sizes
    itemsize = engine.target.decoder.embedding.weight.element_size()
    num_graphs = len(shapes_of(passes.reserve, passes.widest, passes.keeps_hidden))
    planned = passes.layout.bytes_of(sizes, itemsize, num_graphs)
    if kinds.HEAD in trained:
        planned |= captured_head.bytes_of(passes.layout, sizes, itemsize)
    if (block := planner.models.block) is not None:
        planned |= captured_block.bytes_of(passes.layout, block.sizes, itemsize)
    listed = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in planned.items())
    _log.info(
        "capturing %d passes and prefills; memory besides the weights: %s", num_graphs, listed
    )
    passes.capture()
    for kind in trained:
        head = planner.source(kind)
        if isinstance(head, ModelSource):
            head.capture(passes.layout)
    _log.info("captured in %.0f s", time.perf_counter() - started)


def warm_up(engine: Engine, prompt: Prompt, method: Method, spec: AnswerSpec) -> None:
    """Measure what passes cost here: every plan of a method, or every width over text."""
    planner = engine.planner
    if not spec.is_action:
        if not planner.has_timed_widths:  # they are the same for every method
            _measure_widths(engine, prompt, spec)
        return
    plans = planner.plans_for(method, spec)
    if planner.guard(method, plans, spec) is None:
        _time_passes(engine, prompt, method, spec, plans[0])
        return
    has_room = engine.captured is None or engine.captured.num_slots >= AMONG
    for num_rows, num_runs in _RUNS.items():
        if num_rows > 1 and not has_room:
            continue
        timed = (*plans, PLAIN)
        # In turn, so that other work slows all of them down by as much.
        runs = [
            [_time_passes(engine, prompt, method, spec, plan, num_rows) for plan in timed]
            for _ in range(num_runs)
        ]
        prices = planner.prices.setdefault(num_rows, {})
        for plan, answers in zip(timed, zip(*runs, strict=True), strict=True):
            price = _price_of(answers)
            known = prices.get(plan, price)
            least = min(known.prefill_ms, price.prefill_ms), min(known.pass_ms, price.pass_ms)
            prices[plan] = Price(*least)
        if (guard := planner.guard(method, plans, spec, num_rows)) is not None:
            guard.set_prices(planner.prices_of(plans, num_rows))


def _price_of(answers: Items[list[float]]) -> Price:
    """What a plan costs, from the passes of the same answer in several runs.

    Of each pass the best time counts, of the later passes their mean: where a plan drafts less and
    less, its last pass is as cheap as plain decoding's and says nothing of the others.
    """
    prefill, *later = [min(times) for times in zip(*answers, strict=False)]
    return Price(prefill, fmean(later) if later else prefill)


def _time_passes(
    engine: Engine, prompt: Prompt, method: Method, spec: AnswerSpec, plan: Plan, num_rows: int = 1
) -> list[float]:
    """Milliseconds of each pass of so many answers, in sessions with a constant history."""
    history = ((0,) * spec.action_length,) * STEPS_KEPT
    sequences = [Sequence(method, spec, SessionMemory(own=history)) for _ in range(num_rows)]
    engine.start([prompt] * num_rows, sequences, plan)
    clock = StageClock(engine.target.device)
    while engine.unfinished:
        engine.step(clock)
    return [record.ms(*Stage) for record in sequences[0].records]


def _measure_widths(engine: Engine, prompt: Prompt, spec: AnswerSpec) -> None:
    """Time passes of every width, and choose how much of an old text a pass carries here."""
    planner = engine.planner
    widths = [one for one in _WIDTHS if one <= planner.widest]
    took = dict.fromkeys(widths, float("inf"))
    root = prompt.last_token
    for _ in range(_RUNS[1]):
        for width in widths:
            clock = StageClock(engine.target.device)
            tree = DraftTree.of_committed([root] * width)
            row = PassRow(0, prompt.length, tree, 0, is_action=False)
            clock.restart()
            scores = engine.target.forward(engine.cache, [row])
            float(scores.logits.sum())
            clock.record(Stage.VERIFY)
            took[width] = min(took[width], clock.timings().verify_ms)
    apart = _NUMBERS_APART if spec.numbers_in_row else _EDITS_APART
    planner.text_width, planner.has_timed_widths = best_width(took, apart), True
    by_width = ", ".join(f"{width}: {ms:.2f}" for width, ms in took.items())
    _log.info("a pass carries %d tokens of a text; ms by width: %s", planner.text_width, by_width)
