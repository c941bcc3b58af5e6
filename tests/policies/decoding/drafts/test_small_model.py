"""Drafting with another model, beside recomputing what that model would say, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.drafts import Guesses
from deft_policies.decoding.drafts.small_model import SmallModelDrafts, with_fewer_patches
from deft_policies.decoding.methods import apply_knobs, find_method
from deft_policies.decoding.plan import Plan, TreeShape
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import (
    PassRow,
    Prompt,
    Scores,
    Target,
    self_draft_target,
)
from deft_policies.decoding.tree import DraftTree, merge
from deft_policies.errors import CheckpointError
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import LlamaDecoder, first_layers
from deft_policies.model.sizes import TokenRange
from tests.policies.decoding.scripts import Decoding, Session, tokens_of
from tests.tiny_target import (
    ACTIONS,
    TinyTarget,
    fast_target,
    greedy,
    path_to,
    random_prompts,
    tiny_decoder,
)

DECODER = tiny_decoder()
PROMPTS = random_prompts(DECODER, [2, 5, 3])


def drafting(
    model: object, shape: TreeShape, target: object = None, knobs: str = ""
) -> tuple[Decoding, "Watched"]:
    """Decoding with a small model, and what it drafts."""
    plans = (Plan("case", (), (kinds.SMALL_MODEL,), shape),)
    method = apply_knobs(replace(find_method("small-model"), plans=plans), knobs)
    target = target or fast_target(DECODER)
    drafts = Watched(model, target)  # type: ignore[arg-type]
    return Decoding(target, method, None, drafts), drafts


class Watched(SmallModelDrafts):
    """Keeps the trees that it has drafted, by the answer's slot."""

    def __init__(self, model: Target, target: Target) -> None:
        super().__init__(model, target)
        self.grown: dict[int, list[DraftTree]] = {}

    def draft_all(self, sequences: Sequence[Answer]) -> list[Guesses]:
        found = super().draft_all(sequences)
        for one, guesses in zip(sequences, found, strict=True):
            tree = merge(one.tokens[-1:], [("small-model", guesses)], 999)
            self.grown.setdefault(one.slot, []).append(tree)
        return found


@dataclass(frozen=True)
class Twin:
    """What a decoder says after a prompt and some tokens, over action tokens, from scratch."""

    decoder: LlamaDecoder
    prompts: Sequence[Prompt]

    def log_probs(self, row: int, tokens: list[int]) -> Tensor:
        words = self.decoder.embedding(torch.tensor(tokens, dtype=torch.int64))
        embeds = torch.cat((self.prompts[row].embeds, words))
        logits = self.decoder.head(self.decoder(embeds[None])[0, -1])
        return logits[ACTIONS.first : ACTIONS.last + 1].log_softmax(dim=0)


SHAPES = [
    TreeShape.chain(6),
    TreeShape(4, 3, 15),
    TreeShape.eagle(),
    TreeShape.branches(2, 4),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "dynamic", "eagle", "branches"])
@pytest.mark.parametrize("share", [1.0, 0.5], ids=["whole", "pruned"])
def test_every_guess_has_the_odds_that_the_model_gives_it(shape: TreeShape, share: float) -> None:
    """Over several rounds, of rows that accept different numbers of drafts."""
    shallow = first_layers(DECODER, 1)
    decoder, drafts = drafting(fast_target(shallow), shape, knobs=f"patch_share={share}")
    twin = Twin(shallow, [with_fewer_patches(prompt, share) for prompt in PROMPTS])
    session = Session.of(3)
    for _ in range(2):
        drafts.grown.clear()
        traces = decoder.decode(PROMPTS, session)
        for row, trace in enumerate(traces):
            committed = trace.passes[0].committed_length
            for one, tree in zip(trace.passes[1:], drafts.grown[row], strict=False):
                expect_odds(twin, tree, row, list(trace.tokens[:committed]))
                committed += one.committed_length
    assert tokens_of(traces) == greedy(DECODER, PROMPTS)


def expect_odds(twin: Twin, tree: DraftTree, row: int, committed: list[int]) -> None:
    assert tree.tokens[0] == committed[-1]
    for node in range(1, tree.num_nodes):
        path = [tree.tokens[one] for one in path_to(tree, node)[1:]]
        total, known = 0.0, list(committed)
        for token in path:
            total += float(twin.log_probs(row, known)[token - ACTIONS.first])
            known.append(token)
        assert tree.log_probs[node] == pytest.approx(total, abs=1e-3)


def test_a_target_without_cache_and_masks_drafts_alike() -> None:
    found = []
    for model in (fast_target(first_layers(DECODER, 1)), TinyTarget(first_layers(DECODER, 1))):
        traces = drafting(model, SHAPES[2])[0].decode(PROMPTS, Session.of(3))
        found.append([one.tokens for trace in traces for one in trace.passes])
    assert found[0] == found[1]


