"""The seam for inputs of a prompt besides tokens: images. Imports no torch.

An ``Attachment`` hangs on a sequence. The parts that a prefill needs of it are frozen messages in
``PrefillBatch.attachments``, which every rank receives; a ``Part`` of the runner takes them in. The host half of a kind
is listed in ``engine/variants.py``. Knows neither queues nor devices.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

CANNOT_CUT = "truncate_prompt_tokens cannot cut a prompt that has more than tokens."


class Attachment:
    """Inputs of one prompt besides its tokens.

    Attributes:
        prompt_ids: of the prompt as its user sees them, integers [T].
        token_ids: of the prompt as the cache compares them, int32: below 0 where an input replaces the embedding, made
            of the contents of that input. Equal inputs have equal ids, and no model samples such an id.
    """

    prompt_ids: np.ndarray
    token_ids: np.ndarray

    def chunk_end(self, start: int, stop: int) -> int:
        """Where a chunk from ``start`` may end that cannot go beyond ``stop``; ``start``: nowhere."""
        return stop

    def part(self, start: int, stop: int) -> Any:
        """The message of a chunk with tokens [start, stop); None if it changes nothing there."""
        raise NotImplementedError


def attached(chunks: Iterable[tuple[Attachment | None, int, int]]) -> tuple[tuple[int, Any], ...]:
    """The messages of chunks (attachment, start, stop), each with its place."""
    parts = [(i, None if each is None else each.part(start, stop)) for i, (each, start, stop) in enumerate(chunks)]
    return tuple((i, part) for i, part in parts if part is not None)
