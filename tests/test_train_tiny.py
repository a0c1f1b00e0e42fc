"""The script that trains the tiny model: its parts, and a run of a few steps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from demos import train_tiny
from demos.tiny_adapters import AdapterSet
from demos.tiny_data import (
    BOS_ID,
    EOS_ID,
    SEP_ID,
    SEQ_LEN,
    VOCAB_SIZE,
    Examples,
    adapter_examples,
    base_examples,
)
from demos.tiny_recipe import ADAPTERS, FULL, SMOKE
from demos.tiny_tasks import TASKS
from demos.tiny_training import Schedule, exact_match, train
from punica_jax.models import MODULE_GROUPS, read_adapter
from tests.adapter_cases import in_pools


@pytest.fixture
def optax_promotes():
    """Optax raises floats to integer powers, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def quick_compiles():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def text_of(tokens):
    marks = {BOS_ID: "<", SEP_ID: "|", EOS_ID: ">", 0: ""}
    return "".join(marks.get(int(token)) or chr(token) for token in tokens if token)


class TestExamples:
    def test_base(self):
        examples = base_examples(["abca", "xyz"])
        texts = [text_of(tokens) for tokens in examples.tokens]
        assert texts[:4] == [
            "<abca|abca>",
            "<xyz|xyz>",
            "<upper:abca|ABCA>",
            "<upper:xyz|XYZ>",
        ]
        assert texts[-2:] == ["<count:abca|a2b1c1>", "<count:xyz|x1y1z1>"]
        assert len(examples) == 2 * (1 + len(TASKS))
        assert examples.kinds.tolist()[::2] == list(range(-1, len(TASKS)))
        assert set(examples.slots) == {-1}

    def test_adapters(self):
        examples = adapter_examples(["abca"])
        texts = [text_of(tokens) for tokens in examples.tokens]
        assert texts[0] == "<abca|ABCA>"
        assert texts[3] == "<abca|acba>"
        assert examples.slots.tolist() == list(range(len(TASKS)))

    def test_edges_of_the_answer(self):
        examples = base_examples(["jjjjjjjjjj"])
        for tokens, start, end in zip(
            examples.tokens, examples.answer_starts, examples.ends, strict=True
        ):
            assert tokens[start - 1] == SEP_ID
            assert tokens[end - 1] == EOS_ID
            assert not tokens[end:].any()
        # Ten times four signs: the longest example there is.
        assert examples.ends.max() == SEQ_LEN


class TestSchedule:
    def test_rates(self):
        schedule = Schedule(
            peak_lr=0.5,
            warmup_steps=10,
            max_hold_steps=20,
            decay_steps=40,
            dispatch_steps=20,
        )
        assert schedule.hold_lr(0) == pytest.approx(0.05)
        assert schedule.hold_lr(9) == schedule.hold_lr(19) == 0.5
        assert schedule.decay_lr(0) == 0.5
        assert schedule.decay_lr(20) == pytest.approx(0.25)
        assert schedule.decay_lr(40) == pytest.approx(0.0)

    def test_dispatch_must_divide(self):
        with pytest.raises(
            ValueError,
            match="decay_steps must be a multiple of dispatch_steps 4, got 6",
        ):
            Schedule(
                peak_lr=1,
                warmup_steps=1,
                max_hold_steps=4,
                decay_steps=6,
                dispatch_steps=4,
            )


@pytest.mark.usefixtures("optax_promotes")
class TestTraining:
    """A table from token to token, which must learn that </s> follows <sep>."""

    examples = Examples(
        tokens=np.asarray([[BOS_ID, k, SEP_ID, EOS_ID] for k in (1, 2, 3)], np.uint16),
        answer_starts=np.full(3, 3, np.uint8),
        ends=np.full(3, 4, np.uint8),
        slots=np.full(3, -1, np.int8),
        kinds=np.zeros(3, np.int8),
    )
    logits_of = jax.tree_util.Partial(lambda weights, tokens, slots: weights[tokens])

    def run(self, **changes):
        fields = dict(peak_lr=0.1, warmup_steps=1, max_hold_steps=40, decay_steps=10)
        schedule = Schedule(**fields | changes, batch_size=4, dispatch_steps=10)
        weights = jnp.zeros((VOCAB_SIZE, VOCAB_SIZE), jnp.float32)
        rng = np.random.default_rng(0)
        names = ["only"]
        return train(
            self.logits_of, weights, self.examples, self.examples, names, schedule, rng
        )

    def test_learns_and_stops_by_the_rule(self, capsys):
        weights = self.run()
        assert exact_match(self.logits_of, weights, self.examples, 2) == [1.0]
        steps = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
        assert steps == ["10", "20"]  # right at once: one hold, one decay

    def test_stops_at_the_limit(self, capsys):
        self.run(peak_lr=0.0)
        assert len(capsys.readouterr().out.splitlines()) == 5

    def test_only_answers_count(self):
        weights = self.run()
        unseen = np.setdiff1d(np.arange(VOCAB_SIZE), [SEP_ID])
        assert not np.asarray(weights)[unseen].any()


