"""The policy of every model that answers token by token: requests in, actions and traces out."""

import logging
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch

from deft_core.types import (
    ActionChunk,
    ActOptions,
    FastAnswer,
    Intervention,
    LogProbs,
    Observation,
    ServerInfo,
    StageTimings,
)
from deft_policies.base import PolicyAnswer, PolicyRequest, Running
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import (
    AUTOREGRESSIVE,
    DEFAULT_METHOD,
    Method,
    apply_knobs,
    find_method,
    method_names,
)
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.sequence import AnswerSpec, Sequence
from deft_policies.decoding.target import Prompt
from deft_policies.decoding.trace import drafted_tokens
from deft_policies.decoding.warm_up import capture, warm_up
from deft_policies.errors import (
    NoActionError,
    NotFiniteError,
    PolicyError,
    RequestError,
    UnknownDecodingError,
)
from deft_policies.families.model import TokenModel
from deft_policies.families.model_policy import ModelPolicy, computing
from deft_policies.families.options import ModelOptions
from deft_policies.fast.answer import AnswerGrammar
from deft_policies.progress import doing
from deft_policies.self_test import self_test

_log = logging.getLogger(__name__)
_TESTED_TOKENS = 32  # of a text


@dataclass(eq=False)
class _RunningRequest(Running):
    """A running request, and what the policy keeps of it."""

    model: TokenModel
    key: str
    sequence: Sequence
    clocks: list[StageClock]
    num_actions: int = 0  # that were reported before the answer


