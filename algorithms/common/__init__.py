"""What every algorithm shares. Imports nothing, so that configs load without torch."""
