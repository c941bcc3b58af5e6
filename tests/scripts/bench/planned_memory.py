"""Runs questions on tensors that hold nothing, and adds up what they would take of a device."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deft_policies.model.draft_heads import EagleHead, head_sizes
from deft_policies.model.graphs import CapturedStep, Step, Tensors
from deft_policies.model.vla import OpenVLAModel, VlaNetwork
from scripts.bench.gpu.setting import Setting, Size

META = torch.device("meta")
_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
# Bytes that are made when something is first run: angles of positions, and paths of a tree.
_TABLES = (1 << 20) + (1 << 14)
_BLOCK = 512  # bytes, in whose multiples memory is handed out


class Memory(TorchDispatchMode):
    """Bytes of all tensors on the meta device that somebody holds: now, and at the most.

    Whatever the host reads of them is 0, and no two of them are equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = weakref.WeakSet[Any]()

    def reset(self) -> None:
        """Forget the most."""
        self.most = self.now

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].device == META:
            if name in _READS:
                return 0
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.device)]
            if name in ("to", "_to_copy") and given and given[0] != META:
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        found = func(*args, **kwargs)
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.device == META:
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._known.add(storage)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size


class _ReadsLists(TorchFunctionMode):
    """The same of lists of numbers, which no operation is asked for."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.tolist and args[0].device == META:
            return torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
        return func(*args, **(kwargs or {}))


def hold(step: Step, inputs: Tensors) -> CapturedStep:
    """Captures by running once; nothing is computed again."""
    return CapturedStep(inputs, tuple(one.clone() for one in step(*inputs)), lambda: None)


class PlannedSetting(Setting):
    """A model that holds nothing."""

    def __init__(self, size: Size, folder: Path) -> None:
        super().__init__(size, META, folder, hold)
        self.dtype = torch.bfloat16

    def make_network(self) -> OpenVLAModel:
        return OpenVLAModel.empty(self.config, META, self.dtype).requires_grad_(False)


def random_head(model: VlaNetwork) -> EagleHead:
    """As that of scripted drafts, which draws numbers."""
    llm = model.config.llm
    with META:
        head = EagleHead(head_sizes(llm.width, llm.mlp_width, llm.num_heads, llm.num_kv_heads))
    return head.to(model.decoder.embedding.weight.dtype).requires_grad_(False)


def most_bytes(setting: Setting, ask: Callable[[Setting], Iterable[object]]) -> int:
    """What a question takes at the most, the model's weights among it."""
    with Memory() as memory, _ReadsLists():
        assert setting.network is not None
        setting.clear()
        before = memory.now
        memory.reset()
        for _ in ask(setting):
            pass
        setting.clear()
        held = memory.now - before
        assert held <= _TABLES, f"{held} bytes are still held"
        return memory.most
