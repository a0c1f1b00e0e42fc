"""Give somebody else's Flax model several adapters, and train them in mixed batches.

    python -m demos.example_flax_model

The model is a plain Flax NNX module that knows nothing of punica-jax. Its two linear
layers are wrapped from outside: the wrapper calls the layer, then `pj.lora` adds to
every row its own adapter's product. Four adapters then learn four tasks at once, every
step in one batch whose rows are mixed; the model's own weights stay as they are.

Needs the extra `dev` (optax). A few seconds on a CPU.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import punica_jax as pj

D_IN, D_HIDDEN, D_OUT, RANK = 16, 64, 8, 8
ROWS, STEPS = 256, 200
# What each adapter is to make of the model's own output.
TASKS = {
    "negate": lambda y: -y,
    "double": lambda y: 2 * y,
    "reverse": lambda y: y[:, ::-1],
    "shift": lambda y: jnp.roll(y, 1, axis=1),
}


class Mlp(nnx.Module):
    """Somebody else's model."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(D_IN, D_HIDDEN, rngs=rngs)
        self.out = nnx.Linear(D_HIDDEN, D_OUT, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.hidden(x)))


class Adapter(nnx.Param):
    """What trains: A and B of all adapters, so that an optimiser can tell them."""


class Slots(nnx.Variable):
    """Each row's adapter, -1 for none: one variable that all wrapped layers share."""


class Adapted(nnx.Module):
    """A linear layer, any that maps rows to rows, with a LoRA for each row."""

    def __init__(self, layer: nnx.Linear, slots: Slots, rngs: nnx.Rngs):
        shape = (len(TASKS), RANK, layer.in_features)
        a = jax.random.normal(rngs.params(), shape) / layer.in_features**0.5
        self.layer = layer
        self.slots = slots
        self.a = Adapter(a)
        self.b = Adapter(jnp.zeros((len(TASKS), layer.out_features, RANK)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return pj.lora(self.layer(x), x, self.a[...], self.b[...], self.slots[...])


def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw a mixed batch: random rows, each for a random adapter or none (-1)."""
    of_x, of_slots = jax.random.split(key)
    x = jax.random.normal(of_x, (ROWS, D_IN))
    return x, jax.random.randint(of_slots, (ROWS,), -1, len(TASKS))


def wanted(y: jax.Array, slots: jax.Array) -> jax.Array:
    """Return what each row's adapter should make of the model's own output."""
    answers = y
    for slot, task in enumerate(TASKS.values()):
        answers = jnp.where(slots[:, None] == slot, task(y), answers)
    return answers


def row_errors(model: Mlp, slots: Slots, base: Mlp, x: jax.Array) -> jax.Array:
    """Return each row's squared error against what its adapter should answer."""
    target = wanted(base(x), slots[...])
    return jnp.square(model(x) - target).mean(axis=-1)


@nnx.jit
def train_step(
    model: Mlp, slots: Slots, base: Mlp, optimizer: nnx.Optimizer, key: jax.Array
) -> None:
    x, slots[...] = draw(key)

    def loss(model: Mlp) -> jax.Array:
        return row_errors(model, slots, base, x).mean()

    gradients = nnx.grad(loss, argnums=nnx.DiffState(0, Adapter))(model)
    optimizer.update(model, gradients)


def main() -> None:
    """Train, and print each adapter's mean squared error before and after."""
    rngs = nnx.Rngs(0)
    base = Mlp(rngs)

    # Wrap a copy of the model, so that `base` still says what it answers alone.
    model = nnx.clone(base)
    slots = Slots(jnp.zeros((ROWS,), jnp.int32))
    for name in ("hidden", "out"):
        setattr(model, name, Adapted(getattr(model, name), slots, rngs))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=Adapter)

    def errors() -> list[float]:
        x, slots[...] = draw(jax.random.key(1))
        error = row_errors(model, slots, base, x)
        return [
            float(error[slots[...] == slot].mean()) for slot in range(-1, len(TASKS))
        ]

    before = errors()
    for key in jax.random.split(jax.random.key(2), STEPS):
        train_step(model, slots, base, optimizer, key)
    after = errors()

    names = ["no adapter", *TASKS]
    for name, first, last in zip(names, before, after, strict=True):
        print(f"{name:10s}  error before {first:.4f}  after {last:.4f}")


if __name__ == "__main__":
    main()
