"""How one step runs: plain functions, paths in and paths out. Flows wrap them as Prefect tasks."""
