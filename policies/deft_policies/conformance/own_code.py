"""Answers frames with a model's own code, for `deft doctor --against`.

The interpreter of the user's environment runs this file alone. That environment has the model's
code and no Deft, so nothing of Deft is imported here, and Python 3.9 must be able to read it.

Standard input and output carry one JSON object per line. The first line says what to load and is
answered by versions; every later line is a frame and is answered by an action. Pictures and logits
are base64 of raw bytes. Whatever the model's code prints goes to standard error.
"""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from typing import Any

_PACKAGES = (
    "torch", "transformers", "tokenizers", "timm", "lerobot", "numpy", "pillow", "qwen-vl-utils",
)  # fmt: skip
_SMALL_BYTES = 1 << 24  # files of settings; weights are larger
# What has to be importable, by family.
_NEEDS = {
    "openvla": ("torch", "transformers", "timm"),
    "ecot": ("torch", "transformers", "timm"),
    "oft": ("torch", "transformers", "timm", "experiments", "prismatic"),
    "vla0": ("torch", "transformers", "rv_train", "roboverse"),
    "nora": ("torch", "transformers", "inference", "qwen_vl_utils"),
    "qwenfast": ("torch", "transformers", "starVLA", "deployment"),
    "pi0fast": ("torch", "transformers", "lerobot"),
}


class HeadWatch:
    """Counts the passes of a network by the calls of its output head; keeps the first's logits."""

    def __init__(self, head: Any) -> None:
        self.restart()
        head.register_forward_hook(self._see)

    def restart(self) -> None:
        """Begin a new answer."""
        self.passes = 0
        self.logits: Any = None  # [token], of the last position of the first pass

    def _see(self, module: Any, inputs: Any, output: Any) -> None:
        self.passes += 1
        if self.logits is None:
            self.logits = output[0, -1].detach().float().cpu().numpy()


class GenerateWatch:
    """Keeps the tokens that `model.generate` wrote behind its prompt."""

    def __init__(self, model: Any) -> None:
        self.tokens: list[int] = []
        self._generate = model.generate
        model.generate = self._watched

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        prompt = args[0] if args else kwargs["input_ids"]
        output = self._generate(*args, **kwargs)
        self.tokens = [int(token) for token in output[0, prompt.shape[1] :]]
        return output


def _dtype(setup: dict[str, Any]) -> Any:
    import torch

    return getattr(torch, setup["dtype"])


def _picture(array: Any) -> Any:
    from PIL import Image

    return Image.fromarray(array)


