"""Settings of the analysis tests, which run where there is no torch, and so without the conftest above."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("analysis", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("analysis")
