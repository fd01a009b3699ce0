"""A device whose KV slots hold hashes of token histories, and what each request must get from it.

``FakeDevice`` reads nothing but prepared steps and its request state, as a real one does. Every launch checks every
slot that it attends. The next token is a hash of the history too.
"""

import numpy as np
import torch

from nanovllm.engine.scheduler import PrefillBatch
from nanovllm.kernels.reference import decode_inputs
from nanovllm.runner.model_runner import StepHandle
from nanovllm.runner.prepare import prepare
from nanovllm.runner.request_state import RequestState, StagedWrites
from nanovllm.runner.step import StepInput, StepKind, from_words, to_words, unpack

VOCAB, EOS = 5, 0
ROOT = 12345  # hash of the empty history


def chain(parent: int, token: int) -> int:
    return hash((parent, token))


def pick(state: int, forbidden=()) -> int:
    """The fake model: the token after the history whose hash is ``state``."""
    token = (state >> 8) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


class Request:
    """What a request must see and get, from the request alone."""

    def __init__(self, prompt, params, max_model_len, eos=(EOS,)):
        self.prompt, self.params = prompt, params
        self.tokens, self.finish_reason, self.stop_reason = list(prompt), None, None
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
        self.limit = min(len(prompt) + params.max_tokens, max_model_len)
        states = [ROOT]
        for token in prompt:
            states.append(chain(states[-1], token))
        # one token more than it gets: after a stop the launch in flight samples a surplus one
        known = list(prompt)
        while len(known) <= self.limit:
            too_short = len(known) < len(prompt) + params.min_tokens
            known.append(pick(states[-1], stops if too_short else ()))
            states.append(chain(states[-1], known[-1]))
        self.known, self.states = np.array(known, np.int32), np.array(states[1:], np.int64)
        for token in known[len(prompt) : self.limit]:
            self.tokens.append(token)
            if token in stops:
                self.finish_reason = "stop"
                self.stop_reason = token if token in params.stop_token_ids else None
                break
        else:
            self.finish_reason = "length"

    @property
    def completion(self):
        return self.tokens[len(self.prompt) :]


