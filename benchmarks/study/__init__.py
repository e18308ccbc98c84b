"""What studies of many runs share: data, a search for rates, a queue that keeps results."""
