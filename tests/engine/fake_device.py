"""A device whose KV slots hold hashes of token histories, and what each request must get from it.

``FakeDevice`` reads nothing but pickled batches and its request state, as another rank does. Every launch checks every
slot that it attends. The next token is a hash of the history and of the request's seed. With recurrent layers it keeps
a table of states, too: the hash of the history that each has seen.
"""

import pickle
from math import lcm
from types import SimpleNamespace

import numpy as np
import torch
from helpers import optional

from nanovllm.core import PrefillBatch
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.kernels.reference import decode_inputs
from nanovllm.messages.block_copies import BlockCopies
from nanovllm.outputs import Logprob
from nanovllm.runner import prefill_graphs
from nanovllm.runner.inputs import to_device
from nanovllm.runner.model_runner import ModelRunner, StepHandle
from nanovllm.runner.prefill_graphs import PrefillSizes
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Sampled
from nanovllm.sampling.features import COLUMNS, make_features
from nanovllm.sampling.sampler import Sampler

DraftTokens = optional("messages.verify", "DraftTokens")
StateCopies = optional("messages.recurrent", "StateCopies")
NO_COPIES = BlockCopies([], [])
Drafts, Cascade = optional("runner.drafts", "Drafts"), optional("runner.cascade", "Cascade")
VOCAB, EOS = 5, 0
ROOT = 12345  # hash of the empty history
STOP_TEXT = "the stop string"


def chunk_seq_ids(batch: PrefillBatch) -> list[int]:
    """The sequences of which a prefill computes tokens; the batch tells them to its own process alone."""
    return [seq.seq_id for seq in batch.seqs]


def chain(parent: int, token: int) -> int:
    return hash((parent, token))


