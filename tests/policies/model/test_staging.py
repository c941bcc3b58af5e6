"""What a frame brings along travels to the device without making the host wait."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deft_client.image_chain import ImageChain
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.batch import Batch, Form, Row
from deft_policies.decoding.knobs import find_method
from deft_policies.families.target import VlaTarget
from deft_policies.memory import SessionMemory
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
    batch, step = Batch(META, 1, 7, 7), ((1,) * 7,)
    method = find_method("lossless")
    row = Row(method, Form.action(ActionSpace.in_bins(7)), SessionMemory(own=step))
    row.limit = 7
    batch.fill([row], None, drafts=True, reads_past=True)  # stacks the action spaces, once
    frame = np.zeros((28, 28, 3), np.uint8)
    images.pixel_values([frame], META)  # places the table of normalised values, once
    with CopiesToDevice() as copies, torch.no_grad():
        target.read(images.pixel_values([frame], META), [[1, 2, 3]])
        batch.fill([row], None, drafts=True, reads_past=True)
    assert copies.go_on == [True] * 6