def test_the_whole_target_as_its_own_draft_model_is_always_right() -> None:
    target = fast_target(DECODER)
    model = self_draft_target(target, num_layers=2)
    decoder, _ = drafting(model, TreeShape.chain(6), target, "whole_vocabulary=on")
    traces = decoder.decode(PROMPTS, Session.of(3))
    assert [trace.accepted_lengths for trace in traces] == [(0, 5)] * 3


class CountingTarget(Target):
    """A model that counts its passes."""

    num_passes = 0

    def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
        self.num_passes += 1
        return super().forward(cache, rows)


def test_ngrams_spare_the_small_model_passes_and_change_no_draft() -> None:
    """FLy's multi-level acceleration: frames repeat, so that the session knows what comes."""
    found, passes = [], []
    for multi_level in ("off", "on"):
        model = CountingTarget(DECODER, ACTIONS)
        decoder, _ = drafting(model, TreeShape.chain(6), knobs=f"multi_level={multi_level}")
        session, seen = Session.of(3), []
        for frame in (0, 1, 0, 1):
            prompts = random_prompts(DECODER, [2, 5, 3], frame)
            traces = decoder.decode(prompts, session)
            seen += [one.tokens for trace in traces for one in trace.passes]
        found.append(seen)
        passes.append(model.num_passes)
    assert found[0] == found[1]
    assert passes[1] < 0.75 * passes[0]


def test_ngrams_that_are_wrong_cost_no_pass_and_change_no_draft() -> None:
    found, passes = [], []
    for multi_level in ("off", "on"):
        model = CountingTarget(first_layers(DECODER, 1), ACTIONS)
        decoder, _ = drafting(model, TreeShape.chain(6), knobs=f"multi_level={multi_level}")
        session, seen = Session.of(2), []
        for frame in range(5):
            prompts = random_prompts(DECODER, [2, 4], frame)
            traces = decoder.decode(prompts, session)
            seen += [one.tokens for trace in traces for one in trace.passes]
        found.append(seen)
        passes.append(model.num_passes)
    assert found[0] == found[1]
    assert passes[1] <= passes[0]


def test_fly_looks_up_unless_it_is_told_not_to() -> None:
    for text, multi_level in (("fly", True), ("fly:multi_level=off", False), ("lvspec", False)):
        assert find_method(text).option("multi_level", False) == multi_level


def moved(decoder: LlamaDecoder, by: int) -> LlamaDecoder:
    """The same model with a longer vocabulary, every token's id moved up."""
    longer = LlamaDecoder(replace(decoder.sizes, vocabulary=decoder.sizes.vocabulary + by))
    longer.layers, longer.norm, longer.rotary = decoder.layers, decoder.norm, decoder.rotary
    with torch.no_grad():
        for name in ("embedding", "head"):
            weight = getattr(longer, name).weight
            weight.zero_()
            weight[by:] = getattr(decoder, name).weight
    return longer.requires_grad_(False)


def test_a_vocabulary_of_its_own_changes_no_draft() -> None:
    found = []
    for by in (0, 5):
        tokens = TokenRange(ACTIONS.first + by, ACTIONS.last + by)
        model = Target(moved(first_layers(DECODER, 1), by), tokens)
        traces = drafting(model, SHAPES[1])[0].decode(PROMPTS, Session.of(3))
        found.append([(one.tokens, one.path) for trace in traces for one in trace.passes])
    assert found[0] == found[1]


def test_trees_wider_than_the_models_cache_are_cut() -> None:
    models = DraftModels(small_model=fast_target(first_layers(DECODER, 1)))
    for tree in ("dynamic+16+32+256", "template+6+7"):
        method = find_method(f"small-model:tree={tree}")
        decoder = Decoding(fast_target(DECODER), method, models)
        assert tokens_of(decoder.decode(PROMPTS, Session.of(3))) == greedy(DECODER, PROMPTS)


def test_a_shallow_decoder_shares_its_weights() -> None:
    decoder = DECODER
    shallow = first_layers(decoder, 1)
    assert shallow.layers[0] is decoder.layers[0]
    assert shallow.embedding is decoder.embedding
    assert len(shallow.layers) == shallow.sizes.num_layers == 1
    with pytest.raises(CheckpointError, match="2 layers, cannot draft with its first 3"):
        first_layers(decoder, 3)


def test_pruned_prompts_keep_their_text_and_an_even_share_of_the_patches() -> None:
    (prompt,) = random_prompts(tiny_decoder(), [5])
    fewer = with_fewer_patches(prompt, 0.5)
    assert fewer.length == 7
    assert fewer.patches == slice(1, 3)
    kept = [0, 1, 4, *range(5, 9)]
    assert torch.equal(fewer.embeds, prompt.embeds[kept])
    assert with_fewer_patches(prompt, 1.0) is prompt
    assert with_fewer_patches(prompt, 0.01).patches == slice(1, 2)
