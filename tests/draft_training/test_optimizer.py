import torch
from torch import nn

from deft_draft_training.optimizer import (
    OptimizerConfig,
    WeightAverage,
    build_optimizers,
    orthogonalise,
    rate_fraction,
    update,
)


def test_orthogonalised_matrices_have_singular_values_near_one():
    for shape in ((8, 20), (20, 8), (16, 16)):
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalise(matrix))
        assert values.min() > 0.4
        assert values.max() < 1.3


def test_matrices_are_orthogonalised_together_as_each_alone():
    for shape in ((8, 20), (20, 8)):
        matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
        alone = torch.stack([orthogonalise(one) for one in matrices])
        assert torch.allclose(orthogonalise(matrices), alone, atol=1e-5)


def test_under_autocast_matrices_are_orthogonalised_in_its_precision():
    matrix = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        found = orthogonalise(matrix)
    assert found.dtype is torch.bfloat16
    assert torch.cosine_similarity(found.float(), orthogonalise(matrix), dim=-1).min() > 0.99


def test_every_trained_parameter_belongs_to_exactly_one_optimizer():
    module = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    module[2].bias.requires_grad_(False)
    chosen = [
        id(one)
        for optimizer in build_optimizers(module, OptimizerConfig(muon_rate=0.1))
        for group in optimizer.param_groups
        for one in group["params"]
    ]
    assert sorted(chosen) == sorted(id(p) for p in module.parameters() if p.requires_grad)


def test_both_optimizers_learn_a_linear_map():
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(6, 6, generator=generator)
    inputs = torch.randn(64, 6, generator=generator)
    for config in (OptimizerConfig(rate=0.02), OptimizerConfig(rate=0.02, muon_rate=0.05)):
        torch.manual_seed(0)
        module = nn.Linear(6, 6)
        optimizers = build_optimizers(module, config)
        losses, schedule = [], OptimizerConfig(warm_up_steps=1)
        for step in range(300):
            loss = (module(inputs) - inputs @ truth.T).square().mean()
            loss.backward()
            update(module, optimizers, config, rate_fraction(schedule, step, 300))
            losses.append(loss.item())
        assert losses[-1] < 0.01 * losses[0]


def test_the_rate_warms_up_stays_and_falls_to_its_final_fraction():
    config = OptimizerConfig(warm_up_steps=10, decay_from=0.5, final_fraction=0.1)
    assert rate_fraction(config, 0, 100) == 0.1
    assert rate_fraction(config, 30, 100) == 1.0
    assert abs(rate_fraction(config, 100, 100) - 0.1) < 1e-9
    assert rate_fraction(config, 60, 100) > rate_fraction(config, 90, 100)


def test_a_run_that_would_end_while_it_warms_up_warms_up_for_a_tenth_of_it() -> None:
    config = OptimizerConfig(warm_up_steps=2000, decay_from=1.0)
    assert rate_fraction(config, 0, 60) == 1 / 6
    assert rate_fraction(config, 6, 60) == 1.0
    assert rate_fraction(config, 999, 20_000) == 0.5  # of a whole run as ever


def test_an_average_follows_the_weights_and_survives_a_restart():
    module = nn.Linear(3, 3)
    average = WeightAverage(module, 0.9)
    for _ in range(5):
        with torch.no_grad():
            module.weight.add_(1.0)
        average.follow(module)
    again = WeightAverage(module, 0.9)
    again.restore(average.state())
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    average.copy_to(one)
    again.copy_to(other)
    assert torch.equal(one.weight, other.weight)
    assert (one.weight < module.weight).all()
