"""What runs in which order: Prefect flows. No torch below this folder."""