class OpenVla:
    """`predict_action` of the checkpoint's remote code, or of an installed `prismatic`."""

    def __init__(self, setup: dict[str, Any]) -> None:
        transformers: Any = importlib.import_module("transformers")
        path = setup["checkpoint"]
        if not self._has_remote_code(path):
            self._register(transformers)
        auto = getattr(transformers, "AutoModelForVision2Seq", None)
        auto = auto or transformers.AutoModelForImageTextToText
        self.processor = transformers.AutoProcessor.from_pretrained(path, trust_remote_code=True)
        model = auto.from_pretrained(
            path,
            torch_dtype=_dtype(setup),
            attn_implementation="sdpa",
            low_cpu_mem_usage=importlib.util.find_spec("accelerate") is not None,
            trust_remote_code=True,
        )
        self.model = model.to(setup["device"]).eval()
        statistics = os.path.join(path, "dataset_statistics.json")
        if os.path.isfile(statistics):  # as OpenVLA's own scripts do
            with open(statistics, encoding="utf-8") as file:
                self.model.norm_stats = json.load(file)
        self.setup = setup
        self.head = self.model.get_output_embeddings()
        self.written = GenerateWatch(self.model)

    @staticmethod
    def _has_remote_code(path: str) -> bool:
        """Whether a folder names its code; a hub id is taken to."""
        config = os.path.join(path, "config.json")
        if not os.path.isfile(config):
            return True
        with open(config, encoding="utf-8") as file:
            return "auto_map" in json.load(file)

    @staticmethod
    def _register(transformers: Any) -> None:
        """As OpenVLA's own scripts do for a folder without code."""
        own = "prismatic.extern.hf."
        config = importlib.import_module(own + "configuration_prismatic").OpenVLAConfig
        processing = importlib.import_module(own + "processing_prismatic")
        modeling = importlib.import_module(own + "modeling_prismatic")
        transformers.AutoConfig.register("openvla", config)
        transformers.AutoImageProcessor.register(config, processing.PrismaticImageProcessor)
        transformers.AutoProcessor.register(config, processing.PrismaticProcessor)
        transformers.AutoModelForVision2Seq.register(config, modeling.OpenVLAForActionPrediction)

    def prompt(self, instruction: str) -> str:
        """As its eval scripts write it."""
        question = f"What action should the robot take to {instruction.lower()}?"
        if "openvla-v01" in self.setup["checkpoint"]:
            return f"{_VICUNA} USER: {question} ASSISTANT:"
        return f"In: {question}\nOut:"

    def inputs(self, frame: dict[str, Any]) -> Any:
        """Ids and pixels, where the model is."""
        picture = _picture(frame["pictures"][0])
        batch = self.processor(self.prompt(frame["instruction"]), picture)
        return batch.to(self.setup["device"], dtype=_dtype(self.setup))

    def answer(self, frame: dict[str, Any]) -> tuple[Any, Any]:
        """Tokens and actions [step, action_dim]."""
        key = self.setup["statistics_key"]
        action = self.model.predict_action(**self.inputs(frame), unnorm_key=key, do_sample=False)
        return self.written.tokens, [action]


class Ecot(OpenVla):
    """The same with ECoT's prompt, up to the end of the text.

    Copies of ECoT's code differ in whether the end counts as the action's last token. So the seven
    tokens before the end are read here, by the model's own bins and statistics.
    """

    def prompt(self, instruction: str) -> str:
        """As ECoT writes it for this language model."""
        question = f"What action should the robot take to {instruction.lower()}?"
        if self.setup["prompt"] == "in-out":
            return f"In: {question}\nOut: TASK:"
        return f"{_VICUNA} USER: {question} ASSISTANT: TASK:"

    def answer(self, frame: dict[str, Any]) -> tuple[Any, Any]:
        """Tokens, the end included, and the action where there is one."""
        import numpy as np

        key, model = self.setup["statistics_key"], self.model
        limit = self.setup["max_tokens"]
        model.generate(**self.inputs(frame), do_sample=False, max_new_tokens=limit)
        tokens = self.written.tokens
        if tokens[-1:] != [self.model.generation_config.eos_token_id]:
            return tokens, None
        statistics = model.get_action_stats(key)
        last = np.array(tokens[:-1][-model.get_action_dim(key) :])
        bins = np.clip(model.vocab_size - last - 1, 0, len(model.bin_centers) - 1)
        high, low = np.array(statistics["q99"]), np.array(statistics["q01"])
        values = model.bin_centers[bins]
        mask = np.array(statistics.get("mask", [True] * len(low)))
        return tokens, [np.where(mask, 0.5 * (values + 1) * (high - low) + low, values)]


