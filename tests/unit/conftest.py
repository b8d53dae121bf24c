"""Settings of all unit tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from long import examples

# How long an example takes depends on the load of the machine: tests with a bound on time assert it themselves.
settings.register_profile(
    "any load", settings(max_examples=examples(100)), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any load")
