"""The baseline that speed is compared with: transformers' own Llama behind our towers.

Same weights, pixels and prompt; only the language model and its loop are theirs. Behind the
`Policy` interface, so that it is measured like any other policy.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deft_client.types import ActionChunk, ActOptions, DecodeTrace, Observation, ServerInfo
from deft_policies.base import ActAnswer, ActRequest
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.errors import RequestError
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.vla import OpenVLAModel

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_PREFIX = "language_model."


class BaselineLoop(Enum):
    """Which loop of transformers."""

    GENERATE = "transformers"  # what OpenVLA's own code calls
    STATIC = "transformers-static"  # the same with a static cache, which it compiles on a GPU
    FORWARD = "transformers-forward"  # the leanest loop over their model and cache


class TransformersPolicy:
    """Answers one observation at a time, greedily, with `LlamaForCausalLM`."""

    def __init__(self, policy: VlaPolicy, loop: BaselineLoop) -> None:
        self._ours = policy
        self._model = policy.token_model
        self._loop = loop
        self._llama = build_llama(self._model.network)

    @property
    def info(self) -> ServerInfo:
        """That of the policy it is compared with."""
        return self._ours.info

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Refuse what the other policy refuses."""
        self._ours.check(observation, options)

    def warm_up(self) -> None:
        """Nothing beyond what the first frames do."""

    @torch.inference_mode()
    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        """Answer a batch of one, as OpenVLA's own code does."""
        if len(batch) != 1:
            raise RequestError("batch", f"the baseline answers 1 observation, got {len(batch)}")
        request, model = batch[0], self._model
        clock = StageClock(model.device)
        prompts = model.see([request.observation], clock)
        key = self._ours.find_key(request.options.statistics_key)
        decode = self._forward if self._loop is BaselineLoop.FORWARD else self._generate
        tokens = decode(prompts.embeds, model.forms[key].max_tokens, clock)
        clock.skip()
        actions = model.decode(key, np.array(tokens))
        clock.lap(Stage.FINISH)
        trace = DecodeTrace(self._loop.value, tuple(tokens), tuple(tokens), (), ())
        return [ActAnswer(ActionChunk(actions, clock.timings(), trace), request.memory)]

    def _generate(self, embeds: Tensor, num_tokens: int, clock: StageClock) -> list[int]:
        stage = Stage.PREFILL

        def after_each_pass(_: Tensor, scores: Tensor) -> Tensor:
            nonlocal stage
            clock.lap(stage)
            stage = Stage.VERIFY
            return scores

        # Their annotations know neither their own mixin nor plain functions.
        found = self._llama.generate(  # type: ignore[misc]
            inputs_embeds=embeds,
            attention_mask=torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=[after_each_pass],  # type: ignore[arg-type]
            cache_implementation="static" if self._loop is BaselineLoop.STATIC else None,
        )
        tokens: list[int] = found[0].tolist()
        clock.lap(Stage.VERIFY)
        return tokens

    def _forward(self, embeds: Tensor, num_tokens: int, clock: StageClock) -> list[int]:
        output = self._llama(inputs_embeds=embeds, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(dim=-1)
        clock.lap(Stage.PREFILL)
        found = [token]
        while len(found) < num_tokens:
            output = self._llama(
                input_ids=token[:, None], past_key_values=output.past_key_values, use_cache=True
            )
            token = output.logits[:, -1].argmax(dim=-1)
            found.append(token)
        tokens: list[int] = torch.cat(found).tolist()
        clock.lap(Stage.VERIFY)
        return tokens


def build_llama(model: OpenVLAModel) -> "LlamaForCausalLM":
    """Build transformers' Llama of the same sizes with the same weights.

    On a GPU the two share their memory; on a CPU, where ours lie column by column, theirs are
    copied to lie as transformers lays them.
    """
    with _quiet():
        # Imported here: only this baseline needs it, and it takes seconds.
        from transformers import LlamaConfig, LlamaForCausalLM

    sizes = model.config.llm
    config = LlamaConfig.from_dict(
        {
            "vocab_size": sizes.vocabulary,
            "hidden_size": sizes.width,
            "intermediate_size": sizes.mlp_width,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "rms_norm_eps": sizes.norm_eps,
            "max_position_embeddings": sizes.max_positions,
            "rope_theta": sizes.rope_theta,
        }
    )
    config._attn_implementation = "sdpa"
    weight = model.decoder.embedding.weight
    default = torch.get_default_dtype()
    torch.set_default_dtype(weight.dtype)
    try:
        with weight.device:
            llama = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    weights = {
        name.removeprefix(_PREFIX): tensor.contiguous()
        for name, tensor in model.named_tensors().items()
        if name.startswith(_PREFIX)
    }
    llama.load_state_dict(weights, assign=True)
    llama.train(False)
    return llama


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep in what the library says of kernels for other devices that it could not load."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
