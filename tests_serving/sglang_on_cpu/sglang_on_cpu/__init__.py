"""The CUDA build of SGLang 0.5.23 on a CPU: slow, greedy only, for tests and never for serving."""
