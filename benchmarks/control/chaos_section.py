"""Random kills under load: counts of what must not happen, all of which have to be zero."""

from __future__ import annotations

from collections.abc import AsyncIterator

from benchmarks.control.chaos import ChaosOptions, run_chaos
from benchmarks.control.metrics import Metric, Settings, at_least, at_most, say

__all__ = ["measure"]

_DEADLINE_SECONDS = 20.0
_SEED = 20_260


async def measure(settings: Settings) -> AsyncIterator[Metric]:
    """See the module."""
    kills = 4 if settings.quick else 100
    found = await run_chaos(ChaosOptions(kills=kills, seed=_SEED, deadline=_DEADLINE_SECONDS), say)
    for violation in found.violations():
        say(f"chaos: {violation}")
    say(f"chaos: kills {dict(found.kills)}, errors {dict(found.errors)}")
    yield Metric(
        "chaos_kills", found.kills.total(), "kills", None if settings.quick else at_least(100)
    )
    yield Metric("chaos_requests", found.requests, "")
    yield Metric("chaos_answered", found.answers, "")
    yield Metric("chaos_refused_with_reason", found.errors.total(), "")
    yield Metric("chaos_slowest_s", found.slowest, "s", at_most(_DEADLINE_SECONDS))
    yield Metric("chaos_broken_requests", len(found.broken_requests), "", at_most(0))
    yield Metric("chaos_ghost_registrations", len(found.ghosts), "", at_most(0))
    yield Metric("chaos_orphans", len(found.orphans), "", at_most(0))
    yield Metric("chaos_leaked_sessions", len(found.leaked_sessions), "", at_most(0))
    yield Metric("chaos_ledger_faults", len(found.ledger), "", at_most(0))
