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

    def is_ready(self, start: int) -> bool:
        """Whether the inputs of tokens from ``start`` on are in memory; begins to load those that are not."""
        return True

    def chunk_end(self, start: int, stop: int) -> int:
        """Where a chunk from ``start`` may end that cannot go beyond ``stop``; ``start``: nowhere."""
        return stop

    def part(self, start: int, stop: int) -> Any:
        """The message of a chunk with tokens [start, stop); None if it changes nothing there."""
        raise NotImplementedError


class Loading:
    """Inputs of one prompt that load on threads.

    Attributes:
        prompt_ids: integers [T], with a placeholder for each input.
        num_inputs: inputs to load.
    """

    prompt_ids: np.ndarray
    num_inputs: int

    def begin(self) -> None:
        """Start to load; may be called again."""
        raise NotImplementedError

    def is_ready(self, timeout_s: float) -> bool:
        """Wait for at most this time; returns whether ``attachment`` would not wait."""
        raise NotImplementedError

    def attachment(self) -> Attachment:
        """The loaded inputs; waits for them. Raises RequestError for one that cannot be read."""
        raise NotImplementedError


class Attachments:
    """What an engine makes of prompts that hold more than tokens. These are the defaults: it takes none.

    Attributes:
        placeholder: text of an input in a conversation, for chat templates that take strings.
    """

    placeholder = ""

    def takes(self, prompt: Any) -> bool:
        """Whether a prompt may hold other inputs; ``encode`` then takes it."""
        return False

    def encode(self, prompt: Any) -> tuple[str | None, Any]:
        """A prompt's text, and its ``Loading`` or, if it holds no other inputs, its token ids; raises RequestError."""
        raise NotImplementedError

    def loaded(self, prompt: Any) -> Any:
        """A prompt for several uses, with its inputs loaded; raises RequestError for one that cannot be read."""
        return prompt

    def split(self, conversation: Any) -> tuple[Any, dict[str, Any]]:
        """A conversation for the chat template, and the keys of a prompt that hold its other inputs."""
        return conversation, {}

    def placed(self, text: str) -> str:
        """The text of a conversation with other inputs, with the tokens that the model expects around each."""
        return text

    def has_room(self) -> bool:
        """Whether memory has room for further inputs."""
        return True


def attached(chunks: Iterable[tuple[Attachment | None, int, int]]) -> tuple[tuple[int, Any], ...]:
    """The messages of chunks (attachment, start, stop), each with its place."""
    parts = [(i, None if each is None else each.part(start, stop)) for i, (each, start, stop) in enumerate(chunks)]
    return tuple((i, part) for i, part in parts if part is not None)
