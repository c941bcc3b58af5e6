"""What a frame brings along travels to the device without making the host wait."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deft_core.image_chain import ImageChain
from deft_policies.decoding.target import PassRow
from deft_policies.decoding.tree import DraftTree
from deft_policies.families.openvla import VlaTarget
from deft_policies.model.image import ImageProcessor
from tests.tiny_openvla import tiny_config, tiny_model

META = torch.device("meta")


class CopiesToDevice(TorchDispatchMode):
    """Whether each copy from the host to the device lets the host go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on: list[bool] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and args[0].device != found.device:
            self.go_on.append(bool(kwargs.get("non_blocking")))
        return found


def test_no_copy_between_a_frame_and_its_prefill_makes_the_host_wait() -> None:
    model = tiny_model().to(META)
    target, images = VlaTarget(model), ImageProcessor(tiny_config().image, ImageChain.NONE)
    frame = np.zeros((28, 28, 3), np.uint8)

    def see() -> None:
        (prompt,) = target.read(images.pixel_values([frame], META), [[1, 2, 3]])
        tree = DraftTree([prompt.last_token, 5, 6], [-1, 0, 1], ["", "memory", "memory"])
        row = PassRow(0, prompt.length - 1, tree, 0, prompt=prompt)
        target.forward(target.new_cache(), [row])

    with torch.no_grad():
        see()  # places tables that stay there
        with CopiesToDevice() as copies:
            see()
    assert len(copies.go_on) >= 3  # pixels, words, and numbers of the pass
    assert all(copies.go_on)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_memory_that_a_pass_frees_is_kept_for_the_next_one() -> None:
    """In a process of its own: the allocator of this one may have learnt it already."""
    script = """
import resource, sys, torch
from deft_policies.model.staging import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
late = 0
for size in (2**18, 2**19, 2**20):
    for count in (4, 8, 12):
        for _ in range(8):
            before = faults()
            held = [torch.ones(size) for _ in range(count)]
            del held
        late += faults() - before
print(late)
"""
    found = {}
    for word in ("keep", "give back"):
        ran = subprocess.run([sys.executable, "-c", script, word], capture_output=True, check=True)
        found[word] = int(ran.stdout)
    if found["give back"] < 1024:  # pages of one such tensor
        pytest.skip("this allocator keeps it anyway")
    assert found["keep"] < 16
