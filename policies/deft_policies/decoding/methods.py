"""Decoding methods: which rule judges, which sources draft, how ties are broken; those by name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from deft_policies.decoding.acceptance.confidence import (
    DeferredWindow,
    EntropyRadius,
    NearTop,
    TopK,
    VisualRelevance,
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
from deft_policies.decoding.plan import (
    PLAIN,
    DraftKind,
    Loop,
    Plan,
    TieBreak,
    TreeShape,
    TreeTemplate,
)
from deft_policies.decoding.sampling import Sampling
from deft_policies.errors import RequestError

AUTOREGRESSIVE = "autoregressive"


@dataclass(frozen=True)
class Method:
    """One way of decoding, as a value: what a caller changes about it makes another one.

    The first plan whose sources are there is used, or the guard chooses. `required` sources must be
    there; plans that use others which are not there are left out. `whole_vocabulary` makes the head
    draft over every token instead of action tokens alone.
    """

    name: str
    summary: str
    rule: AcceptanceRule
    plans: tuple[Plan, ...]
    tie_break: TieBreak = TieBreak.CLOSEST
    required: frozenset[str] = frozenset()
    whole_vocabulary: bool = False
    is_guarded: bool = False
    sampling: Sampling = Sampling()
    draws_drafts: bool = False  # draw drafts by their odds, for the ratio test
    multi_level: bool = False  # n-grams of the session speed up the small model, as in FLy
    patch_share: float = 1.0  # of the image patches that the small model looks at
    loop: Loop = Loop.LEAN

    def described(self) -> dict[str, str]:
        """Its rule with every number, and its plans, for people."""
        if self.plans == (PLAIN,):
            return {}
        small = f"multi_level={self.multi_level}, patch_share={self.patch_share:g}"
        told = {"rule": str(self.rule), "plans": ", ".join(plan.name for plan in self.plans)}
        return {**told, "small model": small} if self.uses(DraftKind.SMALL_MODEL) else told

    def drafting(self, kind: str) -> tuple[object, ...]:
        """What a source is made by: methods that have it in common can share the source."""
        drawn = self.sampling if self.draws_drafts else None
        small_model = (self.multi_level, self.patch_share) if kind == DraftKind.SMALL_MODEL else ()
        return kind, self.whole_vocabulary, drawn, *small_model

    def uses(self, kind: str) -> bool:
        """Whether any of its plans drafts from this source."""
        return any(kind in plan.kinds for plan in self.plans)

    def with_radius(self, radius: int) -> "Method":
        """With another radius in bins; `RequestError` where the rule has none."""
        if radius < 0:
            raise RequestError("radius", f"radius must be 0 or more bins, got {radius}")
        return replace(self, rule=self.rule.with_radius(radius))

    def with_drafts(self, drafts: tuple[str, ...]) -> "Method":
        """Drafting from these sources alone, however slow they are.

        Sources that need no pass of their own ride in the prefill, the others draft between passes.
        """
        if self.plans == (PLAIN,):
            raise RequestError("drafts", f"{self.name!r} drafts nothing; choose another method")
        plan = Plan("+".join(drafts), drafts, drafts)
        return replace(self, plans=(plan,), required=frozenset(drafts), is_guarded=False)

    def with_shape(self, shape: TreeShape) -> "Method":
        """With other trees; of the plans that become alike, the first."""
        found: dict[tuple[tuple[str, ...], ...], Plan] = {}
        for plan in self.plans:
            found.setdefault((plan.prefill, plan.rounds), replace(plan, shape=shape))
        return replace(self, plans=tuple(found.values()))

    def with_sampling(self, sampling: Sampling) -> "Method":
        """Drawing tokens; at temperature 0 by the method's own temperature, and with this seed."""
        if sampling.temperature == 0.0:
            sampling = replace(self.sampling, seed=sampling.seed)
        elif not self.rule.is_exact:
            raise RequestError(
                "temperature",
                f"{self.name!r} relaxes greedy decoding and cannot sample; use 'lossless' or "
                "'autoregressive', which keep the target's distribution",
            )
        return replace(self, sampling=sampling)


_MEMORY = (DraftKind.PREVIOUS, DraftKind.EXTRAPOLATION, DraftKind.RETRIEVAL)
_HEAD = frozenset({DraftKind.HEAD})
_SPEC_VLA_TREE = TreeShape(levels=5, top_k=8, num_guesses=49, is_full_depth=True)
_SPEC_VLA = Method(
    "spec-vla",
    "Spec-VLA, relaxed: within 9 ids, full tree, first row wins ties",
    WithinIds(9),
    (Plan("spec-vla", (), (DraftKind.HEAD,), _SPEC_VLA_TREE),),
    tie_break=TieBreak.FIRST_ROW,
    required=_HEAD,
    whole_vocabulary=True,
)

OUR_PLANS = (
    Plan("memory+tree", (DraftKind.PREVIOUS,), (DraftKind.HEAD,)),
    Plan("memory+branches", (DraftKind.PREVIOUS,), (DraftKind.HEAD,), TreeShape(3, 2, 8)),
    Plan("memory+chain", (DraftKind.PREVIOUS,), (DraftKind.HEAD,), TreeShape.chain(5)),
    Plan("memory", (DraftKind.PREVIOUS,), (DraftKind.PREVIOUS,)),
    Plan("memory+recycled", (DraftKind.PREVIOUS,), (DraftKind.PREVIOUS, DraftKind.RECYCLED)),
    Plan("memory-wide", _MEMORY, (DraftKind.PREVIOUS, DraftKind.RECYCLED)),
    Plan("head-chain", (), (DraftKind.HEAD,), TreeShape.chain(5)),
)
_SMALL_MODEL = frozenset({DraftKind.SMALL_MODEL})
_EAGLE_TREE = TreeShape.of_template(TreeTemplate.eagle())
_CHAIN_PLANS = (
    Plan("small-model", (), (DraftKind.SMALL_MODEL,), TreeShape.chain(6)),
    Plan("memory+chain", (DraftKind.PREVIOUS,), (DraftKind.HEAD,), TreeShape.chain(6)),
    Plan("memory", (DraftKind.PREVIOUS,), (DraftKind.PREVIOUS,)),
)

