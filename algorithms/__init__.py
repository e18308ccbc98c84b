"""The ideas: pure torch. No Prefect, MLflow, DVC or YAML below this folder."""
