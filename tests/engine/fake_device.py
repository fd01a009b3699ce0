"""A device whose KV slots hold hashes of token histories, and what each request must get from it.

``FakeDevice`` reads nothing but prepared steps and its request state, as a real one does. Every launch checks every
slot that it attends. The next token is a hash of the history and of the request's seed.
"""

from types import SimpleNamespace

import numpy as np
import torch

from nanovllm.engine.scheduler import PrefillBatch
from nanovllm.kernels.reference import decode_inputs
from nanovllm.outputs import Logprob
from nanovllm.runner import prefill_graphs, prefix_groups
from nanovllm.runner.model_runner import StepHandle, StepOutput
from nanovllm.runner.prefill_graphs import PrefillSizes
from nanovllm.runner.prepare import prepare
from nanovllm.runner.request_state import RequestState, StagedWrites
from nanovllm.runner.sampling_tables import StagedTables
from nanovllm.runner.step import StepInput, StepKind, from_words, to_words, unpack
from nanovllm.sampling_params import LOGPROBS

VOCAB, EOS = 5, 0
ROOT = 12345  # hash of the empty history
STOP_TEXT = "the stop string"


def chain(parent: int, token: int) -> int:
    return hash((parent, token))


def pick(state: int, seed: int, forbidden=()) -> int:
    """The fake model and sampler: the token after the history whose hash is ``state``."""
    token = (hash((state, seed)) >> 8) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def fake_logprobs(tokens, places, k):
    """Rows packed as by ``reference.token_logprobs``, int32 [n, 2 + 2k]: the "log-probability" is the token, the
    "rank" its place, and the alternatives are tokens that the vocabulary does not have."""
    chosen, ranks = np.array(tokens, np.float32).view(np.int32), np.array(places, np.int32)
    others = np.arange(VOCAB, VOCAB + k, dtype=np.int32)
    others = np.concatenate([others, (-np.arange(1, k + 1, dtype=np.float32)).view(np.int32)])
    return np.concatenate([chosen[:, None], ranks[:, None], np.tile(others, (len(chosen), 1))], axis=1)


def fake_entry(token, place, k):
    """The same as a user sees it."""
    return {token: Logprob(token, place), **{VOCAB + i: Logprob(-1 - i, 1 + i) for i in range(k)}}


class Request:
    """What one completion must see and get, from its request alone.

    Args:
        seed: of the sequence.
        stop_after: completion tokens at the last of which a stop string is complete; None for no stop string.
        targets, first_target: of the sequence.
    """

    def __init__(self, prompt, params, max_model_len, seed, eos=(EOS,), stop_after=None, targets=None, first_target=0):
        self.prompt, self.params, self.targets, self.first_target = prompt, params, targets, first_target
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
            known.append(pick(states[-1], seed, stops if too_short else ()))
            states.append(chain(states[-1], known[-1]))
        self.known, self.states = np.array(known, np.int32), np.array(states[1:], np.int64)
        for token in known[len(prompt) : self.limit]:
            self.tokens.append(token)
            if token in stops:
                is_eos = token == eos[0] and not params.ignore_eos
                self.finish_reason, self.stop_reason = "stop", None if is_eos else token
                break
            if len(self.completion) == stop_after:  # wins over "length"
                self.finish_reason, self.stop_reason = "stop", STOP_TEXT
                break
        else:
            self.finish_reason = "length"

    @property
    def completion(self):
        return self.tokens[len(self.prompt) :]

    def scored_rows(self, start, stop):
        """Positions in [start, stop) whose logits are scored, and the tokens they are scored against."""
        if self.targets is None:
            return []
        ends = zip(range(self.first_target, self.first_target + len(self.targets)), self.targets, strict=True)
        return [(position, target) for position, target in ends if start <= position < stop]


