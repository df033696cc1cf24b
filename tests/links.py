"""Whether this machine can limit links, for the tests that need it."""

import pytest

from onebit_jax.cli import netns


def why_not():
    """What is missing, or what was refused (root alone may not do), or None."""
    try:
        with netns.network(1, "1gbit"):
            return None
    except netns.NetworkError as error:
        return str(error)


REASON = why_not()
needs_links = pytest.mark.skipif(REASON is not None, reason=str(REASON))
