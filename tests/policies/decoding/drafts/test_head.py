"""The draft head: cached growth against whole sequences, options, gradients and its files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deft_policies.checkpoint.drafts import HeadLayout, load_head, named_weights, save_head
from deft_policies.decoding.drafts.heads import EagleDrafts
from deft_policies.decoding.plan import KeyMask, RopeOffset, TreeShape
from deft_policies.decoding.trace import PassRecord
from deft_policies.decoding.tree import DraftTree, merge
from deft_policies.errors import CheckpointError
from deft_policies.memory import SessionMemory
from deft_policies.model.draft_heads import EagleHead, head_sizes
from deft_policies.model.sizes import LlamaSizes
from tests.policies.decoding.scripts import answer_of
from tests.tiny_target import (
    ACTIONS,
    WIDTH,
    TinyTarget,
    path_to,
    random_prompts,
    tiny_decoder,
)

SIZES = head_sizes(WIDTH, 48, 2, 2, max_positions=64)
TEMPLATE = TreeShape.template(levels=4, reach=3)


def random_head(seed: int = 0, sizes: LlamaSizes = SIZES) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(sizes)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.25)
    return head


def key_mask(kind: KeyMask, prompt_lengths: Tensor, num_positions: int) -> Tensor:
    """The attention mask of whole sequences, [row, 1, position, position].

    With `PREFIX_ONLY`, action positions (from the prompt's last one on) see only the positions
    before the prompt's last one, not even themselves.
    """
    positions = torch.arange(num_positions)
    causal = positions <= positions[:, None]
    if kind is KeyMask.CAUSAL:
        return causal.expand(len(prompt_lengths), 1, -1, -1)
    edge = (prompt_lengths - 1)[:, None, None, None]
    is_action = positions[:, None] >= edge
    return torch.where(is_action, positions < edge, causal)


class Conversation:
    """A target's side of answers: what it computed of the prompts, and passes that commit."""

    def __init__(self, text_lengths: list[int]) -> None:
        self.target = TinyTarget(tiny_decoder())
        self.prompts = random_prompts(self.target.decoder, text_lengths)
        self.seen = [self.target.decoder(one.embeds[None])[0] for one in self.prompts]
        self.answers = [answer_of(SessionMemory()) for _ in text_lengths]
        for slot, answer in enumerate(self.answers):
            answer.slot = slot
        # What the head should have read of each row so far, as whole sequences.
        self.hidden = list(self.seen)

    def begin(self, drafts: EagleDrafts) -> EagleDrafts:
        """Show a source the prompts."""
        for answer, prompt, seen in zip(self.answers, self.prompts, self.seen, strict=True):
            drafts.observe_prompt(answer, prompt, seen)
        return drafts

    def draft(self, drafts: EagleDrafts, shape: TreeShape) -> list[DraftTree]:
        for answer in self.answers:
            answer.shape = shape
        found = drafts.draft_all(self.answers)
        return [
            merge(answer.tokens[-1:], [("head", one)], 99)
            for answer, one in zip(self.answers, found, strict=True)
        ]

    def commit(self, new: list[list[int]], seed: int, *sources: EagleDrafts) -> None:
        """A pass that commits these tokens, the last of each row being the bonus."""
        generator = torch.Generator().manual_seed(seed)
        for row, tokens in enumerate(new):
            answer = self.answers[row]
            is_prefill = not answer.tokens
            hidden = torch.randn(len(tokens), WIDTH, generator=generator)
            if is_prefill:  # the root is the last prompt token, whose hidden state is known
                hidden[0] = self.hidden[row][-1]
            self.hidden[row] = torch.cat((self.hidden[row], hidden[int(is_prefill) :]))
            answer.tokens = [*answer.tokens, *tokens]
            tree = merge([0], [("test", [tokens[:-1]])], 99)
            path = list(range(len(tokens)))
            answer.last = PassRecord(False, tree, tokens, path, 0, [])
            for source in sources:
                source.observe(answer, hidden, torch.zeros(len(tokens), 1))

    def whole(self, row: int) -> tuple[Tensor, Tensor]:
        """(e_{t+1}, f_t) of everything committed in a row, [position, width] each."""
        words = self.target.embed(torch.tensor(self.answers[row].tokens))
        return torch.cat((self.prompts[row].embeds[1:], words)), self.hidden[row]


def head_drafts(head: EagleHead, talk: Conversation, *published: Any) -> EagleDrafts:
    return EagleDrafts(head, talk.target, *published)  # type: ignore[arg-type]


def slow_log_probs(
    head: EagleHead, talk: Conversation, row: int, path: list[int], mask: KeyMask
) -> Tensor:
    """Next-token odds after a path of guesses, by running the whole sequence once per guess."""
    embeds, hidden = talk.whole(row)
    length = talk.prompts[row].length
    for token in [*path, -1]:
        allowed = key_mask(mask, torch.tensor([length]), len(embeds))
        out = head(embeds[None], hidden[None], allowed)[0, -1]
        if token >= 0:
            embeds = torch.cat((embeds, talk.target.embed(torch.tensor([token]))))
            hidden = torch.cat((hidden, out[None]))
    return talk.target.logits(out, ACTIONS).log_softmax(dim=0)


@pytest.mark.parametrize("mask", list(KeyMask))
@pytest.mark.parametrize("text_lengths", [[4], [2, 5, 3]])
@pytest.mark.parametrize("shape", [TreeShape(4, 3, 14), TEMPLATE], ids=["dynamic", "template"])
def test_a_grown_tree_scores_as_whole_sequences_do(
    shape: TreeShape, mask: KeyMask, text_lengths: list[int]
) -> None:
    """Three rounds with rows that accept different numbers of drafts."""
    head, talk = random_head().requires_grad_(False), Conversation(text_lengths)
    drafts = talk.begin(head_drafts(head, talk, RopeOffset.CORRECT, mask))
    for number in range(3):
        rows = range(len(text_lengths))
        new = [[30 + row + number] * (1 + (row + number) % 2) for row in rows]
        talk.commit(new, number, drafts)
        for row, tree in enumerate(talk.draft(drafts, shape)):
            assert tree.num_nodes > 1
            for node in range(1, tree.num_nodes):
                *above, token = [tree.tokens[one] for one in path_to(tree, node)[1:]]
                odds = slow_log_probs(head, talk, row, above, mask)
                parent = tree.log_probs[tree.parents[node]]
                expected = parent + float(odds[token - ACTIONS.first])
                assert tree.log_probs[node] == pytest.approx(expected, abs=1e-3)


def test_rows_draft_alike_alone_and_beside_others_in_any_slots() -> None:
    """Keys lie in the answers' own slots, whichever rows draft in a round."""
    head, new = random_head().requires_grad_(False), [[30], [31, 32], [33]]
    trees = []
    for slots in ((0, 1, 2), (1, 4, 2)):
        talk = Conversation([2, 5, 3])
        for answer, slot in zip(talk.answers, slots, strict=True):
            answer.slot = slot
        drafts = talk.begin(head_drafts(head, talk))
        talk.commit(new, 0, drafts)
        trees.append(talk.draft(drafts, TreeShape(3, 2, 9)))
    alone = []
    for row, length in enumerate((2, 5, 3)):
        talk = Conversation([2, 5, 3])
        drafts = talk.begin(head_drafts(head, talk))
        talk.commit(new, 0, drafts)
        talk.answers = [talk.answers[row]]
        alone += talk.draft(drafts, TreeShape(3, 2, 9))
        assert talk.prompts[row].length == length + 4
    for one, other, single in zip(*trees, alone, strict=True):
        assert one.tokens == other.tokens == single.tokens
        assert one.parents == other.parents == single.parents


def test_the_published_rope_offset_differs_only_below_the_first_level() -> None:
    talk = Conversation([4])
    head = random_head().requires_grad_(False)
    sources = [talk.begin(head_drafts(head, talk, offset)) for offset in RopeOffset]
    notes = []
    for source in sources:  # each has notes of its own
        talk.begin(source)
        talk.answers[0].tokens = []
        talk.hidden = list(talk.seen)
        talk.commit([[30]], 0, source)
        notes.append(dict(scored_paths(talk.draft(source, TreeShape(3, 3, 21))[0])))
    right, published = notes
    for path, score in right.items():
        if len(path) <= 2:  # level 2 is predicted at a wrong position, from level-1 nodes
            assert (len(path) == 1) == (abs(published.get(path, 9.9) - score) < 1e-5)


def scored_paths(tree: DraftTree) -> list[tuple[tuple[int, ...], float]]:
    return [
        (tuple(tree.tokens[one] for one in path_to(tree, node)[1:]), tree.log_probs[node])
        for node in range(1, tree.num_nodes)
    ]


def test_trees_stay_within_what_is_missing_unless_their_shape_is_fixed() -> None:
    talk = Conversation([4])
    drafts = talk.begin(head_drafts(random_head().requires_grad_(False), talk))
    talk.commit([[30, 31, 32, 33]], 0, drafts)  # three are missing, two are drafted
    (tree,) = talk.draft(drafts, TreeShape(5, 2, 49))
    assert max(tree.depths()) == 2
    talk = Conversation([4])
    talk.begin(drafts)
    talk.commit([[30, 31, 32, 33]], 0, drafts)
    (fixed,) = talk.draft(drafts, TreeShape(5, 2, 49, is_full_depth=True))
    assert max(fixed.depths()) == 5


def test_gradients_reach_every_weight_through_the_teacher_forced_pass() -> None:
    head = random_head()
    embeds, hidden = torch.randn(2, 6, WIDTH), torch.randn(2, 6, WIDTH)
    mask = key_mask(KeyMask.CAUSAL, torch.tensor([4, 3]), 6)
    head(embeds, hidden, mask).square().sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().sum()) > 0, name


