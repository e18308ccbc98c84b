"""The fast twins of the algorithms' inner loops: torch and triton only."""
