"""`deft bench --against transformers`: their own models and loops, on the same frames.

Same weights, pixels and prompt, in turn at every frame. Of OpenVLA only the language model and its
loop are theirs, behind our towers; of VLA-0 the whole model is. Behind the `Policy` interface, so
that it is measured like any other policy.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deft_core.types import ActionChunk, ActOptions, DecodeTrace, Observation, ServerInfo
from deft_policies.base import OneCallPolicy, PolicyAnswer, PolicyRequest
from deft_policies.benchmark.replay import Contender
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.errors import NoActionError, PolicyError, RequestError
from deft_policies.families.policy import VlaPolicy
from deft_policies.families.vla0.model import Vla0
from deft_policies.families.vla0.pictures import make_pictures, to_patches
from deft_policies.model.vla import OpenVLAModel

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_PREFIX = "language_model."
_LOOKUP_TOKENS = 10
_ASSISTANT_LAYERS = 2


class BaselineLoop(Enum):
    """Which loop of transformers."""

    GENERATE = "transformers"  # what OpenVLA's own code calls
    STATIC = "transformers-static"  # the same with a static cache, which it compiles on a GPU
    FORWARD = "transformers-forward"  # the leanest loop over their model and cache
    LOOKUP = "transformers-lookup"  # drafting what stood in prompt and text before
    ASSISTED = "transformers-assisted"  # drafting with the model's own first layers


class QwenLoop(Enum):
    """Which of transformers' ways to write VLA-0's answers."""

    CONSTRAINED = "transformers"  # as VLA-0's own code: only digits, the space and the end
    LOOKUP = "transformers-lookup"  # the same, drafting what stood in prompt and text before
    PLAIN = "transformers-unconstrained"


class TransformersPolicy(OneCallPolicy):
    """Answers one observation at a time, greedily, with `LlamaForCausalLM`."""

    name: str

    def __init__(self, policy: VlaPolicy, loop: BaselineLoop) -> None:
        self._ours = policy
        self._model = policy.model
        self._loop, self.name = loop, loop.value
        network = self._model.network
        assert isinstance(network, OpenVLAModel)
        self._llama = build_llama(network)
        self._embedding = PromptEmbedding(network.decoder.embedding.weight)
        self._extra: dict[str, Any] = {}
        if loop is BaselineLoop.STATIC:
            self._extra["cache_implementation"] = "static"
        elif loop is BaselineLoop.LOOKUP:
            self._extra["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        elif loop is BaselineLoop.ASSISTED:
            assistant = build_llama(network, _ASSISTANT_LAYERS)
            assistant.set_input_embeddings(self._embedding)
            self._extra["assistant_model"] = assistant
        self._llama.set_input_embeddings(self._embedding)

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
    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        """Answer a batch of one, as the families' own code does."""
        if len(batch) != 1:
            raise RequestError("batch", f"the baseline answers 1 observation, got {len(batch)}")
        request, model, error = batch[0], self._model, None
        clock = StageClock(model.device)
        key = self._ours.find_key(request.options.statistics_key)
        tokens = self._write(request.observation, model.specs[key], clock)
        clock.restart()
        try:
            actions = self._read(key, tokens)
        except NoActionError as none:
            actions, error = np.empty((0, model.statistics[key].action_dim)), none
        clock.record(Stage.FINISH)
        trace = DecodeTrace(self.name, tuple(tokens), tuple(tokens), (), ())
        chunk = ActionChunk(actions, clock.timings(), trace)
        return [PolicyAnswer(chunk, request.memory, error)]

    def _write(self, observation: Observation, spec: AnswerSpec, clock: StageClock) -> list[int]:
        """The tokens of an answer."""
        (prompt,), model = self._model.see([observation], clock), self._model
        if self._loop is BaselineLoop.FORWARD:
            return self._forward(prompt.embeds[None], spec, clock)
        words = model.encode(observation.instruction)
        self._embedding.patches = prompt.embeds[prompt.patches]
        ids = [*words[: prompt.patches.start], *self._embedding.patch_ids]
        return self._generate([*ids, *words[prompt.patches.start :]], spec, clock)

    def _read(self, key: str, tokens: list[int]) -> NDArray[np.float64]:
        return self._model.decode(key, tokens)

    def _generate(self, ids: list[int], spec: AnswerSpec, clock: StageClock) -> list[int]:
        stage = Stage.PREFILL

        def after_each_pass(_: Tensor, scores: Tensor) -> Tensor:
            nonlocal stage
            clock.record(stage)
            stage = Stage.VERIFY
            return scores

        prompt = torch.tensor([ids], device=self._model.device)
        with _quiet():  # it says at every assisted answer which flags are old
            # Their annotations know neither their own mixin nor plain functions.
            output = self._llama.generate(  # type: ignore[misc]
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=spec.max_tokens,
                do_sample=False,
                eos_token_id=spec.stop,
                pad_token_id=0,
                logits_processor=[after_each_pass],  # type: ignore[arg-type]
                **self._extra,
            )
        tokens: list[int] = output[0, len(ids) :].tolist()
        clock.record(Stage.VERIFY)
        return tokens

    def _forward(self, embeds: Tensor, spec: AnswerSpec, clock: StageClock) -> list[int]:
        output = self._llama(inputs_embeds=embeds, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(dim=-1)
        clock.record(Stage.PREFILL)
        found = [token]
        while len(found) < spec.max_tokens and int(found[-1]) != spec.stop:
            output = self._llama(
                input_ids=token[:, None], past_key_values=output.past_key_values, use_cache=True
            )
            token = output.logits[:, -1].argmax(dim=-1)
            found.append(token)
        tokens: list[int] = torch.cat(found).tolist()
        clock.record(Stage.VERIFY)
        return tokens


class QwenPolicy(TransformersPolicy):
    """Answers with `Qwen2_5_VLForConditionalGeneration` of VLA-0's own files."""

    def __init__(self, policy: VlaPolicy, loop: QwenLoop, qwen: Any) -> None:
        """With `build_qwen`'s model, which several may share."""
        model = policy.model
        assert isinstance(model, Vla0)
        self._ours, self._model, self._vla0, self._qwen = policy, model, model, qwen
        self._way, self.name = loop, loop.value
        config = model.network.config
        self._is_allowed = torch.zeros(config.vocab_size, dtype=torch.bool, device=model.device)
        self._is_allowed[list(config.answer_ids)] = True

    def _write(self, observation: Observation, spec: AnswerSpec, clock: StageClock) -> list[int]:
        model, qwen = self._vla0, self._qwen
        pictures = make_pictures(model.pictures(observation), model.run)
        ids = torch.tensor([model.encode(observation.instruction)], device=model.device)
        clock.record(Stage.PREPARE)
        processors = [] if self._way is QwenLoop.PLAIN else [self._constrained]
        found = qwen.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == qwen.config.image_token_id).long(),
            pixel_values=to_patches(torch.from_numpy(np.stack(pictures)))
            .flatten(0, 1)
            .to(model.device),
            image_grid_thw=torch.tensor([[1, *model.run.grid]] * len(pictures)),
            max_new_tokens=spec.max_tokens,
            do_sample=False,
            prompt_lookup_num_tokens=_LOOKUP_TOKENS if self._way is QwenLoop.LOOKUP else None,
            logits_processor=processors,
        )
        tokens: list[int] = found[0, ids.shape[1] :].tolist()
        clock.record(Stage.VERIFY)
        return tokens

    def _read(self, key: str, tokens: list[int]) -> NDArray[np.float64]:
        if not self._is_allowed[tokens].all():
            raise NoActionError("the text has words that are no numbers")
        return super()._read(key, tokens)

    def _constrained(self, _: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self._is_allowed, -torch.inf)


