"""Guesses from what was answered before: in this session, or with similar frames. No model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from deft_policies.checkpoint.tensor_file import require_finite, write_tensors
from deft_policies.decoding.drafts.sources import Guesses
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.plan import DraftKind
from deft_policies.decoding.records import BatchProgress
from deft_policies.decoding.target import Prompts
from deft_policies.decoding.tree import TokenRange
from deft_policies.errors import CheckpointError


@dataclass(frozen=True)
class PreviousAction:
    """The action will be the target's own last one."""

    kind = DraftKind.PREVIOUS
    may_be_recorded = True
    steps_needed = 1
    guesses_once = True

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """True after the first action of any session."""
        return any(history.own for history in histories)

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: BatchProgress) -> Guesses:
        """Repeat the newest step."""
        tokens = history.own[:, -1:]
        known = (history.num_known > 0)[:, None, None]
        return Guesses(tokens, known.expand_as(tokens))


@dataclass(frozen=True)
class Extrapolation:
    """The action will continue the straight line through the last ones (least squares, in bins).

    With n = 2 steps this is a + (a - b). Guesses stay inside the action vocabulary; a session with
    fewer than n steps gets none.
    """

    action_tokens: TokenRange
    num_steps: int = 2
    kind = DraftKind.EXTRAPOLATION
    may_be_recorded = True
    guesses_once = True

    @property
    def steps_needed(self) -> int:
        """As many as the line goes through."""
        return self.num_steps

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """True once any session has a line."""
        return any(len(history.own) >= self.num_steps for history in histories)

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: BatchProgress) -> Guesses:
        """Evaluate the line one step ahead."""
        steps = history.own[:, -self.num_steps :]
        weights = line_weights(self.num_steps, steps.device)
        ahead = (steps.float() * weights[:, None]).sum(dim=1, keepdim=True).round().long()
        tokens = ahead.clamp(self.action_tokens.first, self.action_tokens.last)
        # A position that held something else than a bin is not on any line: repeat it.
        is_bin = self.action_tokens.contains(steps).all(dim=1, keepdim=True)
        tokens = torch.where(is_bin, tokens, steps[:, -1:])
        known = (history.num_known >= self.num_steps)[:, None, None]
        return Guesses(tokens, known.expand_as(tokens))


def line_weights(num_steps: int, device: torch.device) -> Tensor:
    """Weights [step] whose sum with the last values is their least-squares line one step ahead."""
    times = torch.arange(num_steps, dtype=torch.float32, device=device)
    centred = times - times.mean()
    reach = num_steps - times.mean()
    return 1 / num_steps + reach * centred / centred.square().sum()


@dataclass(frozen=True)
class NgramLookup:
    """The action will go on as it did when the same tokens came before (prompt-lookup decoding).

    The session's own answers are one long sequence. The last `longest` tokens (fewer if those never
    occurred) are looked up at the same phase of an earlier action, newest first, and what followed
    them there is the guess. Tokens of different positions are never mixed.
    """

    longest: int = 3
    steps_kept: int = 16
    kind = DraftKind.NGRAM
    may_be_recorded = True
    guesses_once = False

    @property
    def steps_needed(self) -> int:
        """How far it looks back."""
        return self.steps_kept

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """True once any session has an action to look at."""
        return any(history.own for history in histories)

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: BatchProgress) -> Guesses:
        """Compare the tail of the sequence with every earlier action at the same phase."""
        num_rows, num_steps, length = history.own.shape
        stream = torch.cat((history.own.flatten(1), progress.tokens[:, :length]), dim=1)
        end = num_steps * length + progress.num_committed  # where the next token goes, [row]
        steps = torch.arange(num_steps, device=end.device)
        back = torch.arange(1, self.longest + 1, device=end.device)
        # ends[row, step]: the same phase in an earlier action; places[row, step, n]: n before it.
        ends = steps * length + progress.num_committed[:, None]
        places = ends[:, :, None] - back
        tail = stream.gather(1, (end[:, None] - back).clamp(min=0))
        flat = places.clamp(min=0).flatten(1)
        earlier = stream.gather(1, flat).view(num_rows, num_steps, self.longest)
        first_known = (num_steps - history.num_known)[:, None] * length
        same = (earlier == tail[:, None]) & (places >= first_known[:, :, None])
        matched = same.long().cummin(dim=2).values.sum(dim=2)  # tokens matched, [row, step]
        is_step = ends >= first_known
        # The longest match wins, then the newest.
        score = (matched * num_steps + steps + 1) * (is_step & (matched > 0))
        best = score.argmax(dim=1)
        tokens = history.own[torch.arange(num_rows, device=end.device), best][:, None]
        known = (score.amax(dim=1) > 0)[:, None, None]
        return Guesses(tokens, known.expand_as(tokens))


@dataclass(frozen=True)
class Recycled:
    """After a mismatch the target has already said what it thinks comes next (Jacobi iteration).

    Its predictions along the rejected rest of the best chain were made after one wrong token; they
    are often right all the same, and they cost nothing.
    """

    kind = DraftKind.RECYCLED
    may_be_recorded = True
    steps_needed = 0
    guesses_once = False

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """True: it is only asked between passes, when the target has spoken."""
        return True

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: BatchProgress) -> Guesses:
        """Read the predictions below the path along its deepest real continuation."""
        if progress.last is None:
            raise ValueError("nothing to recycle before the prefill")
        last, length = progress.last, progress.length
        tree, rows = last.tree, torch.arange(progress.roots.shape[0], device=progress.roots.device)
        ancestors = tree.ancestor_mask()
        end = last.accepted.path.gather(1, last.accepted.num_accepted[:, None]).squeeze(1)
        below = ancestors[rows, :, end] & tree.is_real  # nodes at or below the path's end
        leaf = tree.depths().masked_fill(~below, -1).argmax(dim=1)
        on_path = ancestors[rows, leaf] & below  # from the path's end to the leaf
        # A node that stands at position p predicts position p + 1.
        places = last.num_committed[:, None] + tree.depths()
        places = places.masked_fill(~on_path, length).clamp(max=length)
        tokens = torch.zeros_like(progress.tokens).scatter(1, places, last.predictions)
        known = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, places, on_path)
        # The bonus itself is committed; every position behind it with a prediction is a guess.
        return Guesses(tokens[:, None, :length], known[:, None, :length])


