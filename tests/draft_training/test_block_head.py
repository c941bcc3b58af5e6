"""A block head from recorded states to a served one: what is taught is what is served."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deft_core.types import ActOptions, Observation
from deft_draft_training.commands import evaluate, export, fit, record
from deft_draft_training.errors import DataError
from deft_draft_training.heads.block_loss import BlockLossConfig, block_losses
from deft_draft_training.heads.export import load_fitted
from deft_draft_training.heads.fit import HeadFitConfig, HeadKind, RecordedSamples, build_head
from deft_draft_training.heads.samples import EpisodeSource
from deft_draft_training.heads.states import StatesRecorder, collate_blocks
from deft_policies.base import PolicyRequest
from deft_policies.checkpoint.drafts import load_block, save_block
from deft_policies.errors import CheckpointError
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.block_head import BlockHead
from tests.demonstrations import write_demonstrations
from tests.draft_training.golden_target import tiny_target
from tests.golden import TINY_OPENVLA, cases
from tests.policies.decoding.captures import random_block
from tests.tiny_target import tiny_decoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demonstrations(tmp_path_factory.mktemp("demos"), episodes=3, steps=4)


def observations(demos: Path) -> list[Observation]:
    return [one for _, one in EpisodeSource((demos,)).observations()]


def flags(*more: str) -> list[str]:
    key = cases()[0].statistics_key
    return [*more, "--checkpoint", str(TINY_OPENVLA), "--statistics-key", str(key)]


def test_recorded_states_are_those_of_the_whole_sequence_at_once(demos: Path) -> None:
    """Against the modules, layer by layer, without a cache."""
    target = tiny_target()
    frame = observations(demos)[0]
    (sample,) = StatesRecorder(target.policy, (1,)).sample([frame], [0], torch.float32)
    (known,) = target.sample([frame], [0], torch.float32)
    assert torch.equal(sample.tokens, known.tokens)
    width = target.width
    torch.testing.assert_close(sample.states[:, width:], known.hidden, rtol=1e-4, atol=1e-4)

    model = target.policy.model
    decoder = model.target.decoder
    seen: list[torch.Tensor] = []
    hook = decoder.layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    ids = torch.cat([known.prompt_ids, known.tokens[:-1]])
    words = decoder.embedding(ids)
    with torch.no_grad():
        decoder(torch.cat([words[:1], known.patches, words[1:]])[None])
    hook.remove()
    torch.testing.assert_close(sample.states[:, :width], seen[0][0], rtol=1e-4, atol=1e-4)


def test_blocks_ask_for_the_tokens_behind_their_own(demos: Path) -> None:
    recorder = StatesRecorder(tiny_target().policy, (1,))
    whole, other = recorder.sample(observations(demos)[:2], [0, 0], torch.float32)
    shorter = replace(other, tokens=other.tokens[:-3], states=other.states[:-3])
    samples = [whole, shorter]
    batch = collate_blocks(samples, places=4, num_blocks=8, seeds=[1, 2], device=CPU)
    num_blocks = batch.anchors.shape[1]
    assert num_blocks == len(whole.tokens) - 1  # no more than the longest answer has
    for row, sample in enumerate(samples):
        tokens, first = sample.tokens.tolist(), sample.num_prompt
        begun = set()
        for block in range(num_blocks):
            index = int(batch.anchors[row, block]) - first
            assert int(batch.first[row, block]) == tokens[index]
            counts = batch.counts[row, block].tolist()
            behind = tokens[index + 1 : index + 5]
            expected = [True] * len(behind) + [False] * (4 - len(behind))
            assert counts == (expected if index not in begun else [False] * 4)
            begun.add(index)
            for place in range(len(behind)):
                assert int(batch.wanted[row, block, place]) == behind[place]
                assert int(batch.before[row, block, place]) == tokens[index + place]
                assert int(batch.says[row, block, place]) == first + index + place
        assert begun == set(range(len(tokens) - 1))


def test_the_final_states_that_are_read_lead_to_the_wanted_tokens(demos: Path) -> None:
    target = tiny_target()
    samples = StatesRecorder(target.policy, (1,)).sample(
        observations(demos)[:2], [0, 0], torch.float32
    )
    head = build_head(HeadFitConfig(kind=HeadKind.BLOCK), target, (1,))
    assert isinstance(head, BlockHead)
    batch = collate_blocks(samples, head.sizes.places, 6, [1, 2], CPU)
    with torch.no_grad():
        final = batch.states[..., -target.width :]
        index = batch.says.flatten(1)[:, :, None].expand(-1, -1, target.width)
        said = target.logits(final.gather(1, index)).argmax(-1).view(batch.says.shape)
    assert torch.equal((said + target.actions.first)[batch.counts], batch.wanted[batch.counts])
    with torch.no_grad():
        losses = block_losses(head, target.embed, target.logits, batch, BlockLossConfig())
    assert 0 < float(losses["distance"]) <= 2
    assert float(losses["length"]) >= 1


def test_a_head_is_recorded_fitted_judged_exported_and_served(
    tmp_path: Path, demos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features, run, out = (str(tmp_path / name) for name in ("features", "run", "head"))
    assert record.main(flags(str(demos), "--out", features, "--layers", "1", "--float32")) == 0
    settings = ["kind=block", "steps=60", "batch_size=4", "optimizer.warm_up_steps=5",
                "block.places=6", "log_every=20"]  # fmt: skip
    overrides = [part for one in settings for part in ("--set", one)]
    assert fit.main(flags("--features", features, "--out", run, *overrides)) == 0
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    judged = flags(str(demos), "--head", run, "--radii", "0", "--json", str(tmp_path / "scores"))
    assert evaluate.main(judged) == 0
    scores = [json.loads(line) for line in (tmp_path / "scores").read_text().splitlines()]
    assert scores[0]["source"] == run
    assert scores[0]["committed_length"] >= 1.0
    assert export.main(flags(run, "--out", out, "--float32")) == 0
    capsys.readouterr()

    target = tiny_target()
    fitted = load_fitted(Path(run), target)
    loaded = load_block(Path(out), target.policy.model.target.decoder.sizes, target.weight)
    for name, weight in fitted.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name

    policy = served(Path(out))
    for frame in observations(demos)[:4]:
        plain, drafted = (
            policy.act([PolicyRequest(frame, options=ActOptions(decoding=name, want_trace=True))])[
                0
            ]
            for name in ("autoregressive", "block")
        )
        assert plain.chunk.trace is not None
        assert drafted.chunk.trace is not None
        assert plain.chunk.trace.tokens == drafted.chunk.trace.tokens


def served(head: Path) -> VlaPolicy:
    key = cases()[0].statistics_key
    return load_policy(
        ModelOptions(checkpoint=str(TINY_OPENVLA), statistics_key=key, draft_heads=(head,))
    )


def test_features_without_states_are_refused_for_a_block_head(tmp_path: Path, demos: Path) -> None:
    features = str(tmp_path / "features")
    assert record.main(flags(str(demos), "--out", features)) == 0
    with pytest.raises(DataError, match="--layers"):
        fit.main(flags("--features", features, "--out", str(tmp_path / "r"), "--set", "kind=block"))
    states = str(tmp_path / "states")
    assert record.main(flags(str(demos), "--out", states, "--layers", "1")) == 0
    with pytest.raises(DataError, match="--layers"):
        fit.main(flags("--features", states, "--out", str(tmp_path / "r2")))
    assert all(
        "states" in vars(one)
        for one in RecordedSamples(Path(states), tiny_target().fingerprint()).get([0, 1])
    )


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("read_layers", [2], "read_layers"),
        ("read_layers", [1, 1], "read_layers"),
        ("places", 10**9, "places"),
        ("num_hidden_layers", 10**9, "num_hidden_layers"),
        ("intermediate_size", 10**12, "intermediate_size"),
        ("rank", 10**9, "rank"),
        ("last_token", 10**9, "tokens"),
        ("first_token", 71, "tokens"),
        ("hidden_size", 64, "wide"),
    ],
)
def test_a_hostile_configuration_is_refused(
    tmp_path: Path, field: str, value: object, complaint: str
) -> None:
    decoder = tiny_decoder()
    save_block(random_block(decoder.sizes), tmp_path)
    like = decoder.embedding.weight
    load_block(tmp_path, decoder.sizes, like)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=complaint):
        load_block(tmp_path, decoder.sizes, like)
