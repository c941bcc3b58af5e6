"""What asks a model's own code: its interface, by modules that stand in for it."""

import ast
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deft_policies.conformance import own_code

PICTURE = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
OTHER = PICTURE[::-1].copy()
TOKENS = [31, 7, 2]  # what every network here writes; 2 is the end


class Network(nn.Module):
    """Writes the same tokens whatever it is shown, a call of its head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(2, 40, bias=False)
        self.generation_config = SimpleNamespace(eos_token_id=2)
        self.asked: dict[str, Any] = {}

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def generate(self, input_ids: Tensor, **asked: Any) -> Tensor:
        self.asked = asked
        for number in range(len(TOKENS)):
            self.lm_head(torch.full((1, 3, 2), float(number)))
        return torch.cat([input_ids, torch.tensor([TOKENS])], dim=1)


Stand = Callable[..., ModuleType]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Put a module in place of one that is not installed, with whatever it is to hold."""
    modules: dict[str, ModuleType] = {}

    def put(name: str, **content: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(content)
        modules[name] = module
        return module

    monkeypatch.setattr(own_code.importlib, "import_module", lambda name: modules[name])
    return put


def frame(**more: Any) -> dict[str, Any]:
    seen = {"instruction": "Lift It", "pictures": [PICTURE], "cameras": ["image"], "state": None}
    return {**seen, **more}


def setup(**more: Any) -> dict[str, Any]:
    given = {
        "checkpoint": "somewhere",
        "device": "cpu",
        "dtype": "float32",
        "statistics_key": "bridge",
        "num_steps": 1,
        "action_dim": 2,
        "num_pictures": 1,
        "state_dim": None,
        "crops": True,
        "max_tokens": 9,
        "prompt": "vicuna",
    }
    return {**given, **more}


class Inputs(dict[str, Any]):
    """As a processor of transformers gives them."""

    def to(self, device: str, dtype: torch.dtype) -> "Inputs":
        assert (device, dtype) == ("cpu", torch.float32)
        return self


class Prismatic(Network):
    """OpenVLA's interface. `vocab_size` leaves room for ids from 24 to 31."""

    vocab_size = 32
    bin_centers = np.linspace(-1, 1, 7)
    norm_stats: dict[str, Any] = {}

    def predict_action(self, input_ids: Tensor, unnorm_key: str, **asked: Any) -> Any:
        assert unnorm_key == "bridge"
        self.generate(input_ids, max_new_tokens=3, **asked)
        return np.array([0.25, 1.0])

    def get_action_dim(self, key: str) -> int:
        return 2

    def get_action_stats(self, key: str) -> dict[str, Any]:
        return {"q01": [0.0, 0.0], "q99": [2.0, 1.0], "mask": [True, False]}


@pytest.fixture
def prismatic(stand_in: Stand) -> SimpleNamespace:
    """transformers with OpenVLA's remote code: the prompts it was asked, and the model."""
    found = SimpleNamespace(prompts=[], pictures=[], model=Prismatic(), loaded={})

    def process(prompt: str, picture: Any) -> Inputs:
        found.prompts.append(prompt)
        found.pictures.append(np.array(picture))
        return Inputs(input_ids=torch.tensor([[1, 5, 6]]))

    def load(path: str, **given: Any) -> Prismatic:
        found.loaded = given
        return found.model

    auto = SimpleNamespace(from_pretrained=lambda path, **_: process)
    model = SimpleNamespace(from_pretrained=load)
    stand_in("transformers", AutoProcessor=auto, AutoModelForVision2Seq=model)
    return found


def test_openvla_is_asked_as_its_scripts_ask(prismatic: SimpleNamespace, tmp_path: Path) -> None:
    statistics = {"bridge": {"action": {}}}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(statistics))
    (tmp_path / "config.json").write_text('{"auto_map": {}}')
    model = own_code.OpenVla(setup(checkpoint=str(tmp_path)))
    watch = own_code.HeadWatch(model.head)
    tokens, actions = model.answer(frame())
    assert prismatic.prompts == ["In: What action should the robot take to lift it?\nOut:"]
    np.testing.assert_array_equal(prismatic.pictures[0], PICTURE)
    assert prismatic.loaded["torch_dtype"] is torch.float32
    assert prismatic.model.norm_stats == statistics
    assert prismatic.model.asked["do_sample"] is False
    assert tokens == TOKENS
    np.testing.assert_array_equal(actions, [[0.25, 1.0]])
    assert watch.passes == len(TOKENS)
    np.testing.assert_array_equal(watch.logits, np.zeros(40))  # of the first pass alone


