"""The reference control plane: tracker, routing, ledger, telemetry, relay.

It knows workers only by what they measure and by opaque fingerprints: nothing here depends on
what the workers compute with or on what their models look like.
"""