class VlaPolicy(ModelPolicy):
    """Answers observations token by token, with one network and one engine."""

    model: TokenModel
    models: Items[TokenModel]

    def __init__(
        self,
        model: TokenModel,
        options: ModelOptions | None = None,
        drafts: DraftModels | None = None,
        method: Method | None = None,
    ) -> None:
        """Without a `method` the options' own is the default."""
        options, reasoning_model = options or ModelOptions(), model.reasoning_model
        super().__init__([model] if reasoning_model is None else [model, reasoning_model], options)
        self.method = method or choose_method(options)
        self.drafts = drafts or DraftModels()
        self._details["answers of exact methods"] = model.target.describe_equality()
        self._details["guard"] = "on" if options.is_guarded else "off"
        if options.draft_model:
            self._details["draft model"] = options.draft_model
        self._running: list[_RunningRequest] = []
        widest = max(own.widest for own in self.models)
        longest = max(spec.max_tokens for own in self.models for spec in own.specs.values())
        self.engine = Engine(model.target, self.drafts, widest, longest)
        self._check_method(ActOptions())

    @property
    def info(self) -> ServerInfo:
        """What the server advertises."""
        info = self._info(self.method.name, self._methods())
        guards = {f"guard, {name}": why for name, why in self.engine.planner.decisions.items()}
        longest = self.models[-1].specs[self._any_key]
        return replace(
            info,
            max_tokens=None if longest.stop is None else longest.max_tokens,
            thinks_when_asked=len(self.models) > 1,
            details={**info.details, **self.method.described(), **guards},
        )

    def _methods(self) -> tuple[str, ...]:
        return tuple(name for name in method_names() if self.has_method(name))

    def action_space(self, statistics_key: str | None) -> ActionSpace:
        """What one bin means to the robot under a statistics key; None is the default."""
        space = self.model.specs[self.find_key(statistics_key)].space
        if space is None:
            raise PolicyError(f"{self.model.family} answers with no action tokens")
        return space

    def has_method(self, name: str, radius: int | None = None) -> bool:
        """Whether a request may ask for this method, with this radius."""
        try:
            self._check_method(ActOptions(decoding=name, radius=radius))
        except RequestError:
            return False
        return True

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Refuse unknown keys and methods, bad radii, and what the model cannot look at."""
        self.find_key(options.statistics_key)
        self._check_method(options)
        self.model_for(options).check(observation)

    def model_for(self, options: ActOptions) -> TokenModel:
        """The model that answers a request: the reasoning one if requested and available."""
        return self.models[-1 if options.want_reasoning else 0]

    def _check_method(self, options: ActOptions) -> None:
        key = self.find_key(options.statistics_key or self._any_key)
        spec = _spec(self.model_for(options), key, options)
        self.engine.planner.check(Sequence(self.method_for(options), spec))

    def warm_up(self, methods: Items[str] | None = None) -> None:
        """Answer a black frame by every plan of the method served, of `methods` and of "lossless".

        Where passes are captured, that comes before, once for all methods. Then known frames are
        answered as a test.
        """
        model = self.model
        with model.runner.warming_up(), torch.inference_mode():
            doing("capturing passes")
            model.capture()
            capture(self.engine)
            if (kernels := model.network.decoder.kernels) is not None:
                _log.info("%s", kernels.describe_products())
            for way in self.models:
                spec = _spec(way, self._any_key, self._tested(way))
                prompt = self._blank_prompt(way)
                # The guards of methods that callers may ask for need what plans cost, too.
                asked_names = (self.method.name, *(methods or ()), DEFAULT_METHOD)
                names = [name for name in dict.fromkeys(asked_names) if self.has_method(name)]
                for number, name in enumerate(names):
                    doing(f"measuring the plans of {name}, {number + 1} of {len(names)} methods")
                    warm_up(self.engine, prompt, self.method_for(ActOptions(decoding=name)), spec)
        doing("answering known frames as a test")
        for tested in self.models:
            limits = self._tested_limits()
            self_test(self, limits, AUTOREGRESSIVE, tested.complete, self._tested(tested))

    def _tested(self, model: TokenModel) -> ActOptions:
        """Options of warm-up requests; a text is cut short."""
        spec = model.specs[self._any_key]
        if spec.stop is None:
            return ActOptions()
        return ActOptions(want_reasoning=True, max_tokens=min(_TESTED_TOKENS, spec.max_tokens))

    def _blank_prompt(self, model: TokenModel) -> Prompt:
        """What a black frame starts from."""
        size = model.network.config.frame_size
        black = Observation(np.zeros((size, size, 3), dtype=np.uint8), "pick up the cup")
        return model.see([model.complete(black)], StageClock(torch.device("cpu")))[0]

    def start(self, batch: Items[PolicyRequest]) -> Items[Running]:
        """Encode the observations now; the next steps decode their answers."""
        with computing(len(batch)):
            clock = StageClock(self.model.device)
            started = [self._request(request, clock) for request in batch]
            try:
                for model in self.models:
                    its_requests = [running for running in started if running.model is model]
                    if its_requests:
                        prompts = model.see(
                            [running.request.observation for running in its_requests], clock
                        )
                        self.engine.start(prompts, [running.sequence for running in its_requests])
            except BaseException:
                for running in started:
                    self.engine.cancel(running.sequence)
                raise
        self._running += started
        return started

    def step(self, first: Collection[Running] = ()) -> Items[Running]:
        """Run one round of all running requests; return the finished."""
        with computing(len(self._running)):
            clock = StageClock(self.model.device)
            for running in self._running:
                running.clocks.append(clock)
            try:
                ended = self._run_round(clock, first)
            except BaseException:
                for running in [*self._running]:
                    self.cancel(running)
                raise
        self._running = [running for running in self._running if not running.has_ended]
        for running in self._running:
            self._report_actions(running)
        return ended

    def cancel(self, running: Running) -> None:
        """Remove a request between two steps; one that has ended is left alone."""
        if isinstance(running, _RunningRequest) and running in self._running:
            self._running.remove(running)
            self.engine.cancel(running.sequence)

    def _request(self, request: PolicyRequest, clock: StageClock) -> _RunningRequest:
        """A request, and the engine's sequence that answers it."""
        options, model = request.options, self.model_for(request.options)
        key = self.find_key(options.statistics_key)
        spec = _spec(model, key, options)
        sequence = Sequence(self.method_for(options), spec, request.memory, options.want_trace)
        sequence.wants_log_probs = options.want_log_probs
        sequence.executed_steps = options.executed_steps
        return _RunningRequest(request, model=model, key=key, sequence=sequence, clocks=[clock])

    def _report_actions(self, running: _RunningRequest) -> None:
        """Report actions that are final before the answer is, where the request asks for them."""
        on_actions, sequence = running.request.on_actions, running.sequence
        if on_actions is None or not sequence.is_finite:
            return
        actions = running.model.decode_begun(running.key, sequence.spec.name(sequence.tokens))
        if len(actions) > running.num_actions:
            running.num_actions = len(actions)
            on_actions(actions)

    def _run_round(self, clock: StageClock, first: Collection[Running]) -> list[_RunningRequest]:
        """Run one round of the engine, and answer the requests that it has finished."""
        only = {running.sequence for running in self._running if running in first}
        finished = set(self.engine.step(clock, only))
        ended = [running for running in self._running if running.sequence in finished]
        clock.restart()
        for running in ended:
            self._answer(running)
        clock.record(Stage.FINISH)
        by_start = {id(running.clocks[0]): running.clocks for running in ended}
        timings = {start: _sum_timings(clocks) for start, clocks in by_start.items()}
        for running in ended:
            if running.answer is not None:
                chunk = replace(running.answer.chunk, timings=timings[id(running.clocks[0])])
                running.answer = replace(running.answer, chunk=chunk)
        return ended

    def _answer(self, running: _RunningRequest) -> None:
        """Give a request whose sequence has ended its answer, or say why there is none."""
        sequence, model, options = running.sequence, running.model, running.request.options
        if sequence.error is not None:
            running.error = sequence.error
            return
        if not sequence.is_finite:
            running.error = NotFiniteError(
                "the model's logits hold NaN or infinity; its weights or its number format are "
                "broken, nothing was answered"
            )
            return
        trace, error = sequence.trace, None
        tokens = trace.tokens if trace else ()
        try:
            actions = model.decode(running.key, tokens)
            actions = model.for_robot(actions, running.request.observation)
            if trace is not None and options.want_trace:
                trace = replace(trace, fast=_fast_answer(model, sequence))
            chunk = ActionChunk(actions, trace=trace)
        except NoActionError as none:
            nothing = np.empty((0, model.statistics[running.key].action_dim))
            chunk, error = ActionChunk(nothing, trace=trace), none
        if options.want_reasoning or options.want_trace or error is not None:
            text, parts = model.read_text(tokens) or (None, ())
            if error is not None and text is not None:
                error.reasoning = text
            if trace is not None and parts:
                trace = replace(trace, parts=parts)
            reasoning = text if options.want_reasoning else None
            chunk = replace(chunk, trace=trace, reasoning=reasoning)
        chunk = _mark_grammar(chunk, sequence)
        if sequence.wants_log_probs:
            chunk = replace(chunk, log_probs=_log_probs(sequence))
        running.answer = PolicyAnswer(chunk, sequence.memory, error)

    def method_for(self, options: ActOptions) -> Method:
        """The method that a request asks for, or the default; may raise `RequestError`.

        May run on any thread.
        """
        default = self.method  # what flags changed about it is for it alone
        name, radius = options.decoding or default.name, options.radius
        base, _, knobs = name.partition(":")
        if base == default.name.partition(":")[0]:
            method = apply_knobs(default, knobs) if name != default.name else default
        elif base not in method_names():
            raise UnknownDecodingError(base, self._methods())
        else:
            method = find_method(name)
        if radius is not None:
            method = method.with_radius(radius)
        flags = self.options
        method = method.with_sampling(flags.temperature, flags.seed)
        return method if flags.is_guarded else replace(method, is_guarded=False)


