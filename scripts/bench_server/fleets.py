"""What `deft plan` says for fleets on GPUs: the tables of docs/scaling.md.

No GPU is needed: a batch takes 1.25 times what an H200 must take at least, as
`benchmark/roofline.py` counts it.
`python -m scripts.bench_server.fleets` takes some minutes.
"""

from dataclasses import dataclass, replace

from deft_policies.benchmark.roofline import PassTokens, WeightBytes, decoder_cost, vision_cost
from deft_policies.model.random_weights import NAMED_SIZES
from deft_server.planning.service_times import ServiceTimes, collect
from deft_server.planning.simulate import Capacity, Fleet, FleetGoal, fewest_replicas, simulate
from deft_server.serving.waiting_line import LineRules

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # of an H200, as in docs/performance.md
OVER_THE_LIMIT = 1.25
PROMPT, ACTION, HEAD_ROWS = 280, 7, 256  # tokens, tokens, action tokens
BFLOAT16 = WeightBytes(2.0, 2.0)
SIZES = (1, 2, 4, 8)
FRONT_S = 0.001  # of processor time a frame; a front has one core
FRAMES = 10_000  # watched in each forecast
MOST_REPLICAS = 512
GPUS = 8
SIMULATOR_S, STEPS = 0.0196, 100  # a step of libero_object on one core, and an episode of it
EPISODES = 4 * 500


@dataclass(frozen=True)
class Way:
    """How actions are decoded: passes after the prefill, and drafts that ride in it."""

    name: str
    num_decodes: int
    num_drafts: int


WAYS = (Way("plain decoding", ACTION - 1, 0), Way("every draft accepted", 0, ACTION - 1))


def batch_s(way: Way, size: int) -> float:
    config = NAMED_SIZES["openvla-7b"]()
    new = PROMPT + way.num_drafts
    prefill = PassTokens(0, new, 1 + way.num_drafts, HEAD_ROWS, is_causal=True)
    costs = [vision_cost(config, size, BFLOAT16), decoder_cost(config.llm, size, prefill, BFLOAT16)]
    for done in range(way.num_decodes):
        one = PassTokens(PROMPT + done, 1, 1, HEAD_ROWS)
        costs.append(decoder_cost(config.llm, size, one, BFLOAT16))
    return OVER_THE_LIMIT * sum(one.floor_ms(BYTES_PER_S, FLOPS_PER_S) for one in costs) / 1000


def service(way: Way) -> ServiceTimes:
    return collect((size, batch_s(way, size)) for size in SIZES)


def fleet(robots: int, hz: float) -> Fleet:
    seconds = max(4.0, FRAMES / (robots * hz))
    return Fleet(robots, hz, seconds=seconds, warm_up_s=seconds / 10)


def capacity(way: Way, max_batch: int, fronts: int) -> Capacity:
    """Return replicas behind so many fronts, each of which has its part of the frames."""
    rules = LineRules(max_batch=max_batch, max_waiting=1024)
    return Capacity(service(way), rules, FRONT_S / fronts)


def needed(robots: int, hz: float, goal: FleetGoal) -> None:
    fronts = -(-robots * hz * FRONT_S // 0.7)
    print(f"{robots} robots at {hz:g} Hz, p99 within {goal.p99_s * 1000:.0f} ms, {fronts:g} fronts")
    for way in WAYS:
        for max_batch in (1, SIZES[-1]):
            search = fewest_replicas(
                fleet(robots, hz), capacity(way, max_batch, int(fronts)), goal, MOST_REPLICAS
            )
            count = search.num_replicas
            told = "not with any number of replicas"
            if count is not None:
                found = search.forecasts[count]
                told = (
                    f"{count} GPUs, {robots / count:.1f} robots each, p50 "
                    f"{found.at(0.5) * 1000:.0f} ms, p99 {found.at(0.99) * 1000:.0f} ms, "
                    f"batches of {found.mean_batch:.1f}, busy {found.replica_load:.0%}"
                )
            print(f"  {way.name}, batches up to {max_batch}: {told}", flush=True)


def carried(hz: float, goal: FleetGoal) -> None:
    """Print the most robots that eight GPUs carry."""
    for way in WAYS:
        for max_batch in (1, SIZES[-1]):
            least, most = 1, 4096
            while most - least > max(1, least // 50):
                middle = (least + most) // 2
                given = capacity(way, max_batch, max(1, round(middle * hz * FRONT_S / 0.7)))
                rules = replace(given.rules, num_replicas=GPUS)
                if goal.is_met(simulate(fleet(middle, hz), replace(given, rules=rules))):
                    least = middle
                else:
                    most = middle
            print(
                f"{GPUS} GPUs, {hz:g} Hz, p99 within {goal.p99_s * 1000:.0f} ms, {way.name}, "
                f"batches up to {max_batch}: {least} robots",
                flush=True,
            )


def evaluation() -> None:
    """Print how long four suites take: workers in lock-step are a ring of simulator and GPU."""
    for way in WAYS:
        answer_s = batch_s(way, 1)
        per_gpu = (SIMULATOR_S + answer_s) / answer_s
        hours = EPISODES * STEPS * answer_s / 3600
        alone = EPISODES * STEPS * (SIMULATOR_S + answer_s) / 3600
        print(
            f"4 x 500 episodes of {STEPS} steps, {way.name}: one worker {alone:.1f} h; a GPU is "
            f"full with {per_gpu:.1f} workers and then takes {hours:.2f} h"
        )


def main() -> None:
    for way in WAYS:
        times = ", ".join(f"{size}: {batch_s(way, size) * 1000:.1f}" for size in SIZES)
        print(f"ms per batch, {way.name}: {times}")
    needed(100, 10.0, FleetGoal(0.06))
    needed(1000, 5.0, FleetGoal(0.1))
    carried(10.0, FleetGoal(0.06))
    carried(5.0, FleetGoal(0.1))
    evaluation()


if __name__ == "__main__":
    main()
