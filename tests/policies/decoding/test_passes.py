"""How many passes an action takes, and whether the trace tells the truth about them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deft_core.types import DecodeTrace
from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import AUTOREGRESSIVE, Method, find_method, method_names
from deft_policies.decoding.plan import Plan, TreeShape
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.sampling import first_maximum, top_gap
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.errors import RequestError, UnknownDecodingError
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.llama import first_layers
from tests.policies.decoding.captures import random_block
from tests.policies.decoding.scripts import (
    METHODS,
    Decoding,
    ScriptedDrafts,
    Session,
    clock,
    tokens_of,
)
from tests.tiny_target import (
    LENGTH,
    WIDTH,
    TinyTarget,
    fast_target,
    greedy,
    next_token,
    random_prompts,
    tiny_decoder,
)

DECODER = tiny_decoder()
TARGET = fast_target(DECODER)
PROMPTS = random_prompts(DECODER, [2, 5, 3])
ANSWERS = greedy(DECODER, PROMPTS)


def scripted(drafts: ScriptedDrafts, plan: Plan | None = None) -> Decoding:
    chosen = plan or Plan("scripted", (), (kinds.HEAD,))
    method = replace(find_method("lossless"), plans=(chosen,), is_guarded=False)
    return Decoding(TARGET, method, None, drafts)


def random_models() -> DraftModels:
    torch.manual_seed(0)
    medusa = MedusaHeads(WIDTH, 6).requires_grad_(False)
    head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    small_model = fast_target(first_layers(DECODER, 1))
    block = random_block(DECODER.sizes)
    return DraftModels(head=head, medusa=medusa, block=block, small_model=small_model)


def test_a_perfect_draft_in_the_prefill_takes_one_pass() -> None:
    decoder = Decoding(TARGET, replace(find_method("lossless"), is_guarded=False))
    session = Session.of(3)
    decoder.decode(PROMPTS, session)
    again = decoder.decode(PROMPTS, session)
    assert [trace.accepted_lengths for trace in again] == [(LENGTH - 1,)] * 3
    assert tokens_of(again) == ANSWERS


def test_a_perfect_draft_after_the_prefill_takes_two_passes() -> None:
    drafts = ScriptedDrafts(lambda row, position, _: [ANSWERS[row][position]])
    traces = scripted(drafts).decode(PROMPTS, Session.of(3))
    assert [trace.accepted_lengths for trace in traces] == [(0, LENGTH - 2)] * 3
    assert drafts.depths_asked == [LENGTH - 2] * 3


def test_a_wrong_draft_costs_no_pass_more_than_plain_decoding() -> None:
    drafts = ScriptedDrafts(lambda row, position, _: [(ANSWERS[row][position] + 1) % 72])
    traces = scripted(drafts).decode(PROMPTS, Session.of(3))
    assert [trace.num_passes for trace in traces] == [LENGTH] * 3
    # Nothing is drafted for the last token: the pass before it already gives it.
    assert drafts.depths_asked == [depth for depth in (5, 4, 3, 2, 1) for _ in range(3)]


def test_rows_of_a_batch_finish_on_their_own_and_their_traces_stop_there() -> None:
    def guess(row: int, position: int, _: tuple[int, ...]) -> list[int]:
        return [ANSWERS[row][position]] if row == 0 and position < LENGTH else [70]

    traces = scripted(ScriptedDrafts(guess)).decode(PROMPTS, Session.of(3))
    assert tokens_of(traces) == ANSWERS
    assert [trace.num_passes for trace in traces] == [2, LENGTH, LENGTH]


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_actions_of_any_length_end_with_their_last_token(length: int) -> None:
    session = Session.of(3, ActionSpace.in_bins(length))
    decoder = Decoding(TARGET, replace(find_method("lossless"), is_guarded=False))
    for num_passes in (length, 1):
        traces = decoder.decode(PROMPTS, session)
        assert tokens_of(traces) == greedy(DECODER, PROMPTS, length)
        assert max(trace.num_passes for trace in traces) <= num_passes


# The trace.


def recomputed(trace: DecodeTrace) -> tuple[tuple[int, ...], list[int], float]:
    """Executed tokens, accepted lengths and relaxed share, from the trees alone."""
    tokens: list[int] = []
    lengths: list[int] = []
    num_relaxed = 0
    for one in trace.passes:
        above, kept = 0, 0
        for node in one.path:
            assert one.parents[node] == above
            num_relaxed += one.tokens[node] != one.predictions[above]
            assert one.distances[node] == abs(one.tokens[node] - one.predictions[above])
            tokens.append(one.tokens[node])
            above, kept = node, kept + 1
        assert one.bonus == one.predictions[above]
        tokens.append(one.bonus)
        lengths.append(kept)
    return tuple(tokens), lengths, num_relaxed / LENGTH


def decode_by(method: Method, num_steps: int = 3) -> list[DecodeTrace]:
    decoder = Decoding(TARGET, method, random_models())
    session = Session.of(3)
    traces: list[DecodeTrace] = []
    for step in range(num_steps):
        prompts = random_prompts(DECODER, [2, 5, 3], seed=step // 2)
        traces += decoder.decode(prompts, session, wants_margins=True)
    return traces


@pytest.mark.parametrize(
    "name", [name for name in method_names() if name not in ("ratio-test", "numbers")]
)
def test_statistics_of_the_trace_follow_from_its_trees(name: str) -> None:
    method = replace(find_method(name), is_guarded=False)
    traces = decode_by(method)
    rule = "" if name == AUTOREGRESSIVE else str(method.rule)
    for trace in traces:
        tokens, lengths, relaxed = recomputed(trace)
        assert trace.tokens == tokens[:LENGTH]
        assert list(trace.accepted_lengths) == lengths
        assert trace.relaxed_share == pytest.approx(relaxed)
        assert sum(lengths) + trace.num_passes - LENGTH in (0, method.rule.tokens_behind)
        assert trace.passes[0].is_prefill
        assert not any(one.is_prefill for one in trace.passes[1:])
        assert (trace.method, trace.rule) == (name, rule)
        assert len(trace.margins) == LENGTH
    if method.rule.is_exact:
        assert all(trace.relaxed_share == 0 for trace in traces)


@pytest.mark.parametrize("name", ["within-bins", "fly", "lvspec", "kerv-like", "top-k", "deft"])
def test_relaxed_presets_do_relax(name: str) -> None:
    traces = decode_by(replace(find_method(name), is_guarded=False), num_steps=8)
    assert sum(trace.relaxed_share for trace in traces) > 0


def test_predictions_and_margins_are_the_targets_given_what_was_executed() -> None:
    for trace, row in zip(decode_by(find_method("within-bins"), 2)[3:], range(3), strict=True):
        prompt = random_prompts(DECODER, [2, 5, 3], seed=0)[row].embeds
        for position in range(LENGTH):
            before = list(trace.tokens[:position])
            assert trace.predicted[position] == next_token(DECODER, prompt, before)
            embeds = torch.cat((prompt, DECODER.embedding(torch.tensor(before, dtype=torch.int64))))
            logits = DECODER.head(DECODER(embeds[None])[0, -1])
            first, second = logits.topk(2).values.tolist()
            assert trace.margins[position] == pytest.approx(first - second, abs=1e-3)


def test_every_guess_names_its_source() -> None:
    drafts = (kinds.PREVIOUS, kinds.HEAD, kinds.MEDUSA)
    traces = decode_by(find_method("lossless").with_drafts(drafts))
    named = {source for trace in traces for one in trace.passes for source in one.sources[1:]}
    assert named == {"previous", "head", "medusa"}
    assert all(one.sources[0] == "" for trace in traces for one in trace.passes)


# Methods by name.


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(UnknownDecodingError, match="unknown decoding 'speculative'; known: auto"):
        find_method("speculative")


def test_a_method_without_its_draft_head_says_what_is_missing() -> None:
    with pytest.raises(RequestError, match=r"'spec-vla' needs .* not loaded: head"):
        Decoding(TARGET, find_method("spec-vla"))
    method = find_method("lossless").with_drafts((kinds.MEDUSA, kinds.SMALL_MODEL))
    with pytest.raises(RequestError, match="medusa, small-model"):
        Decoding(TARGET, method)


def test_a_negative_radius_is_refused() -> None:
    with pytest.raises(RequestError, match="0 or more bins, got -1"):
        find_method("spec-vla").with_radius(-1)


def test_presets_and_their_plans_carry_different_names() -> None:
    assert len(set(method_names())) == len(method_names())
    for method in METHODS:
        assert len({plan.name for plan in method.plans}) == len(method.plans)


def test_of_named_sources_three_that_need_no_pass_ride_behind_the_prompt() -> None:
    method = find_method("lossless:drafts=head+previous-answer+previous+ngram+extrapolation")
    traces = decode_by(method, num_steps=3)
    riding = {source for trace in traces for source in trace.passes[0].sources}
    later = {source for trace in traces for one in trace.passes[1:] for source in one.sources}
    assert riding <= {"", "previous", "ngram"}
    assert "previous" in riding
    assert "head" in later


def test_plain_decoding_says_what_recomputing_everything_says() -> None:
    """The loop of rounds with trees that are only a root, beside its slow twin."""
    plain = Decoding(TARGET, find_method(AUTOREGRESSIVE))
    traces = plain.decode(PROMPTS, Session.of(3), wants_margins=True)
    assert tokens_of(traces) == ANSWERS
    for row, trace in enumerate(traces):
        assert [one.tokens for one in trace.passes[1:]] == [(one,) for one in ANSWERS[row][:-1]]
        assert [one.bonus for one in trace.passes] == list(ANSWERS[row])
        logits = TARGET.logits_along(PROMPTS[row], LENGTH)
        gaps = [float(top_gap(one, first_maximum(one))) for one in logits]
        assert trace.margins == pytest.approx(gaps, abs=1e-4)


class Operations(TorchDispatchMode):
    """Names of the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def operations_of_a_plain_round(num_layers: int) -> list[str]:
    decoder = tiny_decoder(num_layers=num_layers)
    engine = Engine(fast_target(decoder))
    spec = AnswerSpec.action(ActionSpace.in_bins(LENGTH))
    with torch.inference_mode():
        engine.start(random_prompts(decoder, [3]), [Answer(find_method(AUTOREGRESSIVE), spec)])
        for _ in range(2):
            engine.step(clock())
        with Operations() as seen:
            engine.step(clock())
    return seen.names


