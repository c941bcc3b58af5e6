"""A small pi0-FAST is taught here: its codes, its words, and the folder that is served."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from deft_core.types import Observation
from deft_draft_training.errors import ConfigError
from deft_policies.base import Verdict
from deft_policies.checkpoint.open import locate_checkpoint
from deft_policies.decoding.clock import StageClock
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.families.pi0fast.family import Pi0FastFamily
from deft_policies.families.pi0fast.model import Pi0Fast
from deft_policies.families.pi0fast.prompt import BOS, prompt_text
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.formats import Precision
from tests.demonstrations import write_demonstrations
from tests.typed import next_command
from tiny_libero_recipe.data import AugmentConfig
from tiny_libero_recipe.episodes import load_demonstrations
from tiny_libero_recipe.fast_fit import FastFitConfig, FastTrainer, near_codes
from tiny_libero_recipe.fast_format import HIDDEN, STATISTICS_FILE, read_format
from tiny_libero_recipe.fast_model import FastModelConfig, FastNet, prefix_mask
from tiny_libero_recipe.fast_samples import BEHIND, PreparedFast, prepare_fast, write_fast

SIZES = FastModelConfig(16, 1, 24, 32, 2, 2, 48)
CONFIG = FastFitConfig(
    model=SIZES, augment=AugmentConfig(0, 0, 0, 0), steps=2, batch_size=4, whole_share=0.5
)
PLAIN = replace(
    CONFIG,
    words=replace(CONFIG.words, plain=1.0, noise=0.0),
    never_hidden=1.0,
    state_noise=0.0,
)
ASKED = "pick up the butter"


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    return write_demonstrations(tmp_path / "demos", episodes=2, steps=12)


@pytest.fixture
def prepared(demos: Path) -> PreparedFast:
    return prepare_fast(load_demonstrations([demos], only_succeeded=True), 270)


@pytest.fixture
def train(demos: Path, teach: Callable[..., Path]) -> Callable[..., Path]:
    return partial(teach, demos, answers="fast", sizes=asdict(SIZES))


def test_an_answers_codes_are_the_actions_that_were_commanded(prepared: PreparedFast, demos: Path):
    (episode, *_) = load_demonstrations([demos], only_succeeded=True)
    written = prepared.samples.labels[0]
    codes = written[written != BEHIND].tolist()
    normalised = prepared.format.codec.decode(codes, prepared.format.horizon, 7)
    actions = prepared.format.action.restore(normalised.astype(np.float32))
    near = 0.15 * (prepared.format.action.second - prepared.format.action.first)
    assert (np.abs(actions - episode.labels[:8])[:, :6] <= near[:6]).all()
    opens = np.where(episode.labels[:8, 6] > 0.5, -1.0, 1.0)  # -1 opens
    assert (np.sign(actions[:, 6]) == opens).all()


def test_codes_near_a_code_have_nearly_its_actions(prepared: PreparedFast):
    pieces, action = prepared.format.codec.pieces, prepared.format.action
    tables = near_codes(prepared.format, 1.0)
    torch.testing.assert_close(tables.sum(dim=2), torch.ones(7, len(pieces)))
    code, next_one, far, two = (pieces.index(piece) for piece in (b"a", b"b", b"z", b"\xc2"))
    ranges = action.second - action.first
    for table, share in zip(tables, ranges / ranges.max(), strict=True):
        ratio = table[code, next_one] / table[code, code]
        assert ratio == pytest.approx(np.exp(-0.5 * share**2), 1e-4)
        assert table[code, far] < table[code, next_one]
        assert table[two, two] == 1  # it is a half of a coefficient
    assert torch.equal(near_codes(prepared.format, 0.0)[3], torch.eye(len(pieces)))


def test_a_prompt_is_word_for_word_and_a_number_is_a_token(prepared: PreparedFast):
    tokenizer = prepared.format.words.tokenizer
    for text in (prompt_text(ASKED, [128, -1, 255]), prompt_text("grüße, 12 | x", [0])):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    numbers = FastTrainer(CONFIG, prepared)._batches.number_ids().tolist()
    assert [tokenizer.id_to_token(one) for one in numbers] == [f"▁{n}" for n in range(-1, 256)]
    assert len(tokenizer.encode(prompt_text(ASKED, [5, 6])).ids) == 2 + 4 + 1 + 2 + 2 + 2


def test_an_answer_is_taught_from_its_beginning_to_its_end(prepared: PreparedFast):
    batches = FastTrainer(replace(PLAIN, loss=replace(PLAIN.loss, sigma=0.0)), prepared)._batches
    words, codes = prepared.format.words, prepared.samples.labels[0]
    shown, wanted = batches.spell(codes, np.random.default_rng(0))
    ids = [prepared.format.code_ids[code] for code in codes if code != BEHIND]
    assert shown == [*words.prefix, *ids]
    assert wanted.argmax(dim=1).tolist() == [*words.prefix, *ids, words.end]


def test_codes_count_by_the_ranges_of_their_dimensions(prepared: PreparedFast):
    ranges = prepared.format.action.second - prepared.format.action.first
    config = replace(PLAIN, loss=replace(PLAIN.loss, range_power=2.0))
    _, wanted = FastTrainer(config, prepared)._batches.spell(
        prepared.samples.labels[0], np.random.default_rng(0)
    )
    first = len(prepared.format.words.prefix)
    (begun, *_) = prepared.format.codec.begun(prepared.samples.labels[0, :1].tolist())
    weighed = ranges[: len(begun)] ** 2
    assert float(wanted[first].sum()) == pytest.approx(weighed.mean() / (ranges**2).mean(), 1e-4)
    assert float(wanted[-1].sum()) == 1


def test_some_codes_are_hidden_from_what_comes_behind(prepared: PreparedFast):
    config = replace(CONFIG, hidden_share=1.0, never_hidden=0.0)
    batches = FastTrainer(config, prepared)._batches
    hidden = prepared.format.words.tokenizer.token_to_id(HIDDEN)
    shown, wanted = batches.spell(prepared.samples.labels[0], np.random.default_rng(0))
    assert hidden in shown
    assert wanted[:, hidden].sum() == 0


def test_a_short_step_shows_the_decoder_one_patch_of_each_cell(prepared: PreparedFast):
    batches = FastTrainer(CONFIG, prepared)._batches
    generator = np.random.default_rng(0)
    short = batches.take(np.array([0, 1]), generator, False).patches
    rows, columns = short[0] // 16, short[0] % 16
    assert sorted((rows // 2 * 8 + columns // 2).tolist()) == list(range(64))
    assert not torch.equal(short[0], short[1])
    whole = batches.take(np.array([0]), generator, True).patches
    assert whole[0].tolist() == list(range(256))


def test_what_comes_before_an_answer_sees_all_of_itself_and_nothing_behind():
    mask = prefix_mask(torch.tensor([2, 3]), 4)[:, 0].int().tolist()
    assert mask[0] == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert mask[1] == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.fixture
def taught(demos: Path, prepared: PreparedFast) -> tuple[FastNet, Path]:
    net = FastTrainer(CONFIG, prepared).run(demos.parent / "run")
    write_fast(net, prepared, demos.parent / "taught", torch.float32)
    return net, demos.parent / "taught"


@pytest.mark.parametrize("grammar", ["on", "off"])
def test_what_was_taught_is_served_as_it_was_taught(
    taught: tuple[FastNet, Path], prepared: PreparedFast, grammar: str
):
    net, folder = taught
    policy = load_policy(
        ModelOptions(checkpoint=str(folder), precision=Precision.FLOAT32, grammar=grammar)
    )
    assert isinstance(policy, VlaPolicy)
    model = policy.model
    assert isinstance(model, Pi0Fast)
    trainer = FastTrainer(PLAIN, prepared)
    batch = trainer._batches.take(np.array([3]), np.random.default_rng(0), True)
    asked = prepared.samples.requests[3].instruction
    frame = Observation(batch.frames[0].numpy(), asked, state=prepared.states[3])
    prompt_ids = batch.ids[0, : batch.prompt_lengths[0]].tolist()
    assert model._ids(frame) == prompt_ids
    assert prompt_ids[0] == prompt_ids[-1] == prepared.format.words.tokenizer.token_to_id(BOS)
    answer = batch.ids[0, len(prompt_ids) :].tolist()
    with torch.no_grad():
        pixels = trainer._look(batch.frames)
        steps = len(answer)
        hidden = net(pixels, batch.patches, batch.ids, batch.prompt_lengths, steps)
        logits = net.network.decoder.head(hidden)[0]
    names = list(model._names[: model.target.decoder.sizes.vocabulary]) or slice(None)
    columns = {token: column for column, token in enumerate(model._names)}
    given = [columns.get(token, token) for token in answer]
    (prompt,) = model.see([frame], StageClock(torch.device("cpu")))
    served = model.target.logits_along(prompt, steps, given)
    np.testing.assert_allclose(served, logits[:, names].numpy(), atol=1e-4, rtol=0)


def test_doctor_finds_nothing_odd_in_the_folder(taught: tuple[FastNet, Path]):
    source = locate_checkpoint(str(taught[1]))
    family = Pi0FastFamily(source, ModelOptions(checkpoint=str(taught[1])))
    assert {finding.verdict for finding in family.findings()} == {Verdict.GOOD}


def test_the_command_says_what_it_learned_and_how_to_serve(
    demos: Path, train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    checkpoint = train("first")
    said = capsys.readouterr()
    assert " codes, " in said.err
    assert "million weights" in said.err
    assert next_command(said.out) == [
        *("deft", "serve", "--family", "pi0fast", "--checkpoint", str(checkpoint))
    ]


def test_another_run_goes_on_with_the_same_codes_and_words(demos: Path, train: Callable[..., Path]):
    first = train("first")
    flags = [f"--warm-start={demos.parent / 'first'}", f"--tokens-of={first}"]
    second = train("second", *flags, "--set=fit.model.num_layers=3")
    kept = ("text-tokenizer/tokenizer.json", "fast-tokenizer/processor_config.json")
    for name in (*kept, STATISTICS_FILE):
        assert (second / name).read_bytes() == (first / name).read_bytes()
    one, other = (read_format(folder) for folder in (first, second))
    assert one.codec.pieces == other.codec.pieces
    with pytest.raises(ConfigError, match="never overwritten"):
        train("second")
