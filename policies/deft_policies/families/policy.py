"""Any family's model behind the `Policy` interface: observations in, actions and traces out."""

import logging
import platform
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from deft_core.image_chain import ImageChain
from deft_core.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    Intervention,
    LogProbs,
    Observation,
    ServerInfo,
    StageTimings,
)
from deft_policies.base import ActAnswer, ActionLimits, ActRequest, Running
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
from deft_policies.decoding.warm_up import capture, warm_up
from deft_policies.errors import (
    DeviceError,
    NoActionError,
    NotFiniteError,
    PolicyError,
    RequestError,
    UnknownDecodingError,
)
from deft_policies.families.model import Model, OnePassModel, TokenModel, Values
from deft_policies.families.options import ModelOptions
from deft_policies.fast.answer import AnswerGrammar
from deft_policies.model.statistics import find_statistics_key
from deft_policies.progress import doing
from deft_policies.self_test import self_test

_log = logging.getLogger(__name__)
_TESTED_TOKENS = 32  # of a text


@dataclass(eq=False)
class _RunningFrame(Running):
    """A request in flight, and what the policy keeps of it."""

    model: Model
    key: str
    sequence: Sequence | None  # of the engine; None where the model answers in one pass
    clocks: list[StageClock]
    num_actions: int = 0  # that were handed on before the answer


