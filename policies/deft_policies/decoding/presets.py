"""The decoding methods by name: which rule judges, which sources draft, how ties are broken."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deft_policies.decoding.acceptance.confidence import (
    DeferredWindow,
    EntropyRadius,
    NearTop,
    TopK,
)
from deft_policies.decoding.acceptance.distance import (
    ScheduledRadius,
    WithinBins,
    WithinBudget,
    WithinDrift,
    WithinIds,
    WithinLimits,
)
from deft_policies.decoding.acceptance.rule import AcceptanceRule, ExactMatch
from deft_policies.decoding.acceptance.sampled import Sampling
from deft_policies.decoding.acceptance.verify import TieBreak
from deft_policies.decoding.acceptance.visual import VisualRelevance
from deft_policies.decoding.plan import PLAIN, DraftKind, Plan, TreeShape
from deft_policies.errors import RequestError, UnknownDecodingError


@dataclass(frozen=True)
class Preset:
    """One decoding method. The first plan whose sources are there is used, or the guard chooses.

    `required` sources must be there; plans that use others which are not there are left out.
    `whole_vocabulary` makes the head draft over every token instead of action tokens alone.
    """

    name: str
    summary: str
    rule: AcceptanceRule
    plans: tuple[Plan, ...]
    tie_break: TieBreak = TieBreak.CLOSEST
    required: frozenset[DraftKind] = frozenset()
    whole_vocabulary: bool = False
    is_guarded: bool = False
    sampling: Sampling = Sampling()
    draws_drafts: bool = False  # draw the head's chain by its odds, for the ratio test


_MEMORY = (DraftKind.PREVIOUS, DraftKind.EXTRAPOLATION, DraftKind.RETRIEVAL)
_HEAD = frozenset({DraftKind.HEAD})
_SPEC_VLA_TREE = TreeShape(levels=5, top_k=8, num_guesses=49, is_fixed=True)

_OUR_PLANS = (
    Plan("memory+tree", (DraftKind.PREVIOUS,), (DraftKind.HEAD,)),
    Plan("memory+branches", (DraftKind.PREVIOUS,), (DraftKind.HEAD,), TreeShape(3, 2, 8)),
    Plan("memory+chain", (DraftKind.PREVIOUS,), (DraftKind.HEAD,), TreeShape.chain(5)),
    Plan("memory", (DraftKind.PREVIOUS,), (DraftKind.PREVIOUS,)),
    Plan("memory+recycled", (DraftKind.PREVIOUS,), (DraftKind.PREVIOUS, DraftKind.RECYCLED)),
    Plan("memory-wide", _MEMORY, (DraftKind.PREVIOUS, DraftKind.RECYCLED)),
    Plan("head-chain", (), (DraftKind.HEAD,), TreeShape.chain(5)),
)
_CHAIN_PLANS = (
    Plan("memory+chain", (DraftKind.PREVIOUS,), (DraftKind.HEAD,), TreeShape.chain(6)),
    Plan("memory", (DraftKind.PREVIOUS,), (DraftKind.PREVIOUS,)),
)

PRESETS: tuple[Preset, ...] = (
    Preset("autoregressive", "one token per pass: the baseline", ExactMatch(), (PLAIN,)),
    Preset(
        "lossless",
        "the same actions as autoregressive, in fewer passes (default)",
        ExactMatch(),
        _OUR_PLANS,
        is_guarded=True,
    ),
    Preset(
        "deft",
        "drafts within physical limits, gripper by class, inside a drift budget",
        WithinDrift(WithinLimits(move=3.0, turn=0.5, cap=15), move=9.0, turn=1.5, cap=30, leak=1.0),
        _OUR_PLANS,
        is_guarded=True,
    ),
    Preset(
        "spec-vla",
        "Spec-VLA, relaxed: within 9 ids, full tree, first row wins ties",
        WithinIds(9),
        (Plan("spec-vla", (), (DraftKind.HEAD,), _SPEC_VLA_TREE),),
        tie_break=TieBreak.FIRST_ROW,
        required=_HEAD,
        whole_vocabulary=True,
    ),
    Preset(
        "spec-vla-strict",
        "Spec-VLA, strict: the same loop with exact match",
        WithinIds(0),
        (Plan("spec-vla", (), (DraftKind.HEAD,), _SPEC_VLA_TREE),),
        tie_break=TieBreak.FIRST_ROW,
        required=_HEAD,
        whole_vocabulary=True,
    ),
    Preset(
        "fly",
        "FLy: misses stand where the target is unsure and its next tokens agree",
        DeferredWindow(theta=0.3, window=6),
        _CHAIN_PLANS,
    ),
    Preset(
        "lvspec",
        "LVSpec: strict where the token depends on the image, loose elsewhere",
        VisualRelevance(num_patches=10, share=0.7, shift_tolerant=True),
        _CHAIN_PLANS,
    ),
    Preset(
        "heisd-like",
        "HeiSD's budgets per group of dimensions, every token verified",
        WithinBudget(each=15, total=30),
        (
            Plan("retrieval+tree", (DraftKind.RETRIEVAL,), (DraftKind.HEAD,)),
            Plan("retrieval", (DraftKind.RETRIEVAL,), (DraftKind.RETRIEVAL,)),
            Plan("memory+tree", (DraftKind.PREVIOUS,), (DraftKind.HEAD,)),
            Plan("memory", (DraftKind.PREVIOUS,), (DraftKind.PREVIOUS,)),
        ),
    ),
    Preset(
        "kerv-like",
        "KERV's radius that shrinks over the episode, hold-last tails beside the head's tree",
        ScheduledRadius(high=15, low=5, tau=100.0, beta=1.0),
        (
            Plan("tree+hold", (), (DraftKind.HEAD, DraftKind.PREVIOUS)),
            Plan("hold", (), (DraftKind.PREVIOUS,)),
        ),
    ),
    Preset(
        "ratio-test",
        "sampling with the head's drawn chains, exact by Leviathan's ratio test",
        ExactMatch(),
        (Plan("drawn-chain", (), (DraftKind.HEAD,), TreeShape.chain(5)),),
        required=_HEAD,
        sampling=Sampling(temperature=1.0),
        draws_drafts=True,
    ),
    Preset("within-bins", "drafts at most a radius of bins away", WithinBins(9), _OUR_PLANS),
    Preset("top-k", "SpecDec: drafts among the target's k likeliest", TopK(5), _OUR_PLANS),
    Preset(
        "near-top",
        "TensorRT-LLM's relaxed acceptance: nearly as likely as the target's own",
        NearTop(n=10, delta=0.6),
        _OUR_PLANS,
    ),
    Preset(
        "entropy-radius",
        "a radius that grows with the target's own uncertainty",
        EntropyRadius(low=1, high=15, full=0.5),
        _OUR_PLANS,
    ),
)

METHOD_NAMES: tuple[str, ...] = tuple(preset.name for preset in PRESETS)
DEFAULT_METHOD = "lossless"


@dataclass(frozen=True)
class Overrides:
    """What a caller may change about a preset; None leaves it as published.

    `drafts` replaces the plans: sources that need no pass of their own ride in the prefill, the
    others draft between passes, in a tree of `shape`.
    """

    radius: int | None = None
    drafts: tuple[DraftKind, ...] | None = None
    shape: TreeShape | None = None
    is_guarded: bool | None = None
    temperature: float | None = None
    seed: int | None = None


def preset_by_name(name: str, overrides: Overrides | None = None) -> Preset:
    """Look a method up and apply a caller's overrides; `RequestError` if they do not fit."""
    found = next((preset for preset in PRESETS if preset.name == name), None)
    if found is None:
        raise UnknownDecodingError(name, METHOD_NAMES)
    return found if overrides is None else _overridden(found, overrides)


