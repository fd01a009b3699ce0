"""Messages of a prefill with images: the rows of features that its tokens take, and their rotary positions."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ImageRows:
    """Features [start, stop) of an image of ``num_tokens``, for the packed tokens of a chunk.

    Attributes:
        digest: of the contents.
        pixels: its ``tensors`` are those that the tower takes, on the CPU; on rank 0 alone.
    """

    digest: bytes
    num_tokens: int
    start: int
    stop: int
    pixels: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pixels": None}

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ImagePart:
    """The images in a chunk of n tokens, and the positions of these.

    Attributes:
        rows: of the images in the chunk, in the order of their tokens.
        positions: rotary positions by time, height and width, int32 [3, n]; None where they are the places of tokens.
        shift: from the place of a token after the images to its position.
    """

    rows: tuple[ImageRows, ...]
    positions: np.ndarray | None
    shift: int