class VlaPolicy:
    """Answers batches of observations with one model."""

    def __init__(
        self,
        model: Model,
        options: ModelOptions | None = None,
        drafts: DraftModels | None = None,
        method: Method | None = None,
    ) -> None:
        """Options of the model itself have been applied; they are only reported here.

        Without a `method` the options' own is the default.
        """
        self.model = model
        self.options = options or ModelOptions()
        self.method = method or choose_method(self.options)
        self.drafts = drafts or DraftModels()
        # All ways of asking the one network, the first where no reasoning is asked for.
        self._models = [model]
        if isinstance(model, TokenModel) and model.reasoning_model is not None:
            self._models.append(model.reasoning_model)
        self._token_models = [one for one in self._models if isinstance(one, TokenModel)]
        self._keys = tuple(model.statistics)
        given = self.options.statistics_key  # without one, and of several, a request has to name it
        is_known = given is not None or len(self._keys) == 1
        self._default_key = find_statistics_key(self._keys, given) if is_known else None
        self._versions = {"deft": _version_of("deft-vla"), "torch": torch.__version__}
        self._details = _describe(model, self.options)
        self.reason_for_dtype = ""  # in words, where the format was chosen
        self.digests: Mapping[str, str] = {}  # of the files that its weights were read from
        self._frames: list[_RunningFrame] = []  # in flight
        if isinstance(model, TokenModel):
            widest = max(one.widest for one in self._token_models)
            specs = [spec for one in self._token_models for spec in one.specs.values()]
            longest = max(spec.max_tokens for spec in specs)
            self.engine = Engine(model.target, self.drafts, widest, longest)
            self._check_method(ActOptions())

    @property
    def token_model(self) -> TokenModel:
        """The model, where it answers token by token; raises `PolicyError` where it does not."""
        if not isinstance(self.model, TokenModel):
            raise PolicyError(f"{self.model.family} answers in one pass and decodes no tokens")
        return self.model

    @property
    def info(self) -> ServerInfo:
        """What the server advertises."""
        model, options = self.model, self.options
        config = model.network.config
        details = dict(self._details)
        for way in self._models:
            details |= way.details
        details |= self.digests
        if self.reason_for_dtype:
            details["dtype chosen"] = self.reason_for_dtype
        if self._token_models:
            details |= self.method.described()
            details |= {
                f"guard, {name}": why for name, why in self.engine.planner.decisions.items()
            }
        longest = self._models[-1].specs[self._any_key]
        return ServerInfo(
            policy=options.name or model.family,
            action_dim=model.statistics[self._any_key].action_dim,
            chunk_length=model.num_steps,
            statistics_keys=self._keys,
            default_statistics_key=self._default_key,
            image_height=config.frame_size,
            image_width=config.frame_size,
            image_chain=model.image_chains[0].value,
            image_chains=tuple(chain.value for chain in ImageChain if chain in model.image_chains),
            decoding=self._default_method,
            decoding_methods=self._methods(),
            instructions=config.training.instructions,
            assets=config.training.assets,
            held_out=config.training.held_out,
            num_pictures=model.num_pictures,
            cameras=("image", *model.camera_names),
            state_dim=model.state_dim,
            max_tokens=None if longest.stop is None else longest.max_tokens,
            thinks_when_asked=len(self._models) > 1,
            versions=self._versions,
            details=details,
        )

    @property
    def _any_key(self) -> str:
        return self._default_key or self._keys[0]

    @property
    def _default_method(self) -> str:
        return self.model.method if isinstance(self.model, OnePassModel) else self.method.name

    def _methods(self) -> tuple[str, ...]:
        known = [self.model.method] if isinstance(self.model, OnePassModel) else method_names()
        return tuple(name for name in known if self.has_method(name))

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        """The range of actions under a statistics key; None is the default."""
        return self.model.limits(self.find_key(statistics_key))

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

    def model_for(self, options: ActOptions) -> Model:
        """The model that answers a request: the reasoning one if requested and available."""
        return self._models[-1] if options.want_reasoning else self.model

    def _check_method(self, options: ActOptions) -> None:
        if isinstance(self.model, TokenModel):
            key = self.find_key(options.statistics_key or self._any_key)
            spec = _spec(self.model_for(options), key, options)
            self.engine.planner.check(Sequence(self.method_for(options), spec))
            return
        if options.decoding not in (None, self._default_method):
            raise UnknownDecodingError(options.decoding, (self._default_method,))
        if options.radius is not None:
            raise RequestError("radius", "nothing is drafted, so there is no radius; leave it out")
        if options.max_tokens is not None:
            raise RequestError("max_tokens", "all answers are as long here; leave it out")
        if options.want_log_probs:
            raise RequestError("log_probs", "answers here are no tokens that are drawn one by one")

    def warm_up(self, methods: Items[str] | None = None) -> None:
        """Answer a black frame by every plan of the method served, of `methods` and of "lossless".

        Where passes are captured, that comes before, once for all methods. Then known frames are
        answered as a test.
        """
        model = self.model
        with model.runner.warming_up(), torch.inference_mode():
            doing("capturing passes")
            model.capture()
            if self._token_models:
                capture(self.engine)
            for way in self._token_models:
                spec = _spec(way, self._any_key, self._tested(way))
                prompt = self._blank_prompt(way)
                # The guards of methods that callers may ask for need what plans cost, too.
                every = (self.method.name, *(methods or ()), DEFAULT_METHOD)
                names = [name for name in dict.fromkeys(every) if self.has_method(name)]
                for number, name in enumerate(names):
                    doing(f"measuring the plans of {name}, {number + 1} of {len(names)} methods")
                    warm_up(self.engine, prompt, self.method_for(ActOptions(decoding=name)), spec)
        doing("answering known frames as a test")
        limits = self.action_limits(self._any_key)
        for one in self._models:
            self_test(
                self,
                None if limits.may_exceed else limits,
                AUTOREGRESSIVE if self._token_models else None,
                one.complete,
                self._tested(one),
            )

    def _tested(self, model: Model) -> ActOptions:
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

    def act(self, batch: Items[ActRequest]) -> list[ActAnswer]:
        """Answer a batch, in order."""
        frames = self.start(batch)
        while any(not one.has_ended for one in frames):
            self.step()
        for one in frames:
            if one.error is not None:
                raise one.error
        return [one.answer for one in frames if one.answer is not None]

    def start(self, batch: Items[ActRequest]) -> Items[Running]:
        """Look at observations now, and have their answers wait: the next steps decode them."""
        with _computing(len(batch)):
            clock = StageClock(self.model.device)
            frames = [self._frame(request, clock) for request in batch]
            try:
                for model in self._token_models:
                    some = [frame for frame in frames if frame.model is model]
                    if some:
                        prompts = model.see([frame.request.observation for frame in some], clock)
                        sequences = [frame.sequence for frame in some if frame.sequence is not None]
                        self.engine.start(prompts, sequences)
            except BaseException:
                for frame in frames:
                    if frame.sequence is not None:
                        self.engine.cancel(frame.sequence)
                raise
        self._frames += frames
        return frames

    def step(self, first: Collection[Running] = ()) -> Items[Running]:
        """Run one round of all requests in flight; return the finished."""
        with _computing(len(self._frames)):
            clock = StageClock(self.model.device)
            for frame in self._frames:
                frame.clocks.append(clock)
            try:
                ended = self._run_round(clock, first)
            except BaseException:
                for frame in [*self._frames]:
                    self.cancel(frame)
                raise
        self._frames = [one for one in self._frames if not one.has_ended]
        for frame in self._frames:
            self._hand_on(frame)
        return ended

    def _hand_on(self, frame: _RunningFrame) -> None:
        """Report actions that are final before the answer is, where the request asks for them."""
        on_actions, sequence, model = frame.request.on_actions, frame.sequence, frame.model
        if on_actions is None or sequence is None or not isinstance(model, TokenModel):
            return
        if not sequence.is_finite:
            return
        actions = model.decode_begun(frame.key, np.array(sequence.spec.name(sequence.tokens)))
        if len(actions) > frame.num_actions:
            frame.num_actions = len(actions)
            on_actions(actions)

    def cancel(self, running: Running) -> None:
        """Remove a request between two steps; one that has ended is left alone."""
        if isinstance(running, _RunningFrame) and running in self._frames:
            self._frames.remove(running)
            if running.sequence is not None:
                self.engine.cancel(running.sequence)

    def _frame(self, request: ActRequest, clock: StageClock) -> _RunningFrame:
        """An observation, and what of the engine answers it."""
        options, model, sequence = request.options, self.model_for(request.options), None
        key = self.find_key(options.statistics_key)
        if isinstance(model, TokenModel):
            spec = _spec(model, key, options)
            sequence = Sequence(self.method_for(options), spec, request.memory, options.want_trace)
            sequence.wants_log_probs = options.want_log_probs
            sequence.executed_steps = options.executed_steps
        return _RunningFrame(request, model=model, key=key, sequence=sequence, clocks=[clock])

    def _run_round(self, clock: StageClock, first: Collection[Running]) -> list[_RunningFrame]:
        """One round, and answers of what it has ended."""
        model, frames = self.model, self._frames
        found: list[tuple[Values, DecodeTrace | None]]
        if isinstance(model, TokenModel):
            urgent = {one.sequence for one in frames if one in first and one.sequence is not None}
            ended = set(self.engine.step(clock, urgent))
            frames = [one for one in frames if one.sequence in ended]
            traces = [one.sequence.trace for one in frames if one.sequence is not None]
            found = [(np.array(one.tokens if one else ()), one) for one in traces]
        else:
            assert isinstance(model, OnePassModel)
            observations = [one.request.observation for one in frames]
            found = model.answer(observations, [one.key for one in frames], clock)
        clock.restart()
        for frame, (values, trace) in zip(frames, found, strict=True):
            self._answer(frame, values, trace)
        clock.record(Stage.FINISH)
        by_start = {id(frame.clocks[0]): frame.clocks for frame in frames}
        timings = {start: _sum_timings(clocks) for start, clocks in by_start.items()}
        for frame in frames:
            if frame.answer is not None:
                chunk = replace(frame.answer.chunk, timings=timings[id(frame.clocks[0])])
                frame.answer = replace(frame.answer, chunk=chunk)
        return frames

    def _answer(self, frame: _RunningFrame, values: Values, trace: DecodeTrace | None) -> None:
        """Give a frame that has ended its answer, or say why there is none."""
        if frame.sequence is not None and frame.sequence.error is not None:
            frame.error = frame.sequence.error
            return
        if frame.sequence is not None and not frame.sequence.is_finite:
            frame.error = NotFiniteError(
                "the model's logits hold NaN or infinity; its weights or its number format are "
                "broken, nothing was answered"
            )
            return
        memory = frame.request.memory if frame.sequence is None else frame.sequence.memory
        model, options, error = frame.model, frame.request.options, None
        try:
            actions = model.decode(frame.key, values)
            actions = model.for_robot(actions, frame.request.observation)
            chunk = ActionChunk(actions, trace=trace)
        except NoActionError as none:
            nothing = np.empty((0, model.statistics[frame.key].action_dim))
            chunk, error = ActionChunk(nothing, trace=trace), none
        is_asked = options.want_reasoning or options.want_trace or error is not None
        if is_asked and isinstance(model, TokenModel):
            text, parts = model.read_text(values.tolist()) or (None, ())
            if error is not None and text is not None:
                error.reasoning = text
            if trace is not None and parts:
                trace = replace(trace, parts=parts)
            wanted = text if options.want_reasoning else None
            chunk = replace(chunk, trace=trace, reasoning=wanted)
        if frame.sequence is not None:
            chunk = _own_up(chunk, frame.sequence)
        if frame.sequence is not None and frame.sequence.wants_log_probs:
            chunk = replace(chunk, log_probs=_log_probs(frame.sequence))
        frame.answer = ActAnswer(chunk, memory, error)

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

    def find_key(self, key: str | None) -> str:
        """The statistics key meant by a request that names this one, or none."""
        return find_statistics_key(self._keys, key if key is not None else self._default_key)


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


