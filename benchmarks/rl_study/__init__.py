"""The parts of `benchmarks/rl_learning.py`: setting and arms, one run, which runs, figures."""