def test_exact_match_sees_every_answer_token():
    logits_of = jax.tree_util.Partial(
        lambda weights, tokens, slots: (
            jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), VOCAB_SIZE)
            * (jnp.arange(SEQ_LEN) != weights)[None, :, None].astype(jnp.float32)
        )
    )
    examples = adapter_examples(["abc"]).select(np.asarray([0]))
    first, end = int(examples.answer_starts[0]) - 1, int(examples.ends[0]) - 1
    for place in range(SEQ_LEN):
        # At one place the likeliest token is 0, which no answer holds.
        found = exact_match(logits_of, jnp.int32(place), examples, 1)
        assert found == [float(not first <= place < end)], place


class TestAdapterSet:
    config = SMOKE.config
    adapters = AdapterSet(config, ADAPTERS)

    def random_weights(self):
        rng = np.random.default_rng(3)
        return jax.tree.map(
            lambda array: jnp.asarray(rng.normal(size=array.shape), jnp.float32),
            self.adapters.init(rng),
        )

    def test_begins_as_the_base(self):
        pools = self.adapters.pools(
            self.adapters.init(np.random.default_rng(0)), jnp.float32
        )
        for layer in pools.layers:
            assert not any(pool.b.any() for pool in layer)
            assert all(pool.a.any() for pool in layer)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_files_hold_what_trained(self, tmp_path, dtype):
        weights = self.random_weights()
        pools = self.adapters.pools(weights, dtype)
        self.adapters.save(weights, tmp_path, dtype)
        for slot, name in enumerate(ADAPTERS):
            adapter = read_adapter(tmp_path / name, self.config, dtype=dtype)
            for group in MODULE_GROUPS:
                trained = [getattr(layer, group) for layer in pools.layers]
                np.testing.assert_array_equal(
                    np.stack([pool.num_pages[slot] for pool in trained]),
                    adapter.counts(group),
                )
                for index in range(adapter.num_pages(group)):
                    page = int(trained[0].page_table[slot, index])
                    a, b = in_pools(adapter, group, index, self.config)
                    np.testing.assert_array_equal(
                        np.stack([pool.a[page] for pool in trained]), a
                    )
                    np.testing.assert_array_equal(
                        np.stack([pool.b[page] for pool in trained]), b
                    )

    def test_gradients_respect_ranks_and_targets(self):
        def total(weights):
            pools = self.adapters.pools(weights, jnp.float32)
            return sum(
                pool.a.sum() + pool.b.sum() for layer in pools.layers for pool in layer
            )

        gradient = jax.grad(total)(self.random_weights())
        ((a, b),) = gradient["gate_up"]
        # Slots 0 and 1 have no gate and up; slot 2, caesar, has one page of rank 12.
        assert a.shape[:3] == (4, 2, 16)
        np.testing.assert_array_equal(a[0, :, :12], 1.0)
        np.testing.assert_array_equal(a[0, :, 12:], 0.0)
        np.testing.assert_array_equal(b[0, :12], 2.0)
        np.testing.assert_array_equal(b[0, 12:], 0.0)
        # Morse has up alone, of rank 20 on two pages.
        np.testing.assert_array_equal(a[1:3, 0], 0.0)
        np.testing.assert_array_equal(a[1:3, 1].sum(axis=(0, 1)), 20.0)


def test_every_adapter_is_described():
    assert list(ADAPTERS) == list(TASKS)
    assert FULL.config.vocab_size == VOCAB_SIZE


@pytest.mark.usefixtures("optax_promotes", "quick_compiles")
@pytest.mark.slow
def test_script_runs(tmp_path, capsys):
    out = tmp_path / "tiny_llama"
    train_tiny.main([str(out), "--smoke", "--implementation", "xla"])
    table = json.loads((out / "results.json").read_text())
    assert table["num_words"] == SMOKE.num_test_words
    ranks = [row["rank"] for row in table["tasks"].values()]
    assert ranks == [fields["r"] for fields in ADAPTERS.values()]
    printed = capsys.readouterr().out
    steps = [line.split()[1] for line in printed.splitlines() if "loss" in line]
    assert steps == ["4", "8", "4", "8"]
    for name in TASKS:
        adapter = read_adapter(out / "adapters" / name, SMOKE.config, dtype=jnp.float32)
        # B begins as zeros: a step reached every module.
        assert all(row.delta_norm > 0 for row in adapter.report.rows)