def test_ecot_reads_the_tokens_before_the_end_and_has_no_action_without_one(
    prismatic: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = own_code.Ecot(setup())
    tokens, (action,) = model.answer(frame())
    assert prismatic.prompts[0].endswith("take to lift it? ASSISTANT: TASK:")
    assert prismatic.model.asked["max_new_tokens"] == 9
    assert tokens == TOKENS
    # 31 is bin 0, 7 is cut to the last of seven bins; the second number is not scaled.
    np.testing.assert_allclose(action, [0.0, 1.0])
    monkeypatch.setattr(prismatic.model.generation_config, "eos_token_id", 3)
    assert model.answer(frame()) == (TOKENS, None)
    own_code.Ecot(setup(prompt="in-out")).answer(frame())
    assert prismatic.prompts[-1].endswith("take to lift it?\nOut: TASK:")


def test_oft_is_given_a_copy_because_it_changes_the_folder(
    stand_in: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "config.json",
        "action_head--1_checkpoint.pt",
        "proprio_projector--1_checkpoint.pt",
    ):
        (tmp_path / name).write_text("as it was")
    asked: dict[str, Any] = {}

    def get_vla(config: Any) -> SimpleNamespace:
        Path(config.pretrained_checkpoint, "config.json").write_text("changed")
        asked["config"] = config
        return SimpleNamespace(llm_dim=64)

    def get_vla_action(config: Any, *given: Any, **more: Any) -> list[list[float]]:
        asked.update(observation=given[2], instruction=given[3], **more)
        return [[1.0, 2.0]]

    stand_in(
        "experiments.robot.openvla_utils",
        get_vla=get_vla,
        get_vla_action=get_vla_action,
        get_processor=lambda config: "processor",
        get_action_head=lambda config, width: f"head {width}",
        get_proprio_projector=lambda config, width, dim: f"projector {width} {dim}",
    )
    monkeypatch.setattr(own_code.sys, "argv", ["own_code.py"])
    given = setup(checkpoint=str(tmp_path), dtype="bfloat16", num_pictures=2, state_dim=8)
    model = own_code.Oft(given)
    state = np.arange(8.0)
    tokens, actions = model.answer(frame(pictures=[PICTURE, OTHER], state=state))
    assert (tokens, actions) == (None, [[1.0, 2.0]])
    assert (tmp_path / "config.json").read_text() == "as it was"
    config = asked["config"]
    assert (config.use_l1_regression, config.use_proprio, config.use_film) == (True, True, False)
    assert (config.num_images_in_input, config.unnorm_key, config.center_crop) == (
        2,
        "bridge",
        True,
    )
    assert (asked["action_head"], asked["proprio_projector"]) == ("head 64", "projector 64 8")
    np.testing.assert_array_equal(asked["observation"]["full_image"], PICTURE)
    np.testing.assert_array_equal(asked["observation"]["wrist_0"], OTHER)
    with pytest.raises(ValueError, match="give --dtype bfloat16"):
        own_code.Oft(setup())


@pytest.mark.parametrize(
    ("action_dim", "num_steps", "word"), [(7, 8, "libero"), (7, 5, "bridge"), (14, 25, "aloha")]
)
def test_oft_finds_its_sizes_by_a_word_of_the_command_line(
    action_dim: int, num_steps: int, word: str, stand_in: Stand, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stand_in(
        "experiments.robot.openvla_utils",
        get_vla=lambda config: SimpleNamespace(llm_dim=64),
        get_processor=lambda config: None,
    )
    monkeypatch.setattr(own_code.sys, "argv", ["own_code.py"])
    more = {"dtype": "bfloat16", "action_dim": action_dim, "num_steps": num_steps}
    own_code.Oft(setup(checkpoint=str(tmp_path), **more))
    assert own_code.sys.argv == ["own_code.py", word]


def test_vla0_gets_both_cameras_through_its_own_chain(stand_in: Stand, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a run's")
    (tmp_path / "model_last").mkdir()
    (tmp_path / "dataset_stats.pkl").write_bytes(pickle.dumps({"out_ori_act": {"min": [0]}}))
    qwen: dict[str, Any] = {"use_lora": False, "horizon": 8, "qwen_model_id": "a hub's"}

    class Settings(dict[str, Any]):
        __getattr__ = dict.__getitem__

    config = SimpleNamespace(
        merge_from_file=lambda path: None,
        MODEL=SimpleNamespace(QWEN=Settings(qwen)),
        DATALOADER=SimpleNamespace(ROBOVERSE=SimpleNamespace(cfg_path="its", cfg_opts="own")),
    )
    asked: dict[str, Any] = {}

    class QwenActor(nn.Module):
        def __init__(self, **settings: Any) -> None:
            super().__init__()
            asked["settings"] = settings
            self.model = Network()

        def set_dataset_stats(self, statistics: Any) -> None:
            asked["statistics"] = statistics

        def forward(self, **given: Any) -> dict[str, Tensor]:
            asked.update(given)
            self.model.generate(input_ids=torch.tensor([[1]]))
            return {"out_ori_act": torch.ones(1, 8, 2)}

    def transform(cfg: Any, sample: dict[str, Any], sample_cam_list: Any, eval: bool) -> Any:
        assert eval
        assert sample["rgb"].shape == (1, 2, 8, 8, 3)
        return {"rgb": sample["rgb"][:, :, :4]}

    chain = SimpleNamespace(IMAGE=SimpleNamespace(cam_list=("3p1", "3p2")))
    stand_in("rv_train.configs", get_cfg_defaults=lambda: config)
    stand_in("rv_train.models.qwen.model", QwenActor=QwenActor)
    stand_in("roboverse.main", get_cfg=lambda path, options: chain)
    stand_in("roboverse.unifiers.image_unifier", image_unifier_transform=transform)
    model = own_code.Vla0(setup(checkpoint=str(tmp_path)))
    tokens, actions = model.answer(frame(pictures=[PICTURE, OTHER]))
    assert asked["settings"]["qwen_model_id"] == str(tmp_path / "model_last")
    assert asked["statistics"] == {"out_ori_act": {"min": [0]}}
    assert asked["rgb"].shape == (1, 1, 2, 4, 8, 3)
    assert (asked["instr"], asked["generate_temperature"]) == (["Lift It"], 0)
    assert tokens == TOKENS
    assert actions.shape == (8, 2)


def test_nora_is_told_how_many_actions_there_are(stand_in: Stand) -> None:
    class Nora:
        def __init__(self, path: str, device: str, torch_dtype: torch.dtype) -> None:
            assert (path, device, torch_dtype) == ("somewhere", "cpu", torch.float32)
            self.model, self.fast_tokenizer = Network(), SimpleNamespace(time_horizon=1)

        def inference(self, image: Any, instruction: str, unnorm_key: str) -> Any:
            assert (instruction, unnorm_key) == ("Lift It", "bridge")
            self.model.generate(input_ids=torch.tensor([[1, 2]]))
            return np.ones((self.fast_tokenizer.time_horizon, 2))

    stand_in("inference.nora", Nora=Nora)
    tokens, actions = own_code.NoraModel(setup(num_steps=5)).answer(frame())
    assert tokens == TOKENS
    assert actions.shape == (5, 2)


def test_qwenfast_takes_the_newest_weights_and_sends_pictures_as_its_clients_do(
    stand_in: Stand, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    for age, name in enumerate(("steps_2_pytorch_model.pt", "steps_1_pytorch_model.pt")):
        path = tmp_path / "checkpoints" / name
        path.write_bytes(b"")
        os.utime(path, (1000 - age, 1000 - age))
    asked: dict[str, Any] = {}

    class PolicyServerWrapper:
        def __init__(self, path: str, device: str, use_bf16: bool) -> None:
            asked.update(path=path, use_bf16=use_bf16)
            self.network = Network()
            interface = SimpleNamespace(model=self.network)
            self._framework = SimpleNamespace(qwen_vl_interface=interface)

        def predict_action(self, examples: Any, unnorm_key: str) -> Any:
            asked["example"] = examples[0]
            self.network.generate(input_ids=torch.tensor([[1]]))
            return {"actions": np.ones((1, 8, 2))}

    stand_in("deployment.model_server.policy_wrapper", PolicyServerWrapper=PolicyServerWrapper)
    model = own_code.QwenFast(setup(checkpoint=str(tmp_path)))
    tokens, actions = model.answer(frame(pictures=[PICTURE, OTHER]))
    assert Path(asked["path"]).name == "steps_2_pytorch_model.pt"
    assert asked["use_bf16"] is False
    assert [one.size for one in asked["example"]["image"]] == [(224, 224)] * 2
    assert asked["example"]["lang"] == "Lift It"
    assert (tokens, actions.shape) == (TOKENS, (8, 2))


def test_pi0fast_reads_tokens_up_to_the_first_end_and_whole_chunks(stand_in: Stand) -> None:
    config = SimpleNamespace(chunk_size=10, n_action_steps=5, use_kv_cache=True)
    asked: dict[str, Any] = {}

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            paligemma = Network()
            self.paligemma_with_expert = SimpleNamespace(paligemma=paligemma)
            self._paligemma_tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda word: 9)

        def sample_actions_fast_kv_cache(self) -> Tensor:
            return torch.tensor([[4, 5, 9, 0, 0]])

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner()

        def predict_action_chunk(self, batch: dict[str, Any]) -> Tensor:
            asked["batch"] = batch
            self.model.sample_actions_fast_kv_cache()
            return torch.ones(1, config.n_action_steps, 2)

    load = SimpleNamespace(from_pretrained=lambda path, config: Policy())
    stand_in("lerobot.policies.pi0_fast.modeling_pi0_fast", PI0FastPolicy=load)
    configs = SimpleNamespace(from_pretrained=lambda path: config)
    stand_in("lerobot.configs.policies", PreTrainedConfig=configs)
    pipelines = (lambda batch: batch, lambda actions: actions * 2)
    stand_in("lerobot.policies.factory", make_pre_post_processors=lambda **given: pipelines)
    model = own_code.Pi0Fast(setup())
    seen = frame(
        pictures=[PICTURE, OTHER], cameras=["image", "image2"], state=np.ones(8, np.float32)
    )
    tokens, actions = model.answer(seen)
    assert (tokens, actions.shape, actions[0, 0]) == ([4, 5, 9], (10, 2), 2.0)
    assert (config.device, config.dtype) == ("cpu", "float32")
    batch = asked["batch"]
    assert batch["observation.images.image2"].shape == (3, 8, 8)
    expected = torch.from_numpy(OTHER).permute(2, 0, 1) / 255
    assert torch.equal(batch["observation.images.image2"], expected)
    assert batch["task"] == "Lift It"


def test_an_environment_of_python_3_9_can_read_the_file() -> None:
    source = Path(own_code.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 9))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([one.name for one in node.names] if isinstance(node, ast.Import) else [
            node.module or ""
        ])
    }  # fmt: skip
    assert not {one for one in imported if one.startswith("deft")}
