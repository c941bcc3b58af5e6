"""The way in: build a decoder for a target model and a preset, and decode batches of actions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deft_client.types import DecodeTrace
from deft_policies.decoding.acceptance.scored import ActionContext
from deft_policies.decoding.action_space import ActionSpace, SpaceTensors
from deft_policies.decoding.drafting import PlannedDrafting, Seen, Sources
from deft_policies.decoding.drafts.head import HeadDrafts, HeadOptions, RopeOffset
from deft_policies.decoding.drafts.medusa import MedusaDrafts
from deft_policies.decoding.drafts.memory import (
    Extrapolation,
    NgramLookup,
    PreviousAction,
    Recycled,
)
from deft_policies.decoding.drafts.retrieval import Retrieval
from deft_policies.decoding.drafts.small_model import SmallModelDrafts
from deft_policies.decoding.drafts.source import Grower, Guesser
from deft_policies.decoding.eagle import EagleHead, KeyMask
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.medusa import MedusaHeads
from deft_policies.decoding.presets import Preset
from deft_policies.decoding.retrieval import RetrievalIndex
from deft_policies.decoding.speculative import RunState, run_actions
from deft_policies.decoding.target import Prompts, TargetModel
from deft_policies.decoding.trace import StageClock
from deft_policies.decoding.verify import Verifier
from deft_policies.errors import RequestError


@dataclass(frozen=True)
class DecodeRow:
    """One action to decode: the session it belongs to and the space it lives in."""

    history: ActionHistory
    space: ActionSpace


@dataclass(frozen=True)
class DraftModels:
    """What drafts with weights or data of its own; None for what is not there."""

    head: EagleHead | None = None
    rope_offset: RopeOffset = RopeOffset.CORRECT
    key_mask: KeyMask = KeyMask.CAUSAL
    medusa: MedusaHeads | None = None
    index: RetrievalIndex | None = None
    small_model: TargetModel | None = None
    patch_share: float = 1.0  # of the image patches that the small model looks at


class Decoder:
    """Decodes batches of actions by one method. One thread; keeps what its guard has measured."""

    def __init__(self, target: TargetModel, preset: Preset, sources: Sources) -> None:
        self.target = target
        self.preset = preset
        self._sources = sources
        self._plans = sources.usable(preset)
        self._verifier = Verifier(preset.rule, preset.tie_break, target.vocabulary.first)

    def decode(
        self,
        prompts: Prompts,
        rows: Sequence[DecodeRow],
        clock: StageClock,
        wants_margins: bool = False,
    ) -> list[DecodeTrace]:
        """Decode one action for every prompt, in order, and append it to its row's history.

        All rows must have actions of one length. No two rows may share a history.
        """
        plan = self._plans[0]
        histories = [row.history for row in rows]
        device = prompts.embeds.device
        space = SpaceTensors.of([row.space for row in rows], device)
        steps = self._sources.steps_needed(plan)
        history = HistoryTensors.of(histories, space.length, steps, device)
        context = ActionContext(space, history.drift, history.num_steps)
        keep_hidden = self._verifier.needs_patches or self._sources.needs_hidden(plan)
        prompts = replace(prompts, keep_hidden=keep_hidden)
        state = RunState(self.target, self._verifier, context, wants_margins)
        drafting = PlannedDrafting(
            self._sources, plan, Seen(prompts, histories, history, self.target.widest_tree)
        )
        run = run_actions(state, prompts, drafting, clock)
        traces = run.read(self.preset.name, clock)
        for trace, one in zip(traces, histories, strict=True):
            one.append(trace.tokens, trace.predicted, self.preset.rule.drift_leak)
        return traces


def build_decoder(
    target: TargetModel,
    preset: Preset,
    models: DraftModels | None = None,
) -> Decoder:
    """Join a target, a method and the draft sources there are.

    Raises `RequestError` when the preset cannot do without a source that is missing.
    """
    sources = build_sources(target, preset, models or DraftModels())
    missing = preset.required - sources.kinds
    if missing:
        names = ", ".join(sorted(kind.value for kind in missing))
        raise RequestError(
            "decoding",
            f"{preset.name!r} needs draft sources that are not there: {names}; "
            "start with --draft-head DIR, or choose another method",
        )
    return Decoder(target, preset, sources)


def build_sources(target: TargetModel, preset: Preset, models: DraftModels) -> Sources:
    """Collect every draft source that can be built."""
    guessers: list[Guesser] = [
        PreviousAction(),
        Extrapolation(target.action_tokens),
        NgramLookup(),
        Recycled(),
    ]
    if models.index is not None:
        guessers.append(Retrieval(models.index))
    growers: list[Grower] = []
    if models.head is not None:
        options = HeadOptions(models.rope_offset, models.key_mask, preset.whole_vocabulary)
        growers.append(HeadDrafts(models.head, target, options))
    if models.medusa is not None:
        growers.append(MedusaDrafts(models.medusa, target))
    if models.small_model is not None:
        growers.append(SmallModelDrafts(models.small_model, models.patch_share))
    return Sources(tuple(guessers), tuple(growers))
