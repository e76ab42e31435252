"""Decoding on several GPUs, as a model and as measured: python -m profiling.scaling [--help]."""
