"""`python -m punica_jax`: the command line."""

from punica_jax.cli import app

if __name__ == "__main__":
    app()
