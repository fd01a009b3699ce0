"""The tokens of one request as they arrive: each output holds what is new since the last."""

from nanovllm.core import Sequence
from nanovllm.engine.detokenizer import IncrementalDetokenizer
from nanovllm.engine.request import Request
from nanovllm.outputs import CompletionOutput, RequestOutput


class DeltaStream:
    """Deltas of one request. Their texts, joined, are the text that ``generate`` gives; so are their token ids.

    A stop string is cut from the text, so the last characters are held back while one might begin there.
    """

    def __init__(self, request: Request):
        self._request = request
        self._sent_tokens = [0] * len(request.seqs)
        self._sent_text = [0] * len(request.seqs)
        params, tokenizer = request.params, request.tokenizer.tokenizer
        self._detokenizers = [
            IncrementalDetokenizer(tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
            for _ in request.seqs
            if tokenizer is not None and params.detokenize
        ]
        self._held_back = max((len(text) - 1 for text in params.stop or ()), default=0)

    def delta(self) -> RequestOutput | None:
        """What is new in a request that is not finished; None if nothing is."""
        outputs, is_new = [], False
        for index, seq in enumerate(self._request.seqs):
            start, stop = self._sent_tokens[index], seq.num_completion_tokens
            if seq.finish_reason is not None and stop > start:
                stop -= 1  # the token that ended it may not belong to the text: the last delta tells
            token_ids = self._tokens(seq, start, stop)
            text = ""
            if self._detokenizers and token_ids:
                detokenizer = self._detokenizers[index]
                detokenizer.feed(token_ids)
                end = max(len(detokenizer.text) - self._held_back, self._sent_text[index])
                text = detokenizer.text[self._sent_text[index] : end]
                self._sent_text[index] = end
            self._sent_tokens[index] = max(start, stop)
            is_new |= len(token_ids) > 0
            outputs.append(CompletionOutput(index, text, token_ids, *self._logprobs(seq, start, stop)))
        return self._request.output_of(outputs, finished=False) if is_new else None

    def last(self) -> RequestOutput:
        """What is new in the finished request."""
        output = self._request.output()
        for index, (seq, whole) in enumerate(zip(self._request.seqs, output.outputs, strict=True)):
            start = self._sent_tokens[index]
            _, logprobs = self._logprobs(seq, start, len(whole.token_ids))
            output.outputs[index] = CompletionOutput(
                index, whole.text[self._sent_text[index] :], whole.token_ids[start:], whole.cumulative_logprob,
                logprobs, whole.finish_reason, whole.stop_reason,
            )  # fmt: skip
        return self._request.output_of(output.outputs)

    @staticmethod
    def _tokens(seq: Sequence, start: int, stop: int) -> list[int]:
        return seq.tokens(seq.num_prompt_tokens + start, seq.num_prompt_tokens + stop).tolist()

    def _logprobs(self, seq: Sequence, start: int, stop: int) -> tuple:
        watch = self._request.watches.get(seq.seq_id)
        return (None, None) if watch is None else watch.logprobs(self._tokens(seq, start, stop), start, stop)
