"""What others measured on real GPUs, replayed: predicted against measured latencies, with the errors as they are."""
