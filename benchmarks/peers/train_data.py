"""The batches of the training comparison, the same for every worker."""

import numpy as np

BATCHES = 4


def batches(vocabulary: int, batch: int, length: int) -> list[np.ndarray]:
    """int64 `[batch, length + 1]` arrays of uniformly random tokens: speed does not ask what they say."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, (batch, length + 1)) for _ in range(BATCHES)]