class Oft:
    """`get_vla_action` of OpenVLA-OFT's `experiments.robot.openvla_utils`; bfloat16 alone."""

    head: Any = None

    def __init__(self, setup: dict[str, Any]) -> None:
        from types import SimpleNamespace

        if setup["dtype"] != "bfloat16":
            raise ValueError("OpenVLA-OFT's code computes in bfloat16 alone: give --dtype bfloat16")
        # It finds a platform's sizes by a word of the command line.
        sys.argv.append({14: "aloha"}.get(setup["action_dim"], "libero"))
        if (setup["action_dim"], setup["num_steps"]) == (7, 5):
            sys.argv[-1] = "bridge"
        own = self.own = importlib.import_module("experiments.robot.openvla_utils")
        folder = _writable_copy(setup["checkpoint"])
        names = os.listdir(folder)
        has_head = any("action_head" in name for name in names)
        self.config = SimpleNamespace(
            model_family="openvla",
            pretrained_checkpoint=folder,
            use_l1_regression=has_head,
            use_diffusion=False,
            num_diffusion_steps_train=50,
            num_diffusion_steps_inference=50,
            use_film=any("vision_backbone" in name for name in names),
            num_images_in_input=setup["num_pictures"],
            use_proprio=has_head and any("proprio_projector" in name for name in names),
            center_crop=setup["crops"],
            lora_rank=32,
            unnorm_key=setup["statistics_key"],
            load_in_8bit=False,
            load_in_4bit=False,
        )
        self.model = own.get_vla(self.config)
        width = self.model.llm_dim
        self.action_head = own.get_action_head(self.config, width) if has_head else None
        self.projector = None
        if self.config.use_proprio:
            self.projector = own.get_proprio_projector(self.config, width, setup["state_dim"])
        self.processor = own.get_processor(self.config)

    def answer(self, frame: dict[str, Any]) -> tuple[Any, Any]:
        """Actions alone: it answers in one pass, and keeps its tokens to itself."""
        seen = {"full_image": frame["pictures"][0]}
        for number, picture in enumerate(frame["pictures"][1:]):
            seen[f"wrist_{number}"] = picture
        if frame["state"] is not None:
            seen["state"] = frame["state"]
        actions = self.own.get_vla_action(
            self.config,
            self.model,
            self.processor,
            seen,
            frame["instruction"],
            action_head=self.action_head,
            proprio_projector=self.projector,
            use_film=self.config.use_film,
        )
        return None, actions


class Vla0:
    """`QwenActor` of `rv_train`, behind RoboVerse's own picture chain."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import pickle

        folder = setup["checkpoint"].rstrip("/")
        if not os.path.exists(os.path.join(folder, "config.yaml")):
            folder = os.path.dirname(folder)
        config = importlib.import_module("rv_train.configs").get_cfg_defaults()
        config.merge_from_file(os.path.join(folder, "config.yaml"))
        chain = config.DATALOADER.ROBOVERSE
        main = importlib.import_module("roboverse.main")
        self.chain_config = main.get_cfg(chain.cfg_path, chain.cfg_opts)
        self.chain = importlib.import_module("roboverse.unifiers.image_unifier")
        if config.MODEL.QWEN.use_lora:
            raise ValueError("merge the adapter into its base first: this reads whole models")
        path = setup["checkpoint"].rstrip("/")
        if not os.path.exists(os.path.join(path, "config.json")):
            path = os.path.join(folder, "model_last")
        settings = {**config.MODEL.QWEN, "qwen_model_id": path}
        actor = importlib.import_module("rv_train.models.qwen.model").QwenActor(**settings)
        with open(os.path.join(folder, "dataset_stats.pkl"), "rb") as file:
            actor.set_dataset_stats(pickle.load(file))
        actor.eval()
        actor.to(setup["device"])
        actor.model.to(_dtype(setup))
        self.actor, self.device = actor, setup["device"]
        self.head = actor.model.get_output_embeddings()
        self.written = GenerateWatch(actor.model)

    def answer(self, frame: dict[str, Any]) -> tuple[Any, Any]:
        """Tokens, the end included, and what the text is read as, whatever it says."""
        import numpy as np
        import torch

        # Axes: history, camera, row, column, channel.
        rgb = np.stack(frame["pictures"])[None].astype(np.float32)
        cameras = list(self.chain_config.IMAGE.cam_list)
        seen = self.chain.image_unifier_transform(
            cfg=self.chain_config, sample={"rgb": rgb}, sample_cam_list=cameras, eval=True
        )
        with torch.no_grad():
            output = self.actor(
                rgb=torch.as_tensor(seen["rgb"], dtype=torch.float32, device=self.device)[None],
                instr=[frame["instruction"]],
                get_loss=False,
                get_action=True,
                generate_temperature=0,
            )
        return self.written.tokens, output["out_ori_act"][0].double().cpu().numpy()


class NoraModel:
    """`Nora.inference` of `inference/nora.py`."""

    def __init__(self, setup: dict[str, Any]) -> None:
        own = importlib.import_module("inference.nora")
        nora = own.Nora(setup["checkpoint"], device=setup["device"], torch_dtype=_dtype(setup))
        nora.fast_tokenizer.time_horizon = setup["num_steps"]
        nora.fast_tokenizer.action_dim = setup["action_dim"]
        self.nora, self.key = nora, setup["statistics_key"]
        self.head = nora.model.get_output_embeddings()
        self.written = GenerateWatch(nora.model)

    def answer(self, frame: dict[str, Any]) -> tuple[Any, Any]:
        """Tokens, the end included, and what the codes are read as, whatever they say."""
        (picture,) = frame["pictures"]
        actions = self.nora.inference(picture, frame["instruction"], unnorm_key=self.key)
        return self.written.tokens, actions


class QwenFast:
    """`PolicyServerWrapper` of starVLA's `deployment.model_server`."""

    def __init__(self, setup: dict[str, Any]) -> None:
        own = importlib.import_module("deployment.model_server.policy_wrapper")
        self.server = own.PolicyServerWrapper(
            _weights_of(setup["checkpoint"]),
            device=setup["device"],
            use_bf16=setup["dtype"] == "bfloat16",
        )
        network = self.server._framework.qwen_vl_interface.model.to(_dtype(setup))
        self.head, self.written = network.get_output_embeddings(), GenerateWatch(network)
        self.key = setup["statistics_key"]

    def answer(self, frame: dict[str, Any]) -> tuple[Any, Any]:
        """Tokens, the end included, and what the codes are read as, whatever they say."""
        # Its clients bring pictures to this size, by PIL's bilinear filter.
        images = [_picture(picture).resize((224, 224), 2) for picture in frame["pictures"]]
        example = {"image": images, "lang": frame["instruction"]}
        output = self.server.predict_action([example], unnorm_key=self.key)
        return self.written.tokens, output["actions"][0]