def baselines_of(policy: VlaPolicy) -> list[TransformersPolicy]:
    """Every way of transformers to answer as a policy; speed-ups are over the first."""
    if isinstance(policy.model, Vla0):
        qwen = build_qwen(policy.model)
        return [QwenPolicy(policy, loop, qwen) for loop in QwenLoop]
    _require_llama(policy)
    return [TransformersPolicy(policy, loop) for loop in BaselineLoop]


def find_loops(policy: VlaPolicy) -> tuple[list[Contender], str]:
    """Transformers' loops over the policy's weights, and the name of their own default."""
    return [
        Contender(baseline.name, baseline) for baseline in baselines_of(policy)
    ], BaselineLoop.GENERATE.value


def find_baseline(policy: VlaPolicy, name: str) -> TransformersPolicy:
    """One of them, by its name."""
    if isinstance(policy.model, Vla0):
        return QwenPolicy(policy, QwenLoop(name), build_qwen(policy.model))
    _require_llama(policy)
    return TransformersPolicy(policy, BaselineLoop(name))


def _require_llama(policy: VlaPolicy) -> None:
    """Refuse families whose decoder is no Llama of transformers."""
    if not isinstance(policy.model.network, OpenVLAModel):
        raise PolicyError(
            f"--against transformers: not of {policy.model.family}; of OpenVLA, ECoT and VLA-0. "
            "To have this checkpoint's own code answer the same frames, with its times: "
            "deft doctor --against PYTHON (docs/conformance.md)"
        )


def build_qwen(model: Vla0) -> Any:
    """Load transformers' Qwen2.5-VL from the files of ours, in its number format."""
    with _quiet():
        from transformers import Qwen2_5_VLForConditionalGeneration
        from transformers.utils import logging as log

        untyped: Any = log
        untyped.disable_progress_bar()
        qwen: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            str(model.run.base), dtype=model.network.embed_tokens.weight.dtype
        )
    return qwen.to(model.device).eval()


class PromptEmbedding(torch.nn.Module):
    """Embeds words, and pictures' patches by ids behind those of the words.

    So a prompt is a row of ids, which is what transformers drafts from.
    """

    patches: Tensor  # [patch, width], of the present frame

    def __init__(self, words: Tensor) -> None:
        super().__init__()
        self.weight = words  # [word, width]

    @property
    def patch_ids(self) -> range:
        """What the patches are called in a prompt."""
        return range(len(self.weight), len(self.weight) + len(self.patches))

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings, [..., width]."""
        is_patch = ids >= len(self.weight)
        embeds = torch.nn.functional.embedding(ids.clamp(max=len(self.weight) - 1), self.weight)
        if is_patch.any():
            embeds[is_patch] = self.patches[ids[is_patch] - len(self.weight)]
        return embeds


def build_llama(model: OpenVLAModel, num_layers: int | None = None) -> "LlamaForCausalLM":
    """Build transformers' Llama of the same sizes with the same weights, or of its first layers.

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
            "num_hidden_layers": num_layers or sizes.num_layers,
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
    llama.load_state_dict({name: weights[name] for name in llama.state_dict()}, assign=True)
    llama.train(False)
    return llama


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep in what the library says of kernels for other devices that it could not load."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
