"""Doubles and helpers for tests of the control plane."""
