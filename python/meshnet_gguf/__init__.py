"""Meshnet for GGUF models: client, models, and what grows around the shard workers."""
