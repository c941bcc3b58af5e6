"""The decoding methods of one policy, each built when it is first asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deft_client.types import ActOptions, DecodeTrace
from deft_policies.decoding import autoregressive
from deft_policies.decoding.acceptance.sampled import Sampling
from deft_policies.decoding.action_space import ActionSpace
from deft_policies.decoding.autoregressive import AutoregressiveDecoder
from deft_policies.decoding.history import ActionHistory
from deft_policies.decoding.methods import (
    Decoder,
    DecodeRow,
    DraftModels,
    build_decoder,
)
from deft_policies.decoding.plan import DraftKind, TreeShape
from deft_policies.decoding.presets import DEFAULT_METHOD, Overrides, preset_by_name
from deft_policies.decoding.target import Prompts
from deft_policies.decoding.trace import StageClock
from deft_policies.errors import RequestError
from deft_policies.openvla.target import OpenVLATarget

_MAX_BUILT = 64


@dataclass(frozen=True)
class DecodingChoice:
    """A method by name and what a caller changed about it."""

    method: str = DEFAULT_METHOD
    radius: int | None = None
    drafts: tuple[DraftKind, ...] | None = None
    is_guarded: bool = True
    shape: TreeShape | None = None

    def overridden(self, options: ActOptions) -> "DecodingChoice":
        """What a request asks for, where it does.

        The default's radius, sources and tree are for its own method only.
        """
        if options.decoding in (None, self.method):
            return self if options.radius is None else replace(self, radius=options.radius)
        return DecodingChoice(options.decoding, options.radius, is_guarded=self.is_guarded)


class Decoders:
    """Decodes batches by any method. `check` may run on any thread, `decode` on the policy's."""

    def __init__(
        self, target: OpenVLATarget, sampling: Sampling, drafts: DraftModels | None = None
    ) -> None:
        self._target = target
        self._sampling = sampling
        self._drafts = drafts or DraftModels()
        self._built: dict[DecodingChoice, Decoder] = {}

    def check(self, choice: DecodingChoice) -> None:
        """Raise `RequestError` for a method that cannot be had, or not like this."""
        if choice not in self._built:
            self._build(choice)

    def has(self, choice: DecodingChoice) -> bool:
        """Whether `check` would let it pass."""
        try:
            self.check(choice)
        except RequestError:
            return False
        return True

    def warm_up(
        self, choice: DecodingChoice, prompts: Prompts, spaces: Sequence[ActionSpace]
    ) -> None:
        """Run every pass a method may need, on a batch that nobody waits for."""
        rows = [DecodeRow(ActionHistory(), space) for space in spaces]
        self._decode_plainly(prompts, rows, StageClock(self._target.device), wants_margins=False)
        if choice.method != autoregressive.METHOD:
            self._find(choice).warm_up(prompts, spaces)

    def decode(
        self,
        choice: DecodingChoice,
        prompts: Prompts,
        rows: Sequence[DecodeRow],
        clock: StageClock,
        wants_margins: bool,
    ) -> list[DecodeTrace]:
        """Decode one action per row and append it to the row's history."""
        if choice.method == autoregressive.METHOD:
            return self._decode_plainly(prompts, rows, clock, wants_margins)
        return self._find(choice).decode(prompts, rows, clock, wants_margins)

    def _decode_plainly(
        self, prompts: Prompts, rows: Sequence[DecodeRow], clock: StageClock, wants_margins: bool
    ) -> list[DecodeTrace]:
        draws = [row.history.num_draws for row in rows]
        chooser = self._sampling.chooser(draws, self._target.device)
        decoder = AutoregressiveDecoder(self._target, chooser, wants_margins)
        traces = decoder.decode(prompts, rows[0].space.length, clock)
        for row, trace in zip(rows, traces, strict=True):
            row.history.append(trace.tokens, trace.predicted, leak=0.0)
        return traces

    def _find(self, choice: DecodingChoice) -> Decoder:
        if choice not in self._built:
            if len(self._built) >= _MAX_BUILT:
                self._built.clear()  # callers may ask for any radius
            self._built[choice] = self._build(choice)
        return self._built[choice]

    def _build(self, choice: DecodingChoice) -> Decoder:
        overrides = Overrides(
            radius=choice.radius,
            drafts=choice.drafts,
            shape=choice.shape,
            is_guarded=None if choice.is_guarded else False,
            temperature=self._sampling.temperature,
            seed=self._sampling.seed,
        )
        preset = preset_by_name(choice.method, overrides)
        return build_decoder(self._target, preset, self._drafts)