# Files.


@pytest.mark.parametrize("layout", list(HeadLayout))
@pytest.mark.parametrize("has_qkv_bias", [False, True])
def test_a_saved_head_is_read_back_the_same(
    tmp_path: Path, layout: HeadLayout, has_qkv_bias: bool
) -> None:
    head = random_head(0, replace(SIZES, rope_theta=5000.0, has_qkv_bias=has_qkv_bias))
    save_head(head, tmp_path / "head", layout)
    loaded = load_head(tmp_path / "head", WIDTH, torch.zeros(1))
    assert loaded.sizes == head.sizes
    for (name, given), (_, found) in zip(named_weights(head), named_weights(loaded), strict=True):
        exact = given if layout is HeadLayout.SAFETENSORS else given.half().float()
        assert torch.equal(exact, found), name


def test_published_files_may_hold_embedding_and_frequencies(
    tmp_path: Path,
) -> None:
    head = random_head()
    save_head(head, tmp_path, HeadLayout.PUBLISHED)
    path = tmp_path / "pytorch_model.bin"
    tensors = torch.load(path, weights_only=True)
    tensors["embed_tokens.weight"] = torch.zeros(99, WIDTH)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    torch.save(tensors, path)
    assert load_head(tmp_path, WIDTH, torch.zeros(1)).sizes == head.sizes


