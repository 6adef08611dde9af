"""Serving: the same weights for SGLang and vLLM."""