METHODS: tuple[Method, ...] = (
    Method(AUTOREGRESSIVE, "one token per pass: the baseline", ExactMatch(), (PLAIN,)),
    Method(
        "lossless",
        "the same actions as autoregressive, in fewer passes (default)",
        ExactMatch(),
        OUR_PLANS,
        is_guarded=True,
    ),
    Method(
        "deft",
        "drafts within physical limits, gripper by class, inside a drift budget",
        WithinDrift(WithinLimits(move=3.5, turn=0.5, cap=15), move=9.0, turn=1.5, cap=30, leak=1.0),
        OUR_PLANS,
        is_guarded=True,
    ),
    _SPEC_VLA,
    replace(
        _SPEC_VLA,
        name="spec-vla-strict",
        summary="Spec-VLA, strict: the same loop with exact match",
        rule=WithinIds(0),
    ),
    replace(
        _SPEC_VLA,
        name="spec-vla-long",
        summary="Spec-VLA, relaxed as published for LIBERO-Long: within 5 ids",
        rule=WithinIds(5),
    ),
    replace(
        _SPEC_VLA,
        name="spec-vla-published",
        summary="Spec-VLA's own loop: drafts of the last token count, one more pass commits it",
        loop=Loop.PUBLISHED,
    ),
    Method(
        "fly",
        "FLy: misses stand where the target is unsure and its next tokens agree",
        DeferredWindow(theta=0.3, window=6),
        _CHAIN_PLANS,
        multi_level=True,
    ),
    Method(
        "lvspec",
        "LVSpec: strict where the token depends on the image, loose elsewhere",
        VisualRelevance(num_patches=10, share=0.7, shift_tolerant=True, shift_cap=9),
        _CHAIN_PLANS,
        patch_share=0.1,
    ),
    Method(
        "small-model",
        "standard speculative decoding: a chain of another checkpoint's own tokens",
        ExactMatch(),
        (Plan("chain", (), (DraftKind.SMALL_MODEL,), TreeShape.chain(5)),),
        required=_SMALL_MODEL,
    ),
    Method(
        "specvlm",
        "SpecVLM: a tree from a model that looks at a tenth of the image patches",
        ExactMatch(),
        (Plan("pruned-tree", (), (DraftKind.SMALL_MODEL,), _EAGLE_TREE),),
        required=_SMALL_MODEL,
        patch_share=0.1,
    ),
    Method(
        "pld",
        "prompt-lookup decoding: n-grams of the session's own actions, nothing else",
        ExactMatch(),
        (Plan("ngram", (DraftKind.NGRAM,), (DraftKind.NGRAM,)),),
    ),
    Method(
        "token-recycling",
        "token recycling: a tree of what the target last said after the same tokens",
        ExactMatch(),
        (Plan("recycled-tree", (), (DraftKind.TOKEN_RECYCLING,), _EAGLE_TREE),),
    ),
    Method(
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
    Method(
        "kerv-like",
        "KERV's radius that shrinks over the episode, hold-last tails beside the head's tree",
        ScheduledRadius(high=15, low=5, tau=100.0, beta=1.0),
        (
            Plan("tree+hold", (), (DraftKind.HEAD, DraftKind.PREVIOUS)),
            Plan("hold", (), (DraftKind.PREVIOUS,)),
        ),
    ),
    Method(
        "ratio-test",
        "sampling with drawn drafts, exact by Leviathan's ratio test",
        ExactMatch(),
        (Plan("drawn-chain", (), (DraftKind.HEAD,), TreeShape.chain(5)),),
        required=_HEAD,
        sampling=Sampling(temperature=1.0),
        draws_drafts=True,
    ),
    Method("within-bins", "drafts at most a radius of bins away", WithinBins(9), OUR_PLANS),
    Method("top-k", "SpecDec: drafts among the target's k likeliest", TopK(5), OUR_PLANS),
    Method(
        "near-top",
        "TensorRT-LLM's relaxed acceptance: nearly as likely as the target's own",
        NearTop(n=10, delta=0.6),
        OUR_PLANS,
    ),
    Method(
        "entropy-radius",
        "a radius that grows with the target's own uncertainty",
        EntropyRadius(low=1, high=15, full=0.5),
        OUR_PLANS,
    ),
)

DEFAULT_METHOD = "lossless"
ACCEPTANCE_RULES = "deft.acceptance_rules"  # the entry points under which packages bring rules


@lru_cache(maxsize=1)
def known_methods() -> Mapping[str, "Method | EntryPoint"]:
    """Ours by name, and the rules of installed packages, which are loaded when asked for."""
    theirs = {one.name: one for one in entry_points(group=ACCEPTANCE_RULES)}
    return {**theirs, **{method.name: method for method in METHODS}}


def rule_method(found: EntryPoint) -> Method:
    """A method around a rule that an installed package brings, with our drafts."""
    rule = found.load()()
    if not isinstance(rule, AcceptanceRule):
        raise RequestError(
            "decoding", f"{found.value} makes a {type(rule).__name__}, no acceptance rule"
        )
    said = (type(rule).__doc__ or found.value).strip().splitlines()[0]
    return Method(found.name, said, rule, OUR_PLANS)
