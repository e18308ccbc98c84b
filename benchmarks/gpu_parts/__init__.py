"""The parts of `benchmarks/gpu.py`, each a process: python -m benchmarks.gpu_parts PART SECONDS.

A line `  NAME = VALUE` is a figure. Nothing here needs more than torch, triton and transformers.
"""
