"""Tries a candidate for the next pin of llama.cpp, away from the production pin."""
