"""What things cost, measured: `python -m benchmarks.NAME [--quick] [--json PATH]`.

results/NAME.json holds the last full run of each. See docs/benchmarks.md.
"""
