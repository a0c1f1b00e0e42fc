"""A training loop for small sequence models: many steps a dispatch, stop by a rule.

The learning rate warms up, holds until every task's validation accuracy reaches a mark
(or a limit of steps), then falls to zero along a cosine. So a device whose rounding
makes it learn a little later just holds a little longer.

Knows examples and a function from weights to logits; nothing of what the weights are.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Float, Int

from demos.tiny_data import Examples

# `logits_of(weights, tokens i32[seqs, seq_len], slots i32[seqs])`
# -> `f32[seqs, seq_len, vocab]`. A `jax.tree_util.Partial`, so that arrays it binds
# (the weights that do not train) are arguments of the compiled programs.
LogitsOf = Callable[[Any, Array, Array], Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long to train, and how fast.

    Attributes:
      peak_lr: the learning rate after the warm-up.
      warmup_steps: steps in which it rises linearly from zero.
      max_hold_steps: most steps before the rate begins to fall, warm-up included.
      decay_steps: steps in which it falls to zero along a cosine.
      stop_at: validation accuracy of every kind of example that ends the hold.
      batch_size: sequences a step.
      dispatch_steps: steps between validations, run as one program; divides
        `max_hold_steps` and `decay_steps`.
      weight_decay: of AdamW.

    Raises:
      ValueError: `dispatch_steps` does not divide the others.
    """

    peak_lr: float
    warmup_steps: int
    max_hold_steps: int
    decay_steps: int
    stop_at: float = 0.99
    batch_size: int = 512
    dispatch_steps: int = 100
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_hold_steps", "decay_steps"):
            if getattr(self, name) % self.dispatch_steps:
                raise ValueError(
                    f"{name} must be a multiple of dispatch_steps "
                    f"{self.dispatch_steps}, got {getattr(self, name)}"
                )

    def hold_lr(self, step: int) -> float:
        """Return the rate of a step before the fall."""
        return self.peak_lr * min(1.0, (step + 1) / self.warmup_steps)

    def decay_lr(self, step: int) -> float:
        """Return the rate of a step of the fall, counted from its beginning."""
        return self.peak_lr * 0.5 * (1 + math.cos(math.pi * step / self.decay_steps))


def train(
    logits_of: LogitsOf,
    weights: Any,
    examples: Examples,
    validation: Examples,
    kind_names: Sequence[str],
    schedule: Schedule,
    rng: np.random.Generator,
) -> Any:
    """Train weights on examples drawn at random, with repetition.

    Args:
      logits_of: see `LogitsOf`; differentiable in the weights.
      weights: a pytree of float32 arrays; donated.
      examples: what to learn; only answers count in the loss.
      validation: what decides when to stop.
      kind_names: names of the kinds of examples, in order of `Examples.kinds`.
      schedule: how long and how fast.
      rng: decides which examples a step sees.

    Returns:
      The trained weights.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(schedule.weight_decay, mask=_is_matrix),
    )
    state = optimizer.init(weights)
    run = jax.jit(functools.partial(_run_steps, optimizer), donate_argnums=(1, 2))
    data = _to_device(examples)
    start_s = time.monotonic()

    def dispatch(step: int, rates: list[float], weights: Any, state: Any):
        shape = (len(rates), schedule.batch_size)
        index = jnp.asarray(rng.integers(0, len(examples), shape), jnp.int32)
        lr = jnp.asarray(rates, jnp.float32)
        weights, state, losses = run(logits_of, weights, state, data, index, lr)
        accuracy = exact_match(logits_of, weights, validation, schedule.batch_size)
        rows = [f"{n} {a:.3f}" for n, a in zip(kind_names, accuracy, strict=True)]
        print(
            f"step {step + len(rates):5d}  {time.monotonic() - start_s:6.1f} s  "
            f"lr {rates[-1]:.1e}  loss {float(losses.mean()):.4f}  {'  '.join(rows)}",
            flush=True,
        )
        return weights, state, min(accuracy) >= schedule.stop_at

    step, size = 0, schedule.dispatch_steps
    done = False
    while step < schedule.max_hold_steps and not done:
        rates = [schedule.hold_lr(step + k) for k in range(size)]
        weights, state, done = dispatch(step, rates, weights, state)
        step += size
    for first in range(0, schedule.decay_steps, size):
        rates = [schedule.decay_lr(first + k) for k in range(size)]
        weights, state, _ = dispatch(step + first, rates, weights, state)
    return weights


def exact_match(
    logits_of: LogitsOf, weights: Any, examples: Examples, batch_size: int
) -> list[float]:
    """Return each kind's share of examples that greedy decoding would answer right.

    One forward pass tells: greedy decoding gives exactly the answer if and only if,
    after every beginning of the answer, the likeliest token is the answer's next.
    """
    right = []
    for first in range(0, len(examples), batch_size):
        index = np.arange(first, first + batch_size)
        part = examples.select(np.minimum(index, len(examples) - 1))
        right.append(np.asarray(_matches(logits_of, weights, *_to_device(part))))
    hits = np.concatenate(right)[: len(examples)]
    kinds = np.unique(examples.kinds)
    return [float(hits[examples.kinds == kind].mean()) for kind in kinds]


def _run_steps(optimizer, logits_of, weights, state, data, index, lr):
    """Run one optimiser step for each row of `index i32[steps, batch_size]`."""

    def step(carry, now):
        weights, state = carry
        index, lr = now
        batch = [array[index] for array in data]
        loss, gradient = jax.value_and_grad(functools.partial(_loss, logits_of))(
            weights, *batch
        )
        update, state = optimizer.update(gradient, state, weights)
        weights = jax.tree.map(lambda w, u: w - lr * u, weights, update)
        return (weights, state), loss

    (weights, state), losses = lax.scan(step, (weights, state), (index, lr))
    return weights, state, losses


def _loss(logits_of, weights, tokens, starts, ends, slots):
    logits, targets, counts = _predict(logits_of, weights, tokens, starts, ends, slots)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return loss.mean(where=counts)


@jax.jit
def _matches(logits_of, weights, tokens, starts, ends, slots):
    logits, targets, counts = _predict(logits_of, weights, tokens, starts, ends, slots)
    return ((logits.argmax(-1) == targets) | ~counts).all(axis=1)


def _predict(
    logits_of: LogitsOf,
    weights: Any,
    tokens: Int[Array, "seqs seq_len"],
    starts: Int[Array, "seqs"],
    ends: Int[Array, "seqs"],
    slots: Int[Array, "seqs"],
) -> tuple[Float[Array, "seqs seq_len vocab"], Array, Array]:
    """Return logits, the tokens they predict, and which of those are answers."""
    tokens = tokens.astype(jnp.int32)
    logits = logits_of(weights, tokens, slots.astype(jnp.int32))
    targets = jnp.roll(tokens, -1, axis=1)
    place = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
    starts, ends = (edge.astype(jnp.int32)[:, None] for edge in (starts, ends))
    return logits, targets, (place >= starts) & (place < ends)


def _to_device(examples: Examples) -> list[Array]:
    fields = (examples.tokens, examples.answer_starts, examples.ends, examples.slots)
    return [jnp.asarray(field) for field in fields]


def _is_matrix(weights: Any) -> Any:
    return jax.tree.map(lambda w: w.ndim > 1, weights)