def _describe(model: Model, options: ModelOptions) -> dict[str, str]:
    """What was loaded, for people."""
    device, weight = model.device, model.network.decoder.embedding.weight
    about = f"cpu ({torch.get_num_threads()} threads)"
    if device.type == "cuda":
        about = f"{device} ({torch.cuda.get_device_name(device)})"
    reported = {}
    if isinstance(model, TokenModel):
        reported["answers of exact methods"] = model.target.describe_equality()
        reported["guard"] = "on" if options.is_guarded else "off"
    return {
        "weights": options.name or options.checkpoint or f"random:{options.random_weights}",
        "device": about,
        "processor": _processor(),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "quantization": model.network.describe_quantization(),
        **reported,
        **({"draft model": options.draft_model} if options.draft_model else {}),
    }


def _processor() -> str:
    """The name of this machine's processor; its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _own_up(chunk: ActionChunk, sequence: Sequence) -> ActionChunk:
    """Say where a grammar has made another answer of the model's own; its trace has that, too."""
    if not isinstance(sequence.grammar, AnswerGrammar):
        return chunk
    free = sequence.grammar.free_tokens(sequence)
    if free == sequence.tokens:
        return chunk
    trace = chunk.trace
    if trace is not None:
        trace = replace(trace, predicted=sequence.spec.name(free))
    return replace(chunk, trace=trace, intervention=Intervention.GRAMMAR)


