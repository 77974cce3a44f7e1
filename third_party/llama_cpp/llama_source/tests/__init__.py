"""Tests of llama_source, on small repositories that they make."""