class FakeDevice:
    """Stands for the model runner: takes prepared steps, and keeps hashes of histories in its KV slots."""

    def __init__(self, config, max_in_flight, requests, graphs):
        self.config, self.max_in_flight, self.requests = config, max_in_flight, requests
        self.block_size = config.kvcache_block_size
        max_blocks = -(-config.max_model_len // self.block_size)
        self.sizes = PrefillSizes((4,), ((6, 2), (12, 4)), config.max_num_seqs) if graphs else PrefillSizes()
        self.request_state = RequestState(config.max_num_seqs, max_blocks, torch.device("cpu"))
        tables = StagedTables(config.max_model_len, VOCAB)
        self.staged_writes = StagedWrites(config.max_num_seqs, max_blocks, tables)
        self.kv = np.zeros(config.num_kvcache_blocks * self.block_size, np.int64)
        # numpy views of the device's memory: torch would dominate the time of 2,000 histories
        state = self.request_state
        self.last_token, self.length = state.last_token.numpy(), state.length.numpy()
        self.block_tables, self.sampled_tokens = state.block_tables.numpy(), state.sampled_tokens.numpy()
        self.seeds = state.sampling.seed.numpy()
        self.residency = SimpleNamespace(require_ready=lambda: None)
        self.fail_at = None
        self.num_launches = 0
        self.seen = set()  # what happened, as a check that histories hold what they should

    def run(self, batch):
        assert 0 < batch.num_tokens <= self.config.max_num_batched_tokens
        self.batch = batch
        if isinstance(batch, PrefillBatch):
            ends = list(zip(batch.seqs, batch.stops, strict=True))
            unfinished = [(seq, stop) for seq, stop in ends if stop < seq.num_tokens]
            self.seen |= {"chunk"} if unfinished else set()
            self.seen |= {"full budget"} if batch.num_tokens == self.config.max_num_batched_tokens else set()
            self.seen |= {"hit" for seq in batch.seqs if seq in batch.new_seqs and seq.num_cached_tokens}
            self.seen |= {
                "hit below targets" for seq in batch.seqs if seq.targets is not None and seq.num_cached_tokens
            }
            self.seen |= {"again" for seq in batch.new_seqs if seq.num_completion_tokens}
            self.seen |= {"chunk to a block's end" for _, stop in unfinished if stop % self.block_size == 0}
            self.seen |= {"fork"} if len(batch.req_indices) > len(set(batch.sampled_from.tolist())) else set()
            self.seen |= {"block copy"} if batch.block_copies else set()
            self.seen |= {"unsampled beside sampled"} if batch.unsampled and len(batch.req_indices) else set()
            for seq in batch.new_seqs:
                if self.requests[seq.seq_id].targets is not None and not seq.num_completion_tokens:
                    assert seq.num_cached_tokens <= self.requests[seq.seq_id].first_target
        output = self.launch(*prepare(batch, self.staged_writes, self.block_size, self.sizes))
        return StepHandle(self.request_state.sampled_tokens, batch, output, None)

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
        run = {StepKind.DECODE: self._decode, StepKind.PREFILL: self._prefill, StepKind.SHORT_PREFILL: self._short,
               StepKind.PADDED_PREFILL: self._padded}  # fmt: skip
        tokens, req_indices, prompt_logprobs = run[header.kind](header, step)
        self.last_token[req_indices] = tokens
        self.sampled_tokens[self.length[req_indices] % 2, req_indices] = tokens
        self.length[req_indices] += 1
        assert header.num_sampled == len(tokens) == len(self.batch.req_indices)
        wanted = [self.requests[i].params for i in self.batch.seq_ids.tolist()]
        assert header.features == int(np.bitwise_or.reduce(np.array([params.features for params in wanted], int)))
        assert header.num_logprobs == max((params.logprobs or 0 for params in wanted), default=0)
        logprobs = None
        if header.features & LOGPROBS:
            logprobs = torch.from_numpy(fake_logprobs(tokens, self.length[req_indices], header.num_logprobs))
        return StepOutput(None, logprobs, prompt_logprobs)

    def _slots(self, req_idx, start, stop):
        positions = np.arange(start, stop)
        blocks = self.block_tables[req_idx, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        assert len(set(slots.tolist())) == len(slots)
        return slots

    def _store(self, request, slots, start, stop, input_ids):
        assert input_ids.tolist() == request.known[start:stop].tolist()
        self.kv[slots] = request.states[start:stop]

    def _attend(self, request, req_idx, context, shared=(0, 0)):
        """Hash of the history of ``context`` tokens, as the last of them sees it. ``shared``: a request slot, and how
        many tokens are read by its block table."""
        owner, num_shared = shared
        seen = [self.kv[self._slots(owner, 0, num_shared)], self.kv[self._slots(req_idx, num_shared, context)]]
        np.testing.assert_array_equal(np.concatenate(seen), request.states[:context])
        return request.states[context - 1].item()

    def _shared(self, header):
        """(owner, tokens) of each sequence of a decode batch, as the two halves of attention find them."""
        groups = [column.tolist() for column in self.request_state.prefix_groups]
        shared_lens, members = groups[:2]
        shared = [(0, 0)] * header.num_sampled
        if header.num_groups == 0:
            return shared
        used = [group for group in zip(*groups[2:], strict=True) if group[1]]
        assert len(used) == header.num_groups and not any(shared_lens[header.num_sampled :])
        for begin, size, num_tokens, owner in used:
            assert size >= prefix_groups.MIN_MEMBERS and num_tokens > 0
            for member in members[begin : begin + size]:
                assert shared[member] == (0, 0) and shared_lens[member] == num_tokens
                shared[member] = owner, num_tokens
            self.seen.add("group")
        assert [num_tokens for _, num_tokens in shared] == shared_lens[: header.num_sampled]
        return shared

    def _sample(self, req_idx, context, state):
        sampling = self.request_state.sampling
        seed = int(self.seeds[req_idx].view(np.uint64)[0])
        too_short = context < sampling.min_len[req_idx].item()
        return pick(state, seed, sampling.stop_ids[req_idx].tolist() if too_short else ())

    def _prefill(self, header, step):
        batch, step = self.batch, StepInput(*(segment.numpy() for segment in step))
        assert header.num_tokens == len(step.input_ids) == batch.num_tokens
        owners = []
        for i, seq in enumerate(batch.seqs):
            request = self.requests[seq.seq_id]
            packed = slice(step.cu_seqlens_q[i], step.cu_seqlens_q[i + 1])
            stop = int(step.context_lens[i])
            start = stop - (packed.stop - packed.start)
            assert stop - start <= header.max_seqlen_q and stop <= header.max_context
            assert step.cu_seqlens_k[i + 1] - step.cu_seqlens_k[i] == stop
            assert step.positions[packed].tolist() == list(range(start, stop))
            slots = self._slots(step.req_indices[i], start, stop)
            assert step.slot_mapping[packed].tolist() == slots.tolist()
            self._store(request, slots, start, stop, step.input_ids[packed])
            owners += [(request, position) for position in range(start, stop)]
        # every layer stores all keys and values of a launch before it attends
        for seq, req_idx, stop in zip(batch.seqs, step.req_indices, step.context_lens, strict=True):
            self._attend(self.requests[seq.seq_id], req_idx, stop)
        states = [request.states[position].item() for request, position in owners]
        return self._outputs(header, step, owners, states)

    def _padded(self, header, step):
        """What fills up a prefill is checked, and cut off; the parts of a sequence are joined."""
        self.seen.add("padded prefill")
        batch, num_tokens = self.batch, self.batch.num_tokens
        assert (header.num_tokens, header.num_seqs) in self.sizes.padded and header.num_targets == 0
        lengths = [stop - start for start, stop in zip(batch.starts, batch.stops, strict=True)]
        parts = [-(-length // prefill_graphs.MAX_PADDED_SEQLEN) for length in lengths]
        self.seen |= {"cut"} if max(parts) > 1 else set()
        last = np.cumsum(parts) - 1  # of each sequence
        num_parts = sum(parts)
        assert (step.slot_mapping[num_tokens:] == -1).all() and (step.context_lens[num_parts:] == 0).all()
        assert (step.req_indices[num_parts:] == self.request_state.padding_req_idx).all()
        assert (step.cu_seqlens_q[num_parts:] == num_tokens).all()
        part_lengths = step.cu_seqlens_q.diff()[:num_parts]
        assert (part_lengths > 0).all() and (part_lengths <= header.max_seqlen_q).all()
        offsets = np.repeat(batch.starts - np.cumsum([0, *lengths[:-1]]), parts)  # position less packed token
        assert (step.context_lens[:num_parts].numpy() == step.cu_seqlens_q[1 : num_parts + 1].numpy() + offsets).all()
        assert (step.req_indices[:num_parts].numpy() == np.repeat([seq.req_idx for seq in batch.seqs], parts)).all()
        # the graph takes the last token of every sequence
        assert (step.logits_indices.numpy() == last[: header.num_logits]).all()
        tokens = {name: getattr(step, name)[:num_tokens] for name in ("input_ids", "positions", "slot_mapping")}
        lens, ends = step.context_lens[last], step.cu_seqlens_q[1:][last]
        step = step._replace(
            **tokens, req_indices=step.req_indices[last], context_lens=lens,
            cu_seqlens_q=torch.cat([ends[:1] * 0, ends]), cu_seqlens_k=torch.cat([lens[:1] * 0, lens]).cumsum(0),
            logits_indices=ends[: header.num_logits] - 1,
        )  # fmt: skip
        header = header._replace(num_tokens=num_tokens, num_seqs=len(batch.seqs), max_seqlen_q=max(lengths))
        return self._prefill(header, step)

    def _short(self, header, step):
        """Each token as a single-query sequence: first all are stored, then all attend."""
        self.seen.add("short prefill")
        batch, step = self.batch, StepInput(*(segment.numpy() for segment in step))
        num_tokens, size = batch.num_tokens, header.num_tokens
        assert size in self.sizes.short and all(len(segment) == size for segment in step[2:7])
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
        states = [self._attend(request, req_idx, position + 1) for request, req_idx, position in owners]
        return self._outputs(header, step, [(request, position) for request, _, position in owners], states)

    def _outputs(self, header, step, owners, states):
        """Of a prefill whose packed token i is position ``owners[i][1]`` of request ``owners[i][0]``, and left the
        hidden state ``states[i]``: block copies, sampled tokens, log-probabilities of prompt tokens."""
        batch, size = self.batch, self.block_size
        for source, target in zip(step.copy_from.tolist(), step.copy_to.tolist(), strict=True):
            self.kv[target * size : (target + 1) * size] = self.kv[source * size : (source + 1) * size]
        assert header.num_logits == len(step.logits_indices) <= len(batch.seqs)
        logits = [states[i] for i in step.logits_indices]
        sampled_from = step.sampled_from if len(step.sampled_from) else range(header.num_sampled)
        tokens = []
        for j, req_idx, seq_id in zip(sampled_from, step.sampled_req_indices, batch.seq_ids.tolist(), strict=True):
            context = int(self.length[req_idx])
            # what it will attend from now on is what its logits come from
            assert self._attend(self.requests[seq_id], req_idx, context) == logits[j]
            tokens.append(self._sample(req_idx, context, logits[j]))
        chunks = zip(batch.seqs, batch.starts, batch.stops, strict=True)
        wanted = [(self.requests[seq.seq_id], *row) for seq, start, stop in chunks if not seq.num_completion_tokens
                  for row in self.requests[seq.seq_id].scored_rows(start, stop)]  # fmt: skip
        scored = zip(step.target_indices, step.targets.tolist(), strict=True)
        assert [(*owners[i], target) for i, target in scored] == wanted
        assert header.num_targets == len(wanted)
        if not wanted:
            return np.array(tokens, np.int32), step.sampled_req_indices, None
        places = [owners[i][1] for i in step.target_indices]
        rows = fake_logprobs(step.targets, places, header.num_prompt_logprobs)
        return np.array(tokens, np.int32), step.sampled_req_indices, torch.from_numpy(rows)

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
        contexts = zip(requests, req_indices, context_lens.tolist(), self._shared(header), strict=True)
        tokens = [
            self._sample(req_idx, n, self._attend(request, req_idx, n, shared))
            for request, req_idx, n, shared in contexts
        ]
        return np.array(tokens, np.int32), req_indices, None
