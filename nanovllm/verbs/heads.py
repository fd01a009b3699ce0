"""Heads on the host, in fp32: embeddings and probabilities from a prompt's pooled hidden state."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Head:
    """A classification head. ``weight``: fp32 [n, C]; ``activation`` of its logits: "softmax", "sigmoid" or ""."""

    weight: np.ndarray
    activation: str

    def probabilities(self, state: np.ndarray) -> list[float]:
        """Probabilities of the n labels for a pooled state, fp32 [C]."""
        logits = self.weight @ state
        if self.activation == "sigmoid":
            logits = 1 / (1 + np.exp(-logits.clip(-80)))  # fp32 overflows at 88
        elif self.activation == "softmax":
            exponentials = np.exp(logits - logits.max())
            logits = exponentials / exponentials.sum()
        return logits.tolist()


def as_embedding(state: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
    """The first ``dimensions`` of a state [C], divided by their L2 norm."""
    state = state[:dimensions]
    return state / max(float(np.sqrt(state @ state)), 1e-12) if normalize else state