def pick(state: int, seed: int, forbidden=()) -> int:
    """The fake model and sampler: the token after the history whose hash is ``state``."""
    token = (hash((state, seed)) >> 8) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def fake_logprobs(tokens, places, k):
    """Rows packed as by ``token_logprobs``, int32 [n, 2 + 2k]: the "log-probability" is the token, the
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
    """Stands for the model runner: prepares batches as it does, and keeps hashes of histories in its KV slots."""

    prepare, write = ModelRunner.prepare, ModelRunner.write

    def __init__(self, config, max_in_flight, requests, graphs, recurrent_rows=None):
        self.config, self.max_in_flight, self.requests = config, max_in_flight, requests
        self.block_size, cpu = config.kvcache_block_size, torch.device("cpu")
        max_blocks = -(-config.max_model_len // self.block_size)
        self.sizes = PrefillSizes(((4, 3), (6, 2), (12, 4)), config.max_num_seqs) if graphs else PrefillSizes()
        num_drafted = 7 * config.max_num_seqs * config.speculates
        self.request_state = state = RequestState(config.max_num_seqs, max_blocks, cpu, COLUMNS, 2 * num_drafted)
        self.features = make_features(state, config.max_model_len, VOCAB)
        self.sampler = Sampler(state, SINGLE_RANK, self.features)
        self.drafts = Drafts and Drafts(state, num_drafted)
        self.cascade = Cascade and Cascade(state.block_table_mirror, self.block_size, cpu)
        self.parts = [part for part in (self.cascade, self.drafts) if part is not None]
        self.kv = np.zeros(config.num_kvcache_blocks * self.block_size, np.int64)
        self.recurrent_rows, self.states = recurrent_rows, None  # hashes, by row: request slots, padding, snapshots
        if recurrent_rows is not None:
            self.states = np.zeros(config.max_num_seqs + 1 + recurrent_rows.num_snapshots, np.int64)
            self.grain = lcm(recurrent_rows.chunk, self.block_size)
        # numpy views of the device's memory: torch would dominate the time of 2,000 histories
        self.last_token, self.length = state.last_token.numpy(), state.length.numpy()
        self.block_tables, self.sampled_tokens = state.block_tables.numpy(), state.sampled_tokens.numpy()
        self.seeds = state.sampling.seed.numpy()
        self.weights = SimpleNamespace(require_ready=lambda: None)
        self.exit = lambda: None
        self.computed = None  # by ``forward``, until ``sample``
        self.resumed = set()  # request slots of sequences that were preempted
        self.fail_at = None
        self.num_launches = self.num_calls = 0  # forward passes; these and samplings
        self.seen = set()  # what happened, as a check that histories hold what they should

    def forward(self, batch):
        assert 0 < batch.num_tokens <= self.config.max_num_batched_tokens
        assert self.computed is None, "a forward pass that was never sampled"
        self.num_launches += 1
        self.may_fail()
        self.chunk_seq_ids = chunk_seq_ids(batch) if isinstance(batch, PrefillBatch) else []
        self.batch = batch = pickle.loads(pickle.dumps(batch))  # as it reaches another rank
        if isinstance(batch, PrefillBatch):
            self.look_at(batch)
        compute = self._prefill if isinstance(batch, PrefillBatch) else self._decode
        self.computed = batch, *(compute if batch.num_rows == 1 else self._verify)(batch)

    def sample(self, masks, process):
        assert masks is process is None
        self.may_fail()
        (batch, tokens, req_indices, target_logprobs), self.computed = self.computed, None
        rows = self.drafts.rows_on_host(batch) if batch.num_rows > 1 else batch.req_indices
        assert req_indices.tolist() == rows.ravel().tolist() and len(tokens) == rows.size
        live = req_indices[self.length[req_indices] > 0]
        num_drafted = 0 if batch.num_rows == 1 else (batch.messages[DraftTokens].token_ids >= 0).sum()
        assert len(live) == len(rows) + num_drafted
        self.last_token[req_indices] = self.sampled_tokens[req_indices] = tokens  # those of dead rows are undefined
        self.length[live] += 1
        wanted = [self.requests[i].params for i in batch.seq_ids.tolist()]
        used = self.sampler.used_by(batch.req_indices)
        self.sampler.begin(Sampled(batch.req_indices, batch.num_rows))
        assert (self.features.logprobs in used) == any(params.logprobs is not None for params in wanted)
        holds_back = [p.min_tokens and (p.stop_token_ids or not p.ignore_eos) for p in wanted]
        assert (self.features.min_tokens in used) == any(holds_back)
        logprobs = None
        if self.features.logprobs in used:
            num_top = self.features.logprobs.num_top
            assert num_top == min(VOCAB, max((params.logprobs or 0 for params in wanted), default=0))
            logprobs = torch.from_numpy(fake_logprobs(tokens, self.length[req_indices], num_top))
        if batch.num_rows > 1:
            self.drafts.accept(torch.from_numpy(req_indices), batch.num_rows)
        return StepHandle(rows, None, self.request_state.sampled_tokens, None, logprobs, *target_logprobs)

    def may_fail(self):
        self.num_calls += 1
        if self.num_calls == self.fail_at:
            raise KeyboardInterrupt

    def look_at(self, batch):
        """Note which situations a prefill holds."""
        new = {req_idx: i for i, req_idx in enumerate(batch.new.req_indices.tolist())}
        resumed = batch.new.num_tokens > batch.new.num_prompt_tokens
        columns = (column.tolist() for column in (batch.chunk_req_indices, batch.starts, batch.stops))
        chunks = zip(self.chunk_seq_ids, *columns, strict=True)
        for i, (seq_id, req_idx, start, stop) in enumerate(chunks):
            request = self.requests[seq_id]
            is_unsampled = request.params.max_tokens == 0 and stop == len(request.prompt)
            is_partial = i not in batch.sampled_from and not is_unsampled
            is_hit = req_idx in new and start > 0
            self.seen |= {"chunk"} if is_partial else set()
            self.seen |= {"chunk to a block's end"} if is_partial and stop % self.block_size == 0 else set()
            self.seen |= {"unsampled beside sampled"} if is_unsampled and len(batch.req_indices) else set()
            self.seen |= {"hit"} if is_hit else set()
            self.seen |= {"hit below targets"} if is_hit and request.targets is not None else set()
            if req_idx in new and request.targets is not None and not resumed[new[req_idx]]:
                assert start <= request.first_target
        self.seen |= {"full budget"} if batch.num_tokens == self.config.max_num_batched_tokens else set()
        self.seen |= {"again"} if resumed.any() else set()
        self.seen |= {"fork"} if len(batch.req_indices) > len(set(batch.sampled_from.tolist())) else set()
        before, after = batch.messages.get(BlockCopies, NO_COPIES)
        self.seen |= {"block copy"} if after else set()
        self.seen |= {"prefix copy"} if before else set()

    def reset(self):
        self.computed = None
        self.request_state.reset()
        for part in self.parts:
            part.reset()

    def take(self, batch, arrays):
        """To the device, which takes in its state."""
        for name in ("state_indices", "penalty_indices", "group_indices"):
            indices = arrays.get(name, np.empty(0)).tolist()
            assert len(set(indices)) == len(indices), "two writes of one element: the order is undefined"
        tensors = to_device(arrays, torch.device("cpu"))
        self.write(batch, tensors)
        return {name: values.numpy() for name, values in tensors.items()}

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

    def _shared(self, size):
        """(owner, tokens) of each of the ``size`` sequences of a decode batch, as the two halves of attention find
        them."""
        shared = [(0, 0)] * size
        if self.cascade is None or self.cascade.groups is None:
            return shared
        groups = [column.tolist() for column in self.cascade.groups]
        shared_lens, members = groups[:2]
        used = [group for group in zip(*groups[2:], strict=True) if group[1]]
        assert used and not any(shared_lens[size:])
        for begin, num_members, num_tokens, owner in used:
            assert num_members >= 2 and num_tokens > 0
            for member in members[begin : begin + num_members]:
                assert shared[member] == (0, 0) and shared_lens[member] == num_tokens
                shared[member] = owner, num_tokens
            self.seen.add("group")
        assert [num_tokens for _, num_tokens in shared] == shared_lens[:size]
        return shared

    def _sample(self, req_idx, context, state):
        sampling = self.request_state.sampling
        seed = int(self.seeds[req_idx].view(np.uint64)[0])
        too_short = context < sampling.min_len[req_idx].item()
        return pick(state, seed, sampling.stop_ids[req_idx].tolist() if too_short else ())

    def _prefill(self, batch):
        assert (StateCopies in batch.messages) == (self.states is not None)
        if self.states is not None:
            self._advance_states(batch)
        arrays = self.prepare(batch)
        size = self.sizes.fit(arrays, batch.needs_every_state)
        step = SimpleNamespace(**self.take(batch, arrays))
        self._copy_blocks(batch.messages.get(BlockCopies, NO_COPIES).before)
        owners, states = (self._packed if size is None else self._padded)(batch, step, size)
        return self._outputs(batch, step, owners, states)

    def _packed(self, batch, step, _):
        assert len(step.input_ids) == batch.num_tokens
        owners = []
        for i, seq_id in enumerate(self.chunk_seq_ids):
            request = self.requests[seq_id]
            packed = slice(step.cu_seqlens_q[i], step.cu_seqlens_q[i + 1])
            stop = int(step.context_lens[i])
            start = stop - (packed.stop - packed.start)
            assert step.cu_seqlens_k[i + 1] - step.cu_seqlens_k[i] == stop
            assert step.positions[packed].tolist() == list(range(start, stop))
            slots = self._slots(step.req_indices[i], start, stop)
            assert step.slot_mapping[packed].tolist() == slots.tolist()
            self._store(request, slots, start, stop, step.input_ids[packed])
            owners += [(request, position) for position in range(start, stop)]
        # every layer stores all keys and values of a launch before it attends
        for i, seq_id in enumerate(self.chunk_seq_ids):
            self._attend(self.requests[seq_id], step.req_indices[i], step.context_lens[i])
        return owners, [request.states[position].item() for request, position in owners]

    def _padded(self, batch, step, size):
        """What fills up a prefill is checked, and cut off; the parts of a sequence are joined."""
        self.seen.add("padded prefill")
        num_tokens, num_seqs = batch.num_tokens, len(step.req_indices)
        assert (len(step.input_ids), num_seqs) in self.sizes.sizes and len(step.input_ids) == size
        assert not batch.readouts
        lengths = batch.stops - batch.starts
        parts = -(-lengths // prefill_graphs.MAX_PADDED_SEQLEN)
        self.seen |= {"cut"} if max(parts) > 1 else set()
        last, num_parts = np.cumsum(parts) - 1, sum(parts)  # of each sequence
        assert (step.slot_mapping[num_tokens:] == -1).all() and (step.context_lens[num_parts:] == 0).all()
        assert (step.req_indices[num_parts:] == self.request_state.padding_req_idx).all()
        assert (step.cu_seqlens_q[num_parts:] == num_tokens).all() and len(step.cu_seqlens_q) > num_seqs
        part_lengths = np.diff(step.cu_seqlens_q)[:num_parts]
        assert (part_lengths > 0).all() and (part_lengths <= prefill_graphs.MAX_PADDED_SEQLEN).all()
        offsets = np.repeat(batch.starts - np.cumsum([0, *lengths[:-1]]), parts)  # position less packed token
        assert (step.context_lens[:num_parts] == step.cu_seqlens_q[1 : num_parts + 1] + offsets).all()
        assert (step.req_indices[:num_parts] == np.repeat(batch.chunk_req_indices, parts)).all()
        # the graph takes the last token of every sequence
        assert (step.logits_indices == last[: len(step.logits_indices)]).all()
        for name in ("input_ids", "positions", "slot_mapping"):
            setattr(step, name, getattr(step, name)[:num_tokens])
        step.req_indices, step.context_lens = step.req_indices[last], step.context_lens[last]
        ends = step.cu_seqlens_q[1:][last]
        step.cu_seqlens_q, step.cu_seqlens_k = np.append(0, ends), np.append(0, np.cumsum(step.context_lens))
        step.logits_indices = ends[: len(step.logits_indices)] - 1
        return self._packed(batch, step, None)

    def _advance_states(self, batch):
        """Every layer reads and writes the states of all sequences of a prefill at once, in no order."""
        (loads, saves, copies), padding = batch.messages[StateCopies], self.config.max_num_seqs
        seq_ids, own_rows = self.chunk_seq_ids, batch.chunk_req_indices.tolist()
        chunks = list(zip(map(self.requests.get, seq_ids), own_rows, batch.starts, batch.stops, strict=True))
        assert loads.keys() == set(own_rows)
        loads = [loads[row] for row in own_rows]
        written = [row for *_, row in saves]
        assert len(set(written)) == len(written) and not set(written) & set(loads)
        assert all(padding < row < len(self.states) for row in written)
        for (request, own, start, _), row in zip(chunks, loads, strict=True):
            assert row in (-1, own) or row > padding
            state = ROOT if row == -1 else self.states[row]
            assert state == (request.states[start - 1] if start else ROOT)
            self.seen |= {"loaded snapshot"} if row > padding else set()
        for own, position, row in saves:
            request, _, start, stop = chunks[own_rows.index(own)]
            assert start < position <= stop and position % self.grain == 0
            self.states[row] = request.states[position - 1]
        for i, (request, own, start, stop) in enumerate(chunks):
            self.states[own] = request.states[stop - 1]
            if i not in batch.sampled_from and request.params.max_tokens:  # cut: where the kernels' chunks end
                assert stop % self.recurrent_rows.chunk == 0 or stop - stop % self.recurrent_rows.chunk <= start
        sampled = dict(zip(batch.req_indices.tolist(), batch.sampled_from.tolist(), strict=True))
        assert copies == [(own_rows[i], row) for row, i in sampled.items() if row != own_rows[i]]
        for source, target in copies:
            self.states[target] = self.states[source]

    def _copy_blocks(self, copies):
        size = self.block_size
        for source, target in copies:
            self.kv[target * size : (target + 1) * size] = self.kv[source * size : (source + 1) * size]

    def _outputs(self, batch, step, owners, states):
        """Of a prefill whose packed token i is position ``owners[i][1]`` of request ``owners[i][0]``, and left the
        hidden state ``states[i]``: block copies, sampled tokens, log-probabilities of prompt tokens."""
        self._copy_blocks(batch.messages.get(BlockCopies, NO_COPIES).after)
        num_sampled = len(batch.req_indices)
        assert len(step.logits_indices) <= len(self.chunk_seq_ids)
        logits = [states[i] for i in step.logits_indices]
        sampled_from = getattr(step, "sampled_from", range(num_sampled))
        tokens = []
        for j, req_idx, seq_id in zip(sampled_from, step.sampled_req_indices, batch.seq_ids.tolist(), strict=True):
            context = int(self.length[req_idx])
            # what it will attend from now on is what its logits come from
            assert self._attend(self.requests[seq_id], req_idx, context) == logits[j]
            tokens.append(self._sample(req_idx, context, logits[j]))
        tokens = np.array(tokens, np.int32)
        chunks = zip(self.chunk_seq_ids, batch.starts.tolist(), batch.stops.tolist(), strict=True)
        resumed = batch.new.req_indices[batch.new.num_tokens > batch.new.num_prompt_tokens]
        self.resumed = (self.resumed - set(batch.new.req_indices.tolist())) | set(resumed.tolist())
        wanted = [(self.requests[seq_id], *row)
                  for req_idx, (seq_id, start, stop) in zip(batch.chunk_req_indices.tolist(), chunks, strict=True)
                  for row in self.requests[seq_id].scored_rows(start, stop) if req_idx not in self.resumed]  # fmt: skip
        if not wanted:
            assert not batch.readouts
            return tokens, step.sampled_req_indices, ()
        scored = zip(step.target_rows, step.target_ids.tolist(), strict=True)
        assert [(*owners[i], target) for i, target in scored] == wanted
        (message,) = batch.readouts
        assert sum(message.sizes) == len(wanted)
        places = [owners[i][1] for i in step.target_rows]
        rows = fake_logprobs(step.target_ids, places, message.num_top)
        return tokens, step.sampled_req_indices, (torch.from_numpy(rows),)

    def _decode(self, batch):
        self.take(batch, self.prepare(batch))
        state, size = self.request_state, batch.num_tokens
        assert (state.batch_req_indices[size:] == state.padding_req_idx).all()
        req_indices = state.batch_req_indices[:size]
        inputs = decode_inputs(req_indices, state.last_token, state.length, state.block_tables, self.block_size)
        input_ids, positions, slots, context_lens = (x.numpy() for x in inputs)
        req_indices = req_indices.numpy().copy()
        assert len(set(req_indices.tolist())) == len(req_indices)
        assert (batch.lengths == context_lens).all()
        requests = [self.requests[i] for i in batch.seq_ids.tolist()]
        if self.states is not None:
            self._step_states(batch, requests, req_indices)
        for i, request in enumerate(requests):
            position = int(positions[i])
            assert context_lens[i] == position + 1
            assert slots[i] == self._slots(req_indices[i], position, position + 1)[0]
            self._store(request, slots[i : i + 1], position, position + 1, input_ids[i : i + 1])
        contexts = zip(requests, req_indices, context_lens.tolist(), self._shared(size), strict=True)
        tokens = [
            self._sample(req_idx, n, self._attend(request, req_idx, n, shared))
            for request, req_idx, n, shared in contexts
        ]
        return np.array(tokens, np.int32), req_indices, ()

    def _verify(self, batch):
        """A decode step with drafts, which may be wrong: their slots then hold hashes of histories that never were."""
        state, size, Q = self.request_state, len(batch.req_indices), batch.num_rows
        drafts = batch.messages[DraftTokens]
        assert self.states is None
        self.take(batch, self.prepare(batch))
        padded = min(size + 1, self.config.max_num_seqs)  # as for a graph
        self.drafts.spread(padded, Q)
        rows = self.drafts.rows(padded, Q)
        inputs = decode_inputs(rows, state.last_token, state.length, state.block_tables, self.block_size)
        input_ids, positions, slots, context_lens = (x.numpy().reshape(padded, Q) for x in inputs)
        assert (slots[size:] == -1).all() and (context_lens[size:] == 0).all()
        rows, tokens, requests = rows.numpy().reshape(padded, Q), [], [self.requests[i] for i in batch.seq_ids.tolist()]
        hashes = []
        for i, (request, length) in enumerate(zip(requests, batch.lengths.tolist(), strict=True)):
            draft = [token for token in drafts.token_ids[i].tolist() if token >= 0]
            n, num_dead = 1 + len(draft), Q - 1 - len(draft)
            assert (drafts.token_ids[i, len(draft) :] == -1).all()
            assert length + len(draft) < request.limit
            assert context_lens[i].tolist() == [*range(length, length + n)] + [0] * num_dead
            assert positions[i, :n].tolist() == [*range(length - 1, length + n - 1)]
            assert input_ids[i, :n].tolist() == [request.known[length - 1], *draft]
            assert slots[i].tolist() == [*self._slots(rows[i, 0], length - 1, length + n - 1), *[-1] * num_dead]
            assert self.length[rows[i]].tolist() == context_lens[i].tolist()
            hashes.append([request.states[length - 1].item()])
            for token in draft:
                hashes[-1].append(chain(hashes[-1][-1], token))
            self.kv[slots[i, :n]] = hashes[-1]
            num_blocks = -(-(length + n - 1) // self.block_size) - -(-length // self.block_size)
            self.seen |= {"draft"} | {"draft in another block"} if num_blocks else {"draft"}
        for i, (request, length) in enumerate(zip(requests, batch.lengths.tolist(), strict=True)):
            sampled = []
            for j, history in enumerate(hashes[i]):
                self._attend(request, rows[i, 0], length)  # and behind it what the rows before have stored
                np.testing.assert_array_equal(self.kv[slots[i, : j + 1]], hashes[i][: j + 1])
                sampled.append(self._sample(rows[i, j], length + j, history))
            tokens += sampled + [0] * (Q - len(sampled))
        tokens = np.array(tokens, np.int32)
        num_accepted = drafts.num_accepted(tokens.reshape(size, Q))
        is_drafted = drafts.token_ids[:, 0] >= 0
        self.seen |= {f"{n} accepted" for n in set(num_accepted[is_drafted].tolist())}
        self.seen |= set() if is_drafted.all() else {"one row beside drafts"}
        return tokens, rows[:size].ravel(), ()

    def _step_states(self, batch, requests, req_indices):
        lengths = batch.lengths.tolist()
        for request, row, length in zip(requests, req_indices, lengths, strict=True):
            assert self.states[row] == request.states[length - 2]
            self.states[row] = request.states[length - 1]