def _overridden(preset: Preset, changes: Overrides) -> Preset:
    if changes.radius is not None:
        if changes.radius < 0:
            raise RequestError("radius", f"radius must be 0 or more bins, got {changes.radius}")
        preset = replace(preset, rule=preset.rule.with_radius(changes.radius))
    if changes.drafts is not None:  # who names the sources gets them, however slow they are
        plans: tuple[Plan, ...] = (plan_of(changes.drafts),)
        preset = replace(preset, plans=plans, required=frozenset(changes.drafts), is_guarded=False)
    if changes.shape is not None:
        preset = replace(preset, plans=_reshaped(preset.plans, changes.shape))
    if changes.is_guarded is not None:
        preset = replace(preset, is_guarded=changes.is_guarded)
    if changes.temperature is not None and changes.temperature > 0:
        if not preset.rule.is_exact:
            raise RequestError(
                "temperature",
                f"{preset.name!r} relaxes greedy decoding and cannot sample; use 'lossless' or "
                "'autoregressive', which keep the target's distribution",
            )
        sampling = replace(preset.sampling, temperature=changes.temperature)
        preset = replace(preset, sampling=sampling)
    if changes.seed is None:
        return preset
    return replace(preset, sampling=replace(preset.sampling, seed=changes.seed))


def _reshaped(plans: Sequence[Plan], shape: TreeShape) -> tuple[Plan, ...]:
    """The plans with other trees; of those that became alike, the first."""
    found: dict[tuple[tuple[DraftKind, ...], tuple[DraftKind, ...]], Plan] = {}
    for plan in plans:
        found.setdefault((plan.prefill, plan.rounds), replace(plan, shape=shape))
    return tuple(found.values())


RIDES_IN_PREFILL = (
    DraftKind.PREVIOUS,
    DraftKind.EXTRAPOLATION,
    DraftKind.NGRAM,
    DraftKind.RETRIEVAL,
)
MAX_PREFILL_KINDS = 3


def plan_of(drafts: Sequence[DraftKind]) -> Plan:
    """Put each source where it can draft; growers win the rounds, else guessers draft tails too."""
    riders = tuple(kind for kind in drafts if kind in RIDES_IN_PREFILL)[:MAX_PREFILL_KINDS]
    return Plan("+".join(kind.value for kind in drafts) or "plain", riders, tuple(drafts))