def _log_probs(sequence: Sequence) -> LogProbs:
    """How likely the model was to write the tokens of an answer."""
    return LogProbs(sequence.log_probs, sequence.method.temperature or 1.0, "vocabulary")


def _spec(model: Model, key: str, options: ActOptions) -> AnswerSpec:
    """What the decoder is asked for; raises `RequestError` for what is too long."""
    spec, wanted = model.specs[key], options.max_tokens
    if wanted is None or (isinstance(model, TokenModel) and not model.cuts_answers):
        return spec
    if spec.stop is None:
        raise RequestError(
            "max_tokens",
            f"all answers without reasoning have {spec.max_tokens} tokens here; leave it out",
        )
    if not 1 <= wanted <= spec.max_tokens:
        raise RequestError(
            "max_tokens", f"must be 1 to {spec.max_tokens} (--max-tokens), got {wanted}"
        )
    return replace(spec, max_tokens=wanted)


@contextmanager
def _computing(num_frames: int) -> Iterator[None]:
    """Inference, with a word for a device that is too small."""
    try:
        with torch.inference_mode():
            yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"no memory for a batch of {num_frames}: {error}") from error


def _sum_timings(clocks: Items[StageClock]) -> StageTimings:
    every = [vars(clock.timings()) for clock in clocks]
    return StageTimings(**{name: sum(one[name] for one in every) for name in every[0]})
