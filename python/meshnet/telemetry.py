"""Metrics for Prometheus, and the one way in which our servers count their calls.

    telemetry = Telemetry("tracker")
    answer = await telemetry.observe("register", lambda: tracker.register(request))
    with telemetry.serve("127.0.0.1:9100"):
        ...

Every program has a registry of its own, so that several can run in one process of tests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import prometheus_client as prometheus

from meshnet.errors import ControlError, Reason
from meshnet.transport import Security, check_listen, follow_files, is_loopback

__all__ = ["Telemetry", "serve_metrics"]

_Answer = TypeVar("_Answer")
_LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
# Of what lasts as long as a conversation.
_STREAM_BUCKETS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600)


class Telemetry:
    """One program's metrics, all named meshnet_PROGRAM_..."""

    def __init__(self, program: str) -> None:
        self.registry = prometheus.CollectorRegistry()
        # Memory, processor time, open files.
        prometheus.ProcessCollector(registry=self.registry)
        self._prefix = f"meshnet_{program}"
        self._methods: dict[str, tuple[prometheus.Counter, prometheus.Histogram]] = {}
        self._calls = self.counter("calls_total", "Calls by method.", ("method",))
        self._refusals = self.counter("refusals_total", "Refused calls.", ("method", "reason"))
        self._seconds = self.histogram(
            "call_seconds", "How long calls take that are no streams.", ("method",)
        )

    def counter(
        self, name: str, help_text: str, labels: tuple[str, ...] = ()
    ) -> prometheus.Counter:
        """A number that only grows."""
        return prometheus.Counter(
            f"{self._prefix}_{name}", help_text, labels, registry=self.registry
        )

    def histogram(
        self, name: str, help_text: str, labels: tuple[str, ...] = (), *, streams: bool = False
    ) -> prometheus.Histogram:
        """Times in seconds: of calls, or of streams, which may last."""
        return prometheus.Histogram(
            f"{self._prefix}_{name}",
            help_text,
            labels,
            registry=self.registry,
            buckets=_STREAM_BUCKETS if streams else _LATENCY_BUCKETS,
        )

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A number that is read when somebody asks."""
        gauge = prometheus.Gauge(f"{self._prefix}_{name}", help_text, registry=self.registry)
        gauge.set_function(read)

    def refused(self, method: str, reason: Reason) -> None:
        """Counts the refusal of a call that observe() does not see."""
        self._refusals.labels(method, reason.name).inc()

    def text(self) -> str:
        """All metrics in Prometheus's format."""
        return prometheus.generate_latest(self.registry).decode()

    def serve(
        self, listen: str, security: Security | None = None
    ) -> contextlib.AbstractContextManager[int]:
        """As serve_metrics()."""
        return serve_metrics(self.registry, listen, security)

    def _of(self, method: str) -> tuple[prometheus.Counter, prometheus.Histogram]:
        """A method's counter and histogram: finding them by label takes longer than counting."""
        found = self._methods.get(method)
        if found is None:
            found = self._calls.labels(method), self._seconds.labels(method)
            self._methods[method] = found
        return found

    async def observe(self, method: str, call: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Runs one call and counts it, its time and its refusal."""
        calls, seconds = self._of(method)
        calls.inc()
        started = time.perf_counter()
        try:
            return await call()
        except ControlError as error:
            self.refused(method, error.reason)
            raise
        finally:
            seconds.observe(time.perf_counter() - started)


@contextlib.contextmanager
def serve_metrics(
    registry: prometheus.CollectorRegistry, listen: str, security: Security | None = None
) -> Iterator[int]:
    """Serves /metrics on HOST:PORT while the block runs; gives the port.

    On loopback in plaintext; beyond it by mutual TLS, or in plaintext where `security` says so.

    Raises ControlError: INSECURE_TRANSPORT, CONFIGURATION_INVALID.
    """
    security = security or Security()
    tls = None if is_loopback(listen) else security.tls
    check_listen(listen, secured=tls is not None, insecure=security.insecure)
    host, _, port = listen.rpartition(":")
    try:
        if tls is None:
            server, thread = prometheus.start_http_server(int(port), host.strip("[]"), registry)
        else:
            tls.checked()
            server, thread = prometheus.start_http_server(
                int(port),
                host.strip("[]"),
                registry,
                certfile=str(tls.certificate),
                keyfile=str(tls.key),
                client_cafile=str(tls.authority),
                client_auth_required=True,
            )
            listening: Any = server.socket
            follow_files(listening.context, tls)
            # By the thread of each connection: one that says nothing must not keep the others out.
            listening.do_handshake_on_connect = False
    except (OSError, ValueError) as error:
        raise ControlError(
            Reason.CONFIGURATION_INVALID, f"expected to serve metrics on {listen}: {error}"
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
