"""The seam for inputs of a batch besides tokens: block copies, states, drafts, images. Imports no torch.

A message is a plain value that pickles. ``messages`` of a batch holds at most one of each class, which every rank
receives; the part of the runner that knows the class looks it up. A batch without messages has an empty dict. Whoever
schedules adds them: the block manager, the scheduler, and the attachments of sequences. Knows neither queues nor
devices.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

Messages = dict[type, Any]  # class -> the message; of parts of attachments: a list of (place in the batch, part)
CANNOT_CUT = "truncate_prompt_tokens cannot cut a prompt that has more than tokens."


class Attachment:
    """Inputs of one prompt besides its tokens: images. It hangs on a sequence.

    Attributes:
        prompt_ids: of the prompt as its user sees them, integers [T].
        token_ids: of the prompt as the cache compares them, int32: below 0 where an input replaces the embedding, made
            of the contents of that input. Equal inputs have equal ids, and no model samples such an id.
        failure: the reason why a missing input cannot be loaded again, or None.
    """

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    failure: str | None = None

    def is_ready(self, start: int) -> bool:
        """Whether the inputs of tokens from ``start`` on are in memory; begins to load missing ones."""
        return True

    def chunk_end(self, start: int, stop: int) -> int:
        """Where a chunk from ``start`` may end that cannot go beyond ``stop``; ``start``: nowhere."""
        return stop

    def part(self, start: int, stop: int) -> Any:
        """The message of a chunk with tokens [start, stop); None if it changes nothing there."""
        raise NotImplementedError


def attached(chunks: Iterable[tuple[Attachment | None, int, int]]) -> Messages:
    """The parts of attachments that chunks (attachment, start, stop) need, by class."""
    found: Messages = {}
    for place, (attachment, start, stop) in enumerate(chunks):
        if attachment is not None and (part := attachment.part(start, stop)) is not None:
            found.setdefault(type(part), []).append((place, part))
    return found
