"""The parts of `benchmarks/lordo.py`: setting and arms, data, one run, the queue, the figures."""
