"""Entry points of torchrun: `torchrun -m tasks.jobs.NAME CONFIG.json`.

A job needs torch, transformers, tokenizers, safetensors and numpy; no Prefect, MLflow, DVC,
pydantic or pyarrow.
"""