class Pi0Fast:
    """LeRobot's policy between its own two pipelines."""

    def __init__(self, setup: dict[str, Any]) -> None:
        own = importlib.import_module("lerobot.policies.pi0_fast.modeling_pi0_fast")
        configs = importlib.import_module("lerobot.configs.policies")
        factory = importlib.import_module("lerobot.policies.factory")
        path = setup["checkpoint"]
        config = configs.PreTrainedConfig.from_pretrained(path)
        config.device, config.dtype = setup["device"], setup["dtype"]
        config.n_action_steps = config.chunk_size  # else it reads the codes as a shorter chunk
        policy = own.PI0FastPolicy.from_pretrained(path, config=config).to(setup["device"]).eval()
        device = {"device_processor": {"device": setup["device"]}}
        self.before, self.after = factory.make_pre_post_processors(
            policy_cfg=config, pretrained_path=path, preprocessor_overrides=device
        )
        self.policy = policy
        self.head = policy.model.paligemma_with_expert.paligemma.lm_head
        self._tokens: Any = None
        name = "sample_actions_fast_kv_cache" if config.use_kv_cache else "sample_actions_fast"
        self._sample = getattr(policy.model, name)
        setattr(policy.model, name, self._sampled)
        self._end = policy.model._paligemma_tokenizer.convert_tokens_to_ids("|")

    def _sampled(self, *args: Any, **kwargs: Any) -> Any:
        self._tokens = self._sample(*args, **kwargs)
        return self._tokens

    def answer(self, frame: dict[str, Any]) -> tuple[Any, Any]:
        """Tokens up to the first end, and what the codes are read as, whatever they say."""
        import torch

        batch: dict[str, Any] = {
            f"observation.images.{name}": torch.from_numpy(picture).permute(2, 0, 1).float() / 255
            for name, picture in zip(frame["cameras"], frame["pictures"])  # noqa: B905
        }
        batch["observation.state"] = torch.from_numpy(frame["state"]).float()
        batch["task"] = frame["instruction"]
        with torch.inference_mode():
            actions = self.after(self.policy.predict_action_chunk(self.before(batch)))
        tokens = [int(token) for token in self._tokens[0]]
        if self._end in tokens:
            tokens = tokens[: tokens.index(self._end) + 1]
        return tokens, actions[0].double().cpu().numpy()


