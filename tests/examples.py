"""How many examples a property is tried with: all in ``make test``, a quarter in ``test-fast``."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """``count`` of them where hypothesis's own profile has its usual 100, and no deadline."""
    usual = settings.get_profile("default").max_examples
    return settings(max_examples=count * settings().max_examples // usual, deadline=None)
