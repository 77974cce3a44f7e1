"""What the gateway counts, for Prometheus and the status page."""

from __future__ import annotations

import time

import prometheus_client as prometheus

from meshnet_gguf.gateway.admission import Admission
from meshnet_gguf.gateway.kept_sessions import KeptSessions
from meshnet_gguf.status import GatewayStatus

__all__ = ["GatewayMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class GatewayMetrics:
    """Counters of one gateway, in a registry of their own."""

    def __init__(self, admission: Admission, kept: KeptSessions) -> None:
        self.registry = prometheus.CollectorRegistry()
        self._admission = admission
        self._began = time.monotonic()
        self.requests = prometheus.Counter(
            "meshnet_gateway_requests",
            "Requests by endpoint and HTTP status.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.refusals = prometheus.Counter(
            "meshnet_gateway_refusals",
            "Requests refused or failed, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.prompt_tokens = prometheus.Counter(
            "meshnet_gateway_prompt_tokens", "Tokens of prompts.", registry=self.registry
        )
        self.completion_tokens = prometheus.Counter(
            "meshnet_gateway_completion_tokens", "Tokens of answers.", registry=self.registry
        )
        self.cached_tokens = prometheus.Counter(
            "meshnet_gateway_cached_prompt_tokens",
            "Tokens of prompts that a kept session had read already.",
            registry=self.registry,
        )
        self.first_token = prometheus.Histogram(
            "meshnet_gateway_time_to_first_token_seconds",
            "From a request's last byte to its answer's first text.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = prometheus.Histogram(
            "meshnet_gateway_request_seconds",
            "From a request's last byte to the end of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.clients_gone = prometheus.Counter(
            "meshnet_gateway_clients_gone",
            "Answers that were given up because the client had gone.",
            registry=self.registry,
        )
        for name, what, value in (
            ("active_slots", "Answers under way.", lambda: admission.active),
            ("queued_requests", "Requests that wait for a slot.", lambda: admission.queued),
            ("kept_sessions", "Sessions that wait for a next turn.", lambda: len(kept)),
            ("slots", "Answers that may be under way at once.", lambda: admission.max_active),
        ):
            prometheus.Gauge(f"meshnet_gateway_{name}", what, registry=self.registry).set_function(
                value
            )

    def exposition(self) -> bytes:
        """In Prometheus' text format."""
        return prometheus.generate_latest(self.registry)

    def status(self) -> GatewayStatus:
        """For the status page: what is counted, since the start."""
        return GatewayStatus(
            uptime_seconds=time.monotonic() - self._began,
            active_slots=self._admission.active,
            slots=self._admission.max_active,
            queued_requests=self._admission.queued,
            prompt_tokens=sum(_counts(self.prompt_tokens).values()),
            completion_tokens=sum(_counts(self.completion_tokens).values()),
            refusals=_counts(self.refusals),
        )


def _counts(counter: prometheus.Counter) -> dict[str, int]:
    """By the counter's label; under an empty name when it has none."""
    return {
        "".join(sample.labels.values()): int(sample.value)
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
