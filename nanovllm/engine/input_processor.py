"""The input processor: prompts and parameters of a call become requests, and requests become sequences.

Owns the ids and the seeds. Knows nothing of queues; limits are those of ``checks.py``.
"""

from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np
import xxhash

from nanovllm.config import Config
from nanovllm.engine.checks import Checks
from nanovllm.engine.loading import Loading
from nanovllm.engine.request import Completion, Request
from nanovllm.engine.text.prompts import Prompt, as_list, as_token_ids, split_prompt
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.engine.token_processor import TokenProcessors
from nanovllm.engine.variants import READOUTS, make_attachments
from nanovllm.errors import RequestError, as_request_error
from nanovllm.messages import CANNOT_CUT, Attachment
from nanovllm.readouts import Readout
from nanovllm.sampling_params import SamplingParams

# A prompt's text, if it has one, and its token ids, not yet checked; a Loading or Attachment if it holds more.
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

    def encode(self, prompts: ListLike[Prompt], first: int = 0, params: Params = None,
               waits: bool = True) -> list[Encoded]:
        """Prompts with their token ids; a text that comes with ids is carried, and not encoded.

        Args:
            first: index of the first one, for errors.
            params: texts that these truncate may have any length.
            waits: wait until other inputs are loaded.
        """
        split = []
        for i, prompt in enumerate(prompts, first):
            try:
                encode = self.attachments.encode if self.attachments.takes(prompt) else split_prompt
                text, given = encode(prompt)
                split.append((text, given.attachment() if waits and isinstance(given, Loading) else given))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}" if first + len(prompts) > 1 else str(error)) from None
        texts = [text if ids is None else None for text, ids in split]
        if not any(text is not None for text in texts):
            return split
        encoded = iter(self._tokenizer.encode(texts, True, first, (params, self.config.max_model_len)))
        return [(text, next(encoded) if ids is None and text is not None else ids) for text, ids in split]

    def make(self, prompt: Prompt, params: SamplingParams, index: int = 0, waits: bool = False) -> Request:
        """A request with the engine's own copy of its parameters, see ``Checks.checked_params``.

        ``waits``: for inputs besides tokens; an unreadable one raises an error.

        Raises:
            RequestError: it can never be served.
        """
        ((text, given),) = self.encode([prompt], 0, params, waits)
        token_ids, params = self._resolve(given, params)
        self.checks.check_ids("token id", token_ids)
        return self.request(text, token_ids, params, index, given=given)

    def make_all(self, prompts: ListLike[Prompt], params: Params, is_checked: bool = False) -> list[Request]:
        """The requests of a call, whose parameters are one for all or one for each. ``is_checked``: they are our own.

        Raises:
            RequestError: one can never be served, with its index, or the counts differ. No id was given away.
        """
        encoded = self.encode(prompts, 0, params, waits=False)
        every = self.params_of(len(prompts), params)
        copies: dict[int, SamplingParams] = {}  # copies by the identity of the user's object
        checked = []
        for i, ((_, ids), given) in enumerate(zip(encoded, every, strict=True)):
            try:
                if id(given) not in copies:
                    copies[id(given)] = given if is_checked else self.checks.checked_params(given)
                checked.append(self._resolve(ids, copies[id(given)]))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from None
        try:
            self.checks.check_ids("", np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in checked)]))
        except RequestError:
            for i, (ids, _) in enumerate(checked):  # the slower way
                self.checks.check_ids(f"prompt {i}: token id", ids)
        return [
            self.request(text, ids, resolved, i, given=given)
            for i, ((text, given), (ids, resolved)) in enumerate(zip(encoded, checked, strict=True))
        ]

    def _resolve(self, given: Any, params: SamplingParams) -> tuple[np.ndarray, SamplingParams]:
        """Token ids and parameters as ``Checks.resolve`` returns them; unresolved, while the prompt's inputs load."""
        ids = as_token_ids(given)
        if not isinstance(given, Loading):
            return self.checks.resolve(ids, params)
        counted = params.snapshot()  # each input counts as one token, at least
        if params.max_tokens:  # cut here, because ``resolve`` warns of it with the number of tokens
            counted.max_tokens = max(1, min(params.max_tokens, self.config.max_model_len - len(ids)))
        if len(self.checks.resolve(ids, counted)[0]) < len(ids):
            raise RequestError(CANNOT_CUT)
        return ids, params

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
            given: the result of ``encode``; may be a ``Loading`` or an ``Attachment``.
        """
        request = Request(self._num_seqs, text, ids, params, self._tokenizer, index, readout)
        self._take_inputs(request, given)
        self._num_seqs += params.n
        return request

    def complete(self, request: Request) -> None:
        """Give a request its loaded inputs. If one cannot be read, the request ends with the reason."""
        loading, request.loading = request.loading, None
        try:
            given = loading.attachment()  # type: ignore[union-attr]
            request.prompt_ids, request.params = self._resolve(given, request.params)
            self._take_inputs(request, given)
            self.make_completions(request)  # here, because an error in ``queue`` ends every request
        except BaseException as error:
            request.failure, request.readout, request.attachment = ("error", str(as_request_error(error))), None, None

    def _take_inputs(self, request: Request, given: Any) -> None:
        """Set the inputs of a request besides tokens, and the readout that its parameters ask for."""
        if isinstance(given, Loading):
            request.loading = given
            return
        if isinstance(given, Attachment):
            if len(request.prompt_ids) < len(given.token_ids):
                raise RequestError(CANNOT_CUT)
            request.attachment = given
        for wanted_by in READOUTS:
            request.readout = request.readout or wanted_by(request.params, request.prompt_ids)

    def make_completions(self, request: Request) -> None:
        """The sequences of a request, unless they are there or its inputs still load."""
        if request.completions or request.loading is not None:
            return
        params, first_id, block_size = request.params, request.request_id, self.config.kvcache_block_size
        holds_back = params.min_tokens and not params.is_constrained  # a constrained request's mask holds them back
        stop_ids = self._token_processors.min_tokens_stop_ids(params) if holds_back else ()
        ids = request.prompt_ids if request.attachment is None else request.attachment.token_ids
        seqs = [
            Completion(ids, params, seq_id, block_size, self._seed(params, seq_id, i), stop_ids, first_id)
            for i, seq_id in enumerate(range(first_id, first_id + params.n))
        ]
        has_processor = params.needs_token_processor and request.failure == (None, None)
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