def test_a_plain_round_does_no_more_than_a_pass_of_one_token_needs() -> None:
    """So the passes of a longer answer cost what they must: the round adds next to nothing."""
    two, three = operations_of_a_plain_round(2), operations_of_a_plain_round(3)
    in_a_layer = len(three) - len(two)
    assert in_a_layer <= 22
    assert len(two) - 2 * in_a_layer <= 14  # embed, rotate, norm, head, choose, commit
    # Each weight once, and none in a layout that is slow for a single token.
    assert sum(name in ("aten::mm", "aten::addmm_") for name in two) == 2 * 4 + 1
    assert not any("mkldnn" in name for name in two)


def test_trees_wider_than_the_cache_has_room_for_are_cut() -> None:
    shape = TreeShape(levels=6, top_k=6, num_guesses=200)
    method = find_method("lossless").with_drafts((kinds.HEAD, kinds.MEDUSA))
    traces = decode_by(method.with_shape(shape), num_steps=1)
    assert max(len(one.tokens) for trace in traces for one in trace.passes) <= 64
    assert tokens_of(traces) == greedy(DECODER, random_prompts(DECODER, [2, 5, 3]))


def test_the_slow_target_decodes_alike() -> None:
    method = replace(find_method("within-bins"), is_guarded=False)
    runs = []
    for target in (TARGET, TinyTarget(DECODER)):
        session = Session.of(3)
        decoder = Decoding(target, method, replace(random_models(), block=None))
        runs.append([tokens_of(decoder.decode(PROMPTS, session)) for _ in range(2)])
    assert runs[0] == runs[1]


def test_the_trace_names_the_plan_that_a_replay_can_ask_for() -> None:
    method = replace(find_method("lossless"), is_guarded=False)
    session = Session.of(3)
    decoder = Decoding(TARGET, method, random_models())
    found = [decoder.decode(PROMPTS, session)[0] for _ in range(2)]
    assert {trace.plan for trace in found} == {"memory+tree"}
    again = find_method(f"{found[0].method}:plan={found[0].plan}")
    assert [plan.name for plan in again.plans] == ["memory+tree"]
    assert not again.is_guarded
    plain = Decoding(TARGET, find_method("autoregressive"))
    assert plain.decode(PROMPTS, session)[0].plan == "plain"