def choose_method(options: ModelOptions) -> Method:
    """The method that options name, with what they change about it."""
    method = find_method(options.decoding)
    if options.radius is not None:
        method = method.with_radius(options.radius)
    if options.drafts is not None:
        method = method.with_drafts(options.drafts)
    if options.draft_tree is not None:
        method = method.with_shape(options.draft_tree)
    return method


def _mark_grammar(chunk: ActionChunk, sequence: Sequence) -> ActionChunk:
    """Mark an answer that a grammar has changed; its trace has the model's own tokens."""
    if not isinstance(sequence.grammar, AnswerGrammar):
        return chunk
    free = sequence.grammar.free_tokens(sequence)
    if free == sequence.tokens:
        return chunk
    trace = chunk.trace
    if trace is not None:
        trace = replace(trace, predicted=sequence.spec.name(free))
    return replace(chunk, trace=trace, intervention=Intervention.GRAMMAR)


def _fast_answer(model: TokenModel, sequence: Sequence) -> FastAnswer | None:
    """The coefficients of a valid answer, where it is written in FAST codes."""
    tokens = sequence.spec.name(sequence.tokens)
    begun = model.coefficients(tokens)
    if not begun:
        return None
    drafted = drafted_tokens(sequence.records, len(tokens))
    pairs = [
        (one, is_drafted) for some, is_drafted in zip(begun, drafted, strict=True) for one in some
    ]
    values, marks = zip(*pairs, strict=True)
    return FastAnswer(values, marks)


def _log_probs(sequence: Sequence) -> LogProbs:
    """How likely the model was to write the tokens of an answer."""
    return LogProbs(sequence.log_probs, sequence.method.temperature or 1.0, "vocabulary")


def _spec(model: TokenModel, key: str, options: ActOptions) -> AnswerSpec:
    """What the decoder is asked for; raises `RequestError` for what is too long."""
    spec, max_tokens = model.specs[key], options.max_tokens
    if max_tokens is None or not model.cuts_answers:
        return spec
    if spec.stop is None:
        raise RequestError(
            "max_tokens",
            f"all answers without reasoning have {spec.max_tokens} tokens here; leave it out",
        )
    if not 1 <= max_tokens <= spec.max_tokens:
        raise RequestError(
            "max_tokens", f"must be 1 to {spec.max_tokens} (--max-tokens), got {max_tokens}"
        )
    return replace(spec, max_tokens=max_tokens)


def _sum_timings(clocks: Items[StageClock]) -> StageTimings:
    all_timings = [vars(clock.timings()) for clock in clocks]
    return StageTimings(
        **{name: sum(timings[name] for timings in all_timings) for name in all_timings[0]}
    )
