import copy
import random

import pytest

from punica_jax.stats import BOUNDS_S, AdapterStats, EngineStats, Histogram


def test_an_empty_histogram():
    times = Histogram()
    assert (times.count, times.mean_s, times.max_s) == (0, 0.0, 0.0)
    assert times.quantile_s(0.5) == 0.0


@pytest.mark.parametrize(
    ("value_s", "place"),
    [
        (0.0, 0),
        (BOUNDS_S[0], 0),  # a bound counts what equals it
        (BOUNDS_S[0] * 1.01, 1),
        (0.3, BOUNDS_S.index(0.5)),
        (BOUNDS_S[-1], len(BOUNDS_S) - 1),
        (BOUNDS_S[-1] + 1, len(BOUNDS_S)),
    ],
)
def test_one_time_in_its_bin(value_s, place):
    times = Histogram()
    times.add(value_s)
    assert times.counts[place] == times.count == 1
    assert times.total_s == times.mean_s == times.max_s == value_s
    # Of a single time every quantile is that time or the bound above it.
    assert times.quantile_s(0.5) == times.quantile_s(1.0) == value_s


def test_bounds_ascend():
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))
    assert len(Histogram().counts) == len(BOUNDS_S) + 1
    assert Histogram().counts is not Histogram().counts


def test_quantiles_bound_as_many_as_they_say():
    rng = random.Random(0)
    times, values = Histogram(), [rng.lognormvariate(-3, 2) for _ in range(500)]
    for value in values:
        times.add(value)
    assert times.count == 500
    assert times.mean_s == pytest.approx(sum(values) / 500)
    for fraction in (0.01, 0.5, 0.9, 0.99, 1.0):
        bound = times.quantile_s(fraction)
        assert sum(value <= bound for value in values) >= fraction * 500
        lower = max([0.0, *(one for one in BOUNDS_S if one < bound)])
        assert sum(value <= lower for value in values) < fraction * 500
    assert times.quantile_s(1.0) == max(values)


def test_plain_values_that_can_be_copied():
    stats = AdapterStats(num_requests=3)
    stats.queue_s.add(0.1)
    kept = copy.deepcopy(stats)
    stats.queue_s.add(0.2)
    assert kept.queue_s.count == 1 and kept != stats
    gauges = dict.fromkeys(
        (
            *("num_waiting", "num_running", "num_steps", "num_preempted"),
            *("num_kv_pages", "num_free_kv_pages", "num_slots", "num_on_device"),
            *("num_adapters", "host_adapter_bytes"),
            *("num_step_sequences", "num_step_rows"),
        ),
        0,
    )
    engine = EngineStats(
        **gauges,
        num_rank_pages={},
        num_free_rank_pages={},
        tiers={},
        nbytes={},
        base=kept,
        adapters={"a": stats},
    )
    with pytest.raises(AttributeError):
        engine.num_waiting = 1  # pyright: ignore[reportAttributeAccessIssue]
