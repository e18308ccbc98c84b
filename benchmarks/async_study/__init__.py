"""The parts of `benchmarks/async_pipeline.py`: setting and arms, one run, which runs, figures."""
