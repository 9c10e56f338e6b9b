"""The distributed core: workers, channels, placement and traces. Knows nothing of robots or language models."""
