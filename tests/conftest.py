"""For all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A loaded machine isn't a fault: examples may take as long as they do. pytest-timeout ends what hangs.
settings.register_profile("tidemill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tidemill")