class Payload:
    """What a weights file must never be allowed to run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("pwned",))


def break_no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def break_bad_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def break_rope_scaling(directory: Path) -> None:
    edit_config(directory, "rope_scaling", {"type": "linear", "factor": 2})


def break_heads(directory: Path) -> None:
    edit_config(directory, "num_attention_heads", 5)


def break_no_weights(directory: Path) -> None:
    (directory / "pytorch_model.bin").unlink()


def break_truncated(directory: Path) -> None:
    path = directory / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:2000])


def break_code(directory: Path) -> None:
    torch.save({"fc.weight": Payload()}, directory / "pytorch_model.bin")


def break_missing_tensor(directory: Path) -> None:
    edit_tensors(directory, {"layers.0.mlp.down_proj.weight": None})


def break_unknown_tensor(directory: Path) -> None:
    edit_tensors(directory, {"motion_embeds.weight": torch.zeros(6, WIDTH)})


def break_shape(directory: Path) -> None:
    edit_tensors(directory, {"fc.bias": torch.zeros(3)})


def edit_config(directory: Path, key: str, value: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def edit_tensors(directory: Path, changes: dict[str, Tensor | None]) -> None:
    path = directory / "pytorch_model.bin"
    tensors = {**torch.load(path, weights_only=True), **changes}
    torch.save({name: one for name, one in tensors.items() if one is not None}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_no_config, "config.json is missing"),
        (break_bad_config, "is not JSON"),
        (break_rope_scaling, "rope_scaling"),
        (break_heads, "num_attention_heads 5 does not divide"),
        (break_no_weights, "holds neither"),
        (break_truncated, "cannot be read as weights"),
        (break_code, "cannot be read as weights"),
        (break_missing_tensor, "missing: layers.0.mlp.down_proj.weight"),
        (break_unknown_tensor, "unexpected: motion_embeds.weight"),
        (break_shape, "fc.bias 3 instead of 32"),
    ],
)
def test_a_broken_head_is_refused_by_name(
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_head(random_head(), tmp_path, HeadLayout.PUBLISHED)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_head(tmp_path, WIDTH, torch.zeros(1))
    assert str(tmp_path) in str(raised.value)
    assert "pwned" not in capsys.readouterr().out


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    save_head(random_head(), tmp_path, HeadLayout.SAFETENSORS)
    with pytest.raises(CheckpointError, match="32 wide, but the target is 64"):
        load_head(tmp_path, 64, torch.zeros(1))