class FakeDevice:
    """Stands for the model runner: takes prepared steps, and keeps hashes of histories in its KV slots."""

    def __init__(self, config, max_in_flight, requests, short_prefills):
        self.config, self.max_in_flight, self.requests = config, max_in_flight, requests
        self.block_size = config.kvcache_block_size
        max_blocks = -(-config.max_model_len // self.block_size)
        self.short_sizes = [4, 8] if short_prefills else []
        self.request_state = RequestState(config.max_num_seqs, max_blocks, torch.device("cpu"))
        self.staged_writes = StagedWrites(config.max_num_seqs, max_blocks)
        self.kv = np.zeros(config.num_kvcache_blocks * self.block_size, np.int64)
        # numpy views of the device's memory: torch would dominate the time of 2,000 histories
        state = self.request_state
        self.last_token, self.length = state.last_token.numpy(), state.length.numpy()
        self.block_tables, self.sampled_tokens = state.block_tables.numpy(), state.sampled_tokens.numpy()
        self.fail_at = None
        self.num_launches = 0
        self.seen = set()  # what happened, as a check that histories hold what they should

    def run(self, batch):
        assert 0 < batch.num_tokens <= self.config.max_num_batched_tokens
        self.batch = batch
        if isinstance(batch, PrefillBatch):
            self.seen |= {"chunk"} if len(batch.req_indices) < len(batch.seqs) else set()
            self.seen |= {"full budget"} if batch.num_tokens == self.config.max_num_batched_tokens else set()
            self.seen |= {"hit" for seq in batch.new_seqs if seq.num_cached_tokens}
            self.seen |= {"again" for seq in batch.new_seqs if seq.num_completion_tokens}
            ends = zip(batch.seqs, batch.stops, strict=True)
            self.seen |= {"chunk to a block's end" for s, n in ends if n < s.num_tokens and n % self.block_size == 0}
        self.launch(*prepare(batch, self.staged_writes, self.block_size, self.short_sizes))
        return StepHandle(self.request_state.sampled_tokens, batch, None, None)

    def reset(self):
        self.staged_writes.reset()

    def launch(self, header, packed):
        self.num_launches += 1
        if self.num_launches == self.fail_at:
            raise KeyboardInterrupt
        header, packed = from_words(to_words(header, packed))  # as it reaches another rank
        step = unpack(header, torch.from_numpy(packed.copy()))
        assert len(set(step.indices.tolist())) == len(step.indices), "two writes of one element: the order is undefined"
        self.request_state.apply(step.indices, step.values)
        run = {StepKind.DECODE: self._decode, StepKind.PREFILL: self._prefill, StepKind.SHORT_PREFILL: self._short}
        tokens, req_indices = run[header.kind](header, step)
        self.last_token[req_indices] = tokens
        self.sampled_tokens[self.length[req_indices] % 2, req_indices] = tokens
        self.length[req_indices] += 1
        assert header.num_sampled == len(tokens) == len(self.batch.req_indices)
        wanted = [self.requests[i].params.features for i in self.batch.seq_ids.tolist()]
        assert header.features == int(np.bitwise_or.reduce(np.array(wanted, int)))

    def _slots(self, req_idx, start, stop):
        positions = np.arange(start, stop)
        blocks = self.block_tables[req_idx, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        assert len(set(slots.tolist())) == len(slots)
        return slots

    def _store(self, request, slots, start, stop, input_ids):
        assert input_ids.tolist() == request.known[start:stop].tolist()
        self.kv[slots] = request.states[start:stop]

    def _attend(self, request, req_idx, context):
        np.testing.assert_array_equal(self.kv[self._slots(req_idx, 0, context)], request.states[:context])
        sampling = self.request_state.sampling
        too_short = context < sampling.min_len[req_idx].item()
        return pick(request.states[context - 1].item(), sampling.stop_ids[req_idx].tolist() if too_short else ())

    def _prefill(self, header, step):
        batch, step = self.batch, StepInput(*(segment.numpy() for segment in vars(step).values()))
        assert header.num_tokens == len(step.input_ids) == batch.num_tokens
        requests = [self.requests[seq.seq_id] for seq in batch.seqs]
        for i, request in enumerate(requests):
            packed = slice(step.cu_seqlens_q[i], step.cu_seqlens_q[i + 1])
            stop = int(step.context_lens[i])
            start = stop - (packed.stop - packed.start)
            assert stop - start <= header.max_seqlen_q and stop <= header.max_context
            assert step.cu_seqlens_k[i + 1] - step.cu_seqlens_k[i] == stop
            assert step.positions[packed].tolist() == list(range(start, stop))
            slots = self._slots(step.req_indices[i], start, stop)
            assert step.slot_mapping[packed].tolist() == slots.tolist()
            self._store(request, slots, start, stop, step.input_ids[packed])
        sampled = len(step.sampled_req_indices)
        assert step.logits_indices.tolist() == (step.cu_seqlens_q[1 : sampled + 1] - 1).tolist()
        assert step.sampled_req_indices.tolist() == step.req_indices[:sampled].tolist()
        contexts = zip(requests, step.req_indices, step.context_lens, strict=True)
        tokens = [self._attend(request, req_idx, n) for request, req_idx, n in contexts]
        return np.array(tokens[:sampled], np.int32), step.sampled_req_indices

    def _short(self, header, step):
        """Each token as a single-query sequence: first all are stored, then all attend."""
        self.seen.add("short prefill")
        batch, step = self.batch, StepInput(*(segment.numpy() for segment in vars(step).values()))
        num_tokens, size = batch.num_tokens, header.num_tokens
        assert size in self.short_sizes and all(len(segment) == size for segment in list(vars(step).values())[2:7])
        assert header.max_seqlen_q == 1
        owners = [(self.requests[seq.seq_id], seq.req_idx, position)
                  for seq, start, stop in zip(batch.seqs, batch.starts, batch.stops, strict=True)
                  for position in range(start, stop)]  # fmt: skip
        for i, (request, req_idx, position) in enumerate(owners):
            assert step.req_indices[i] == req_idx and step.positions[i] == position
            assert step.context_lens[i] == position + 1 <= header.max_context
            slots = self._slots(req_idx, position, position + 1)
            assert step.slot_mapping[i] == slots[0]
            self._store(request, slots, position, position + 1, step.input_ids[i : i + 1])
        padding = slice(num_tokens, size)
        assert (step.slot_mapping[padding] == -1).all() and (step.context_lens[padding] == 0).all()
        assert (step.req_indices[padding] == self.request_state.padding_req_idx).all()
        next_tokens = [self._attend(request, req_idx, position + 1) for request, req_idx, position in owners]
        tokens = [next_tokens[i] for i in step.logits_indices]
        return np.array(tokens, np.int32), step.sampled_req_indices

    def _decode(self, header, step):
        state, batch = self.request_state, self.batch
        assert (state.batch_req_indices[header.num_sampled :] == state.padding_req_idx).all()
        req_indices = state.batch_req_indices[: header.num_sampled]
        inputs = decode_inputs(req_indices, state.last_token, state.length, state.block_tables, self.block_size)
        input_ids, positions, slots, context_lens = (x.numpy() for x in inputs)
        req_indices = req_indices.numpy().copy()
        assert len(set(req_indices.tolist())) == len(req_indices)
        requests = [self.requests[i] for i in batch.seq_ids.tolist()]
        for i, request in enumerate(requests):
            position = int(positions[i])
            assert context_lens[i] == position + 1 <= header.max_context
            assert slots[i] == self._slots(req_indices[i], position, position + 1)[0]
            self._store(request, slots[i : i + 1], position, position + 1, input_ids[i : i + 1])
        contexts = zip(requests, req_indices, context_lens, strict=True)
        tokens = [self._attend(request, req_idx, n) for request, req_idx, n in contexts]
        return np.array(tokens, np.int32), req_indices
