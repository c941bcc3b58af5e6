"""OFT's policy: one pass answers a whole batch; nothing is decoded token by token."""

from collections.abc import Sequence

import torch

from deft_core.types import ActionChunk, ActOptions, Observation, ServerInfo
from deft_policies.base import OneCallPolicy, PolicyAnswer, PolicyRequest
from deft_policies.decoding.clock import StageClock
from deft_policies.errors import RequestError, UnknownDecodingError
from deft_policies.families.model_policy import ModelPolicy, computing
from deft_policies.families.oft.model import METHOD, Oft
from deft_policies.families.options import ModelOptions
from deft_policies.progress import doing
from deft_policies.self_test import self_test


class OftPolicy(OneCallPolicy, ModelPolicy):
    """Answers a batch of observations with chunks of actions, in one pass."""

    model: Oft

    def __init__(self, model: Oft, options: ModelOptions | None = None) -> None:
        super().__init__([model], options or ModelOptions())

    @property
    def info(self) -> ServerInfo:
        """What the server advertises."""
        return self._info(METHOD, (METHOD,))

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Refuse unknown keys, what asks for decoding, and what the model cannot look at."""
        self.find_key(options.statistics_key)
        if options.decoding not in (None, METHOD):
            raise UnknownDecodingError(options.decoding, (METHOD,))
        if options.radius is not None:
            raise RequestError("radius", "nothing is drafted, so there is no radius; leave it out")
        if options.max_tokens is not None:
            raise RequestError("max_tokens", "all answers are as long here; leave it out")
        if options.want_log_probs:
            raise RequestError("log_probs", "answers here are no tokens that are drawn one by one")
        self.model.check(observation)

    def warm_up(self) -> None:
        """Capture passes where they are, then answer known frames as a test."""
        with self.model.runner.warming_up(), torch.inference_mode():
            doing("capturing passes")
            self.model.capture()
        doing("answering known frames as a test")
        self_test(self, self._tested_limits(), complete=self.model.complete)

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        """Answer a batch in one pass, in order."""
        model = self.model
        keys = [self.find_key(request.options.statistics_key) for request in batch]
        with computing(len(batch)):
            clock = StageClock(model.device)
            answers = model.answer([request.observation for request in batch], keys, clock)
            timings = clock.timings()
        return [
            PolicyAnswer(ActionChunk(actions, timings, trace), one.memory)
            for one, (actions, trace) in zip(batch, answers, strict=True)
        ]