FORMAT = "deft-retrieval-1"


@dataclass(frozen=True, eq=False)
class RetrievalIndex:
    """Stored keys and actions. `fingerprint` names the target that made the keys."""

    keys: Tensor  # [entry, feature], unit length, float16 or float32
    actions: Tensor  # [entry, position] int64
    fingerprint: str

    def __post_init__(self) -> None:
        if self.keys.dim() != 2 or self.actions.dim() != 2:
            raise ValueError(
                "keys must be [entry, feature] and actions [entry, position], got "
                f"{list(self.keys.shape)} and {list(self.actions.shape)}"
            )
        if len(self.keys) != len(self.actions) or len(self.keys) == 0:
            raise ValueError(
                f"an index needs as many actions as keys and at least one, got {len(self.keys)} "
                f"keys and {len(self.actions)} actions"
            )

    def nearest(self, keys: Tensor, count: int) -> Tensor:
        """Actions of the `count` most similar entries, nearest first, [row, count, position]."""
        similar = keys.to(self.keys.dtype) @ self.keys.T
        best = similar.topk(min(count, len(self.keys)), dim=1).indices
        return self.actions[best]

    def to(self, device: torch.device) -> "RetrievalIndex":
        """The same index on another device."""
        return RetrievalIndex(self.keys.to(device), self.actions.to(device), self.fingerprint)


def frame_keys(prompts: Prompts) -> Tensor:
    """Keys of a batch of frames, [row, feature], float32.

    What the camera shows joined with what was asked, each at unit length: the same scene under two
    instructions calls for two actions.
    """
    if prompts.features is None:
        raise ValueError("retrieval needs the pooled visual features of the frames")
    positions = torch.arange(prompts.embeds.shape[1], device=prompts.embeds.device)
    is_patch = (positions >= prompts.patches.start) & (positions < prompts.patches.stop)
    is_text = (positions < prompts.lengths[:, None]) & ~is_patch
    words = (prompts.embeds.float() * is_text[:, :, None]).sum(dim=1) / is_text.sum(1, True)
    seen = functional.normalize(prompts.features.float(), dim=1)
    return functional.normalize(torch.cat((seen, functional.normalize(words, dim=1)), dim=1), dim=1)


def build_index(entries: Iterable[tuple[Tensor, Tensor]], fingerprint: str) -> RetrievalIndex:
    """Collect (keys [frame, feature], actions [frame, position]) of episodes into an index.

    Actions should be the target's own answers to those frames (recordings have them), or a
    demonstrator's. Kept in float16: an entry of a 7B model's frame is 12 kB.
    """
    keys, actions = [], []
    for key, action in entries:
        if len(key) != len(action):
            raise ValueError(f"{len(key)} frames come with {len(action)} actions")
        keys.append(functional.normalize(key.float(), dim=1).half().cpu())
        actions.append(action.long().cpu())
    if not keys:
        raise ValueError("no frames were given, so there is nothing to index")
    return RetrievalIndex(torch.cat(keys), torch.cat(actions), fingerprint)


def save_index(index: RetrievalIndex, path: Path) -> None:
    """Write one safetensors file, whole or not at all."""
    tensors = {"keys": index.keys.half(), "actions": index.actions.int()}
    partial = path.with_name(path.name + ".partial")
    write_tensors(tensors, partial, metadata={"format": FORMAT, "fingerprint": index.fingerprint})
    partial.replace(path)


def load_index(path: Path, fingerprint: str, device: torch.device) -> RetrievalIndex:
    """Read an index that was made with the target of this fingerprint."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
            if metadata.get("format") != FORMAT or not {"keys", "actions"} <= names:
                raise CheckpointError(f"{path} is not a retrieval index of format {FORMAT!r}")
            keys, actions = file.get_tensor("keys"), file.get_tensor("actions")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a retrieval index: {error}") from error
    require_finite("keys", keys, path)
    if metadata.get("fingerprint") != fingerprint:
        raise CheckpointError(
            f"{path} was built with model {metadata.get('fingerprint')!r}, but this one is "
            f"{fingerprint!r}: its features mean something else here; build the index again"
        )
    # Half-precision products are slow on a CPU; there the index is held in float32.
    wide = keys.to(device, torch.float16 if device.type == "cuda" else torch.float32)
    return RetrievalIndex(wide, actions.to(device, torch.int64), fingerprint)


@dataclass(frozen=True)
class Retrieval:
    """The action will be one of those stored with the `count` most similar frames."""

    index: RetrievalIndex
    count: int = 1
    kind = DraftKind.RETRIEVAL
    may_be_recorded = True
    steps_needed = 0
    guesses_once = True

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """True where frames have features at all."""
        return prompts.features is not None

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: BatchProgress) -> Guesses:
        """Look the frames up."""
        tokens = self.index.nearest(frame_keys(prompts), self.count)
        return Guesses(tokens, torch.ones_like(tokens, dtype=torch.bool))
