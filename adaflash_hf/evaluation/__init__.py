"""Measuring: plain against AdaFlash decoding, the demo, and their prompts."""
