"""``python -m onebit_jax``: the command line."""

from onebit_jax import cli

if __name__ == "__main__":
    raise SystemExit(cli.main())