_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
_FAMILIES: dict[str, Any] = {
    "openvla": OpenVla,
    "ecot": Ecot,
    "oft": Oft,
    "vla0": Vla0,
    "nora": NoraModel,
    "qwenfast": QwenFast,
    "pi0fast": Pi0Fast,
}


def _weights_of(folder: str) -> str:
    """The newest weights of a run's folder, or the file that is named."""
    if os.path.isfile(folder):
        return folder
    paths = [
        os.path.join(root, name)
        for root, _, names in os.walk(folder)
        for name in names
        if os.path.basename(root) in ("checkpoints", "final_model")
        and name.endswith((".pt", ".safetensors"))
    ]
    if not paths:
        raise FileNotFoundError(f"{folder}: no checkpoints/*.pt or *.safetensors")
    return max(paths, key=os.path.getmtime)


def _writable_copy(folder: str) -> str:
    """A folder whose small files may be written to: OFT's code changes config.json in place."""
    copy = tempfile.mkdtemp(prefix="deft-own-code-")
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            continue
        if os.path.getsize(path) <= _SMALL_BYTES and not name.endswith((".pt", ".safetensors")):
            shutil.copy(path, copy)
        else:
            os.symlink(os.path.realpath(path), os.path.join(copy, name))
    return copy


def _array(shown: dict[str, Any]) -> Any:
    import numpy as np

    data = base64.b64decode(shown["data"])
    return np.frombuffer(data, shown["dtype"]).reshape(shown["shape"]).copy()


def _read_frame(line: dict[str, Any]) -> dict[str, Any]:
    state = None if line["state"] is None else _array(line["state"])
    return {**line, "pictures": [_array(picture) for picture in line["pictures"]], "state": state}


def _missing(family: str) -> list[str]:
    """Packages that the model's own code needs and this environment lacks."""
    return [name for name in _NEEDS[family] if importlib.util.find_spec(name) is None]


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _finish(device: str) -> None:
    """Wait for a GPU, so that times are of whole answers."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def main() -> None:
    """Load what the first line asks for, then answer frames until there are no more."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the model's code prints must not get among the answers
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]

    def say(value: dict[str, Any]) -> None:
        channel.write(json.dumps(value) + "\n")
        channel.flush()

    setup = json.loads(sys.stdin.readline())
    if setup["only_look"]:
        say({"versions": _versions(), "missing": _missing(setup["family"])})
        return
    if setup["threads"]:
        import torch

        torch.set_num_threads(setup["threads"])
    model = _FAMILIES[setup["family"]](setup)
    watch = None if model.head is None else HeadWatch(model.head)
    say({"versions": _versions()})
    for line in sys.stdin:
        frame = _read_frame(json.loads(line))
        if watch is not None:
            watch.restart()
        _finish(setup["device"])
        start = time.perf_counter()
        tokens, actions = model.answer(frame)
        _finish(setup["device"])
        ms = (time.perf_counter() - start) * 1e3
        answer: dict[str, Any] = {"tokens": tokens, "actions": None, "ms": ms}
        if actions is not None:
            answer["actions"] = [[float(value) for value in row] for row in actions]
        if watch is not None and watch.logits is not None:
            data = base64.b64encode(watch.logits.astype("<f4").tobytes())
            answer.update(passes=watch.passes, logits=data.decode("ascii"))
        say(answer)


if __name__ == "__main__":
    main()
