"""The input processor: prompts and parameters of a call become requests, and requests become sequences.

Owns the ids and the seeds. Knows nothing of queues; limits are those of ``checks.py``.
"""

from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np
import xxhash

from nanovllm.config import Config
from nanovllm.engine.checks import Checks
from nanovllm.engine.request import Completion, Request
from nanovllm.engine.text.prompts import Prompt, as_list, as_token_ids, split_prompt
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.engine.token_processor import TokenProcessors
from nanovllm.engine.variants import READOUTS, make_attachments
from nanovllm.errors import RequestError
from nanovllm.messages import CANNOT_CUT, Attachment
from nanovllm.readouts import Readout
from nanovllm.sampling_params import SamplingParams

# A prompt's text, if it has one, and its token ids, not yet checked; an Attachment if it has more than these.
Encoded = tuple[str | None, Any]
Params = SamplingParams | ListLike[SamplingParams] | None


class InputProcessor:
    """Makes requests and their sequences; one per engine.

    Args:
        config: limits, and the engine's seed.
        num_kvcache_blocks: size of the KV cache.
        tokenizer: for prompts that are text.
        token_processors: for sequences whose every token the host looks at.
    """

    def __init__(self, config: Config, num_kvcache_blocks: int, tokenizer: AsyncTokenizer,
                 token_processors: TokenProcessors):
        self.config, self.checks = config, Checks(config, num_kvcache_blocks, token_processors)
        self._tokenizer, self._token_processors = tokenizer, token_processors
        self.attachments = make_attachments(config, tokenizer)
        self._num_seqs = 0  # the next seq_id

    def encode(self, prompts: ListLike[Prompt], first: int = 0, params: Params = None) -> list[Encoded]:
        """Prompts with their token ids; a text that comes with ids is carried, and not encoded.

        ``first``: the index of the first one, for errors. ``params`` that cut texts let them be of any length.
        """
        split = []
        for i, prompt in enumerate(prompts, first):
            try:
                if self.attachments is not None and self.attachments.takes(prompt):
                    split.append(self.attachments.encode(prompt))
                else:
                    split.append(split_prompt(prompt))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}" if first + len(prompts) > 1 else str(error)) from None
        texts = [text if ids is None else None for text, ids in split]
        if not any(text is not None for text in texts):
            return split
        encoded = iter(self._tokenizer.encode(texts, True, first, (params, self.config.max_model_len)))
        return [(text, next(encoded) if ids is None and text is not None else ids) for text, ids in split]

    def make(self, prompt: Prompt, params: SamplingParams, index: int = 0) -> Request:
        """A request with the engine's own copy of its parameters, see ``Checks.copy_of``.

        Raises:
            RequestError: it can never be served.
        """
        ((text, ids),) = self.encode([prompt], 0, params)
        token_ids, params = self.checks.checked(as_token_ids(ids), params)
        self.checks.check_ids("token id", token_ids)
        return self.request(text, token_ids, params, index, given=ids)

    def make_all(self, prompts: ListLike[Encoded], params: Params, is_checked: bool = False) -> list[Request]:
        """The requests of a call, whose parameters are one for all or one for each. ``is_checked``: they are our own.

        Raises:
            RequestError: one can never be served, with its index, or the counts differ. No id was given away.
        """
        every = self.params_of(len(prompts), params)
        copies: dict[int, SamplingParams] = {}  # copies by the identity of the user's object
        checked = []
        for i, ((_, token_ids), given) in enumerate(zip(prompts, every, strict=True)):
            try:
                if id(given) not in copies:
                    copies[id(given)] = given if is_checked else self.checks.copy_of(given)
                checked.append(self.checks.checked(as_token_ids(token_ids), copies[id(given)]))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from None
        try:
            self.checks.check_ids("", np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in checked)]))
        except RequestError:
            for i, (ids, _) in enumerate(checked):  # the slower way
                self.checks.check_ids(f"prompt {i}: token id", ids)
        return [
            self.request(text, ids, resolved, i, given=given)
            for i, ((text, given), (ids, resolved)) in enumerate(zip(prompts, checked, strict=True))
        ]

    @staticmethod
    def params_of(num_prompts: int, params: Params) -> list[SamplingParams]:
        """The parameters of each prompt, given one for all or one for each."""
        every = [params] * num_prompts if isinstance(params, SamplingParams) else params
        every = as_list("sampling_params must be a SamplingParams or a list of them", every)
        if len(every) != num_prompts:
            raise RequestError(
                f"{num_prompts} prompts but {len(every)} sampling_params; give one, or one for each prompt."
            )
        return every

    def request(self, text: str | None, ids: np.ndarray, params: SamplingParams, index: int,
                readout: Readout | None = None, given: Any = None) -> Request:
        """A request whose form is checked.

        Args:
            readout: by default the one that its parameters ask for, if any.
            given: what ``encode`` has made of the prompt; may be an ``Attachment``.
        """
        for wanted_by in READOUTS:
            readout = readout or wanted_by(params, ids)
        attachment = given if isinstance(given, Attachment) else None
        if attachment is not None and len(ids) < len(attachment.token_ids):
            raise RequestError(CANNOT_CUT)
        request_id, self._num_seqs = self._num_seqs, self._num_seqs + params.n
        return Request(request_id, text, ids, params, self._tokenizer, index, readout, attachment)

    def make_completions(self, request: Request) -> None:
        """The sequences of a request that is to be queued, unless they are there."""
        if request.completions:
            return
        params, first_id, block_size = request.params, request.request_id, self.config.kvcache_block_size
        holds_back = params.min_tokens and not params.is_constrained  # a constrained request's mask holds them back
        stop_ids = self._token_processors.min_tokens_stop_ids(params) if holds_back else ()
        ids = request.prompt_ids if request.attachment is None else request.attachment.token_ids
        seqs = [
            Completion(ids, params, seq_id, block_size, self._seed(params, seq_id, i), stop_ids, first_id)
            for i, seq_id in enumerate(range(first_id, first_id + params.n))
        ]
        has_processor = params.looks_at_tokens and request.failure == (None, None)
        for seq in seqs:
            seq.attachment, seq.finish_reason, seq.stop_reason = request.attachment, *request.failure
            seq.processor = self._token_processors.make(seq) if has_processor else None
        if request.readout is not None and request.readout.rows(0, len(request.prompt_ids)):
            seqs[0].readout = request.readout
        request.completions = seqs

    def _seed(self, params: SamplingParams, seq_id: int, index: int) -> int:
        if params.seed is None:
            return xxhash.xxh64_intdigest(f"request {seq_id}".encode(), seed=self.config.seed)
        return xxhash.xxh64_intdigest(f"seed {params.seed + index}".encode())
