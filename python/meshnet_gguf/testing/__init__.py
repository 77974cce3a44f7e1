"""Fakes for tests of what uses this package."""
