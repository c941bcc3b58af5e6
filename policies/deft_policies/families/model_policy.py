"""What the policies of all families share: what they say of their model, keys, limits, errors."""

import platform
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from deft_core.image_chain import ImageChain
from deft_core.types import ServerInfo
from deft_policies.base import ActionLimits, Policy
from deft_policies.errors import DeviceError
from deft_policies.families.model import Model
from deft_policies.families.options import ModelOptions
from deft_policies.model.statistics import find_statistics_key


class ModelPolicy(Policy, ABC):
    """Answers observations with one network."""

    def __init__(self, models: Sequence[Model], options: ModelOptions) -> None:
        """`models` are all ways of asking the network, the first where no reasoning is asked for.

        Options of the model itself have been applied; they are only reported here.
        """
        self.models, self.model, self.options = models, models[0], options
        self._keys = tuple(models[0].statistics)
        key = options.statistics_key  # without one, and of several, a request has to name it
        is_known = key is not None or len(self._keys) == 1
        self._default_key = find_statistics_key(self._keys, key) if is_known else None
        self._versions = {"deft": _version_of("deft-vla"), "torch": torch.__version__}
        self._details = _describe(models[0], options)
        self.reason_for_dtype = ""  # in words, where the format was chosen
        self.digests: Mapping[str, str] = {}  # of the files that its weights were read from

    def _info(self, decoding: str, methods: tuple[str, ...]) -> ServerInfo:
        """What the server advertises of any model, with its default method and all of them."""
        model, options = self.model, self.options
        config = model.network.config
        details = dict(self._details)
        for way in self.models:
            details |= way.details
        details |= self.digests
        if self.reason_for_dtype:
            details["dtype chosen"] = self.reason_for_dtype
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
            decoding=decoding,
            decoding_methods=methods,
            instructions=config.training.instructions,
            assets=config.training.assets,
            held_out=config.training.held_out,
            num_pictures=model.num_pictures,
            cameras=("image", *model.camera_names),
            state_dim=model.state_dim,
            versions=self._versions,
            details=details,
        )

    @property
    def _any_key(self) -> str:
        return self._default_key or self._keys[0]

    def find_key(self, key: str | None) -> str:
        """The statistics key meant by a request that names this one, or none."""
        return find_statistics_key(self._keys, key if key is not None else self._default_key)

    def action_limits(self, statistics_key: str | None) -> ActionLimits:
        """The range of actions under a statistics key; None is the default."""
        return self.model.limits(self.find_key(statistics_key))

    def _tested_limits(self) -> ActionLimits | None:
        """The range that answers to known frames must keep to; None where they may exceed it."""
        limits = self.action_limits(self._any_key)
        return None if limits.may_exceed else limits


@contextmanager
def computing(num_frames: int) -> Iterator[None]:
    """Inference; a device that is too small raises `DeviceError`."""
    try:
        with torch.inference_mode():
            yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"no memory for a batch of {num_frames}: {error}") from error


def _describe(model: Model, options: ModelOptions) -> dict[str, str]:
    """What was loaded, for people."""
    device, weight = model.device, model.network.decoder.embedding.weight
    about = f"cpu ({torch.get_num_threads()} threads)"
    if device.type == "cuda":
        about = f"{device} ({torch.cuda.get_device_name(device)})"
    return {
        "weights": options.name or options.checkpoint or f"random:{options.random_weights}",
        "device": about,
        "processor": _processor(),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "quantization": model.network.describe_quantization(),
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
