"""Drafts: guesses of the next tokens of running sequences, by lookup. A step that verifies them gives several tokens.

Owns where the last few tokens of a sequence stood before, in itself or in other texts, and when it pays to verify what
followed there. Knows numbers only, and nothing of blocks or devices.

Drafts change no output, so whatever is decided here is a matter of speed. Three rules keep it from being a loss:

- A sequence whose draft was all wrong needs twice as many equal tokens for the next, up to ``MAX_MATCH``; half as many
  after one that was all right. Texts that repeat have long matches soon, other texts hardly ever.
- A draft is short until three tokens of one were right. Either length is a captured number of rows.
- Steps are timed, by their kind and the number of sequences. Drafts are verified where the tokens expected of a step
  outweigh its time. Forward passes on an H100, 8 B of weights: a row takes 4.9 ms, 8 rows 5.5 ms, 64 rows 6.2 ms;
  0.6 B: 0.55, 0.75 and 1.1 ms. Rows of a mixture of experts need other experts each: three times as long for 8 rows,
  so it drafts nothing.
"""

from itertools import takewhile
from time import perf_counter
from typing import Any

import numpy as np

from nanovllm.config import SpeculativeConfig
from nanovllm.core import Sequence
from nanovllm.messages.verify import MAX_VERIFIED_SEQS, VERIFY_ROWS

MAX_MATCH = 32  # most equal tokens that are counted
MAX_CHAIN = 16  # most places that a search examines
MAX_KEPT_TOKENS = 1 << 18  # tokens kept from other texts
PRIOR_COST = 1.2  # cost of a verify step in plain steps, until it is measured
MARGIN = 1.05  # required tokens per unit of time, relative to plain steps
HASH_FACTOR, HASH_MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # 2**64 / golden ratio: Fibonacci hashing
FEW = 32  # up to this many tokens are indexed one by one
SEPARATOR = -1  # separates two texts; it is no token
NO_DRAFT: list[int] = []


class HashChains:
    """Where n tokens of a text stood before: hash chains, as in deflate. A token costs O(1).

    Place p is the end of the first p tokens. ``_head`` has the last place for each hash of the n tokens before it, and
    ``_before`` for each place the one before it of the same hash. 0 is none.

    Args:
        tokens: int32, the text; its owner appends to it.
        n: tokens that are hashed.
    """

    def __init__(self, tokens: np.ndarray, n: int):
        self.tokens, self._n, self.size = tokens, n, 0  # size: number of tokens indexed
        self._shift = 64 - max(10, (len(tokens) - 1).bit_length())
        self._head, self._before = np.zeros(1 << 64 - self._shift, np.int32), np.zeros(len(tokens) + 1, np.int32)
        # memoryviews read and write scalars four times as fast
        self.text: memoryview = memoryview(tokens)  # type: ignore[arg-type]
        self._views: tuple = memoryview(self._head), memoryview(self._before)  # type: ignore[arg-type]

    def extend(self, size: int) -> None:
        """Index the tokens before place ``size``."""
        first = max(self.size + 1, self._n)
        if size - first < FEW:
            head, before = self._views
            for place in range(first, size + 1):
                bucket = self._bucket(self.text, place)
                before[place], head[bucket] = head[bucket], place
        else:
            self._extend_by_many(first, size)
        self.size = max(size, self.size)

    def _extend_by_many(self, first: int, size: int) -> None:
        """The same for places [first, size]."""
        values, n = np.zeros(size + 1 - first, np.uint64), self._n
        for i in range(n):
            values = values * np.uint64(HASH_FACTOR) + self.tokens[first - n + i : size - n + i + 1].astype(np.uint64)
        buckets = (values * np.uint64(HASH_FACTOR)) >> np.uint64(self._shift)
        order = np.argsort(buckets, kind="stable")
        buckets, places = buckets[order], order + first
        before = self._head[buckets]
        is_same = np.flatnonzero(buckets[1:] == buckets[:-1]) + 1
        before[is_same] = places[is_same - 1]
        self._before[places] = before
        self._head[buckets] = places  # the last of equal buckets wins

    def _bucket(self, text: memoryview, place: int) -> int:
        value = 0
        for token in text[place - self._n : place]:
            value = value * HASH_FACTOR + token & HASH_MASK
        return (value * HASH_FACTOR & HASH_MASK) >> self._shift

    def longest(self, text: memoryview, size: int, enough: int) -> tuple[int, int]:
        """Find the latest place with ``enough`` tokens equal to the ones before ``size``, else the longest match.

        Returns:
            The place and the number of equal tokens; 0, 0 if fewer than n.
        """
        best, best_match = 0, self._n - 1
        if size < self._n:
            return 0, 0
        tokens, (head, before) = self.text, self._views
        place = head[self._bucket(text, size)]
        if place == size and text is tokens:
            place = before[place]
        for _ in range(MAX_CHAIN):
            if place == 0:
                break
            match, limit = 0, min(MAX_MATCH, place, size)
            while match < limit and tokens[place - 1 - match] == text[size - 1 - match]:
                match += 1
            if match > best_match:
                best, best_match = place, match
                if match >= enough:
                    break
            place = before[place]
        return (best, best_match) if best else (0, 0)


class KeptTexts(HashChains):
    """Prompts and finished outputs of an engine's requests. When there is no room the older half is dropped."""

    def __init__(self, n: int, max_texts: int):
        super().__init__(np.full(MAX_KEPT_TOKENS, SEPARATOR, np.int32), n)
        self._max_texts, self._ends = max_texts, list[int]()

    def add(self, text: np.ndarray) -> None:
        if len(text) <= self._n or len(text) > MAX_KEPT_TOKENS // 4 or self._max_texts == 0:
            return
        if self.size + len(text) + 1 > MAX_KEPT_TOKENS or len(self._ends) >= self._max_texts:
            ends = self._ends[len(self._ends) // 2 :]
            start = self._ends[len(self._ends) // 2 - 1] if len(self._ends) > 1 else self.size
            kept, self._ends = self.tokens[start : self.size].copy(), [end - start for end in ends if end > start]
            self._head[:] = 0
            self.size = 0
            self.tokens[: len(kept)] = kept
            self.extend(len(kept))
        stop = self.size + len(text)
        self.tokens[self.size : stop], self.tokens[stop] = text, SEPARATOR
        self.extend(stop + 1)
        self._ends.append(self.size)


class Lookup:
    """The lookup state of one running sequence."""

    def __init__(self, chains: HashChains, options: SpeculativeConfig):
        self.chains, self._options = chains, options
        self.needed = options.prompt_lookup_min  # equal tokens that a draft needs
        self.max_length = min(VERIFY_ROWS[0] - 1, options.num_speculative_tokens)  # most tokens of a draft
        self.rate = 0.6  # recent share of drafted tokens that were accepted
        # Where the tokens before ``size`` were found: a text, the place after them, and how many are equal. While that
        # text continues like this one, nothing is looked up and nothing needs to be indexed.
        self.size, self.source, self.place, self.match = 0, chains.text, 0, 0
        self.awaits = False  # whether the step in flight is for the token at ``place``

    def follow(self, size: int) -> bool:
        """Whether the tokens up to ``size`` continue as the source does."""
        grown = size - self.size
        follows = self.place > 0 and self.chains.text[self.size : size] == self.source[self.place : self.place + grown]
        if self.awaits and grown and not follows:
            self.judge(1, 0)  # it has cost a step that would have run ahead
        self.awaits = False
        if follows:
            self.size, self.place, self.match = size, self.place + grown, min(self.match + grown, MAX_MATCH)
        return follows

    def find(self, size: int, enough: int, kept: "KeptTexts | None") -> None:
        """Look up the tokens before ``size``, where ``enough`` of them stood."""
        self.chains.extend(size)
        self.size, self.source = size, self.chains.text
        self.place, self.match = self.chains.longest(self.chains.text, size, enough)
        if kept is not None and self.match < enough:
            place, match = kept.longest(self.chains.text, size, enough)
            if match > self.match:
                self.source, self.place, self.match = kept.text, place, match

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """A draft was verified."""
        self.rate += 0.3 * (num_accepted / num_drafted - self.rate)
        self.max_length = min(VERIFY_ROWS[num_accepted >= VERIFY_ROWS[0] - 1] - 1, self._options.num_speculative_tokens)
        if num_accepted == 0:
            self.needed = min(2 * self.needed, max(MAX_MATCH, self.needed))
        elif num_accepted == num_drafted:
            self.needed = max(self.needed // 2, self._options.prompt_lookup_min)


class Speculator:
    """Drafts of an engine's running sequences, and whether to verify them."""

    def __init__(self, options: SpeculativeConfig):
        self._options, self._lookups = options, dict[int, Lookup | None]()  # by seq_id; None: nothing is drafted
        is_suffix = options.method == "suffix"
        self._enough = options.suffix_decoding_max_tree_depth if is_suffix else options.prompt_lookup_max
        self._factor = options.suffix_decoding_max_spec_factor if is_suffix else VERIFY_ROWS[-1]
        self._seconds = dict[tuple[int, int], float]()  # time of a step by the number of sequences and the rows of each
        self._last_step = 0.0  # perf_counter
        self.num_drafts = self.num_draft_tokens = 0
        self.num_accepted = [0] * (VERIFY_ROWS[-1] - 1)  # drafts that were right at each place
        self.clear()

    def clear(self) -> None:
        """Forget every text: an interrupt may have left any of it half updated."""
        self._lookups.clear()
        self._kept: KeptTexts | None = None
        if self._options.method == "suffix":
            self._kept = KeptTexts(self._options.prompt_lookup_max, self._options.suffix_decoding_max_cached_requests)
        self.is_verifying = False  # whether the launch in flight verifies drafts

    def counters(self) -> dict[str, Any]:
        """Drafts that were verified, their tokens, and how many of these were right; also by their place."""
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": sum(self.num_accepted),
            "spec_decode_num_accepted_tokens_per_pos": list(self.num_accepted),
        }

    # ---------------------------------------------------------------- drafts

    def propose(self, seqs: list[Sequence], room: list[int], max_rows: int, is_ahead: bool) -> np.ndarray | None:
        """Drafts of all the sequences of the next step, int32 [B, Q - 1], -1 where there is none; None if it should
        decode plainly.

        Args:
            room: longest draft of each sequence.
            max_rows: of a launch.
            is_ahead: a step is in flight. The tokens after it are not known, so the drafts count only as a reason to
                wait for them.
        """
        found = [self._draft(seq, limit) for seq, limit in zip(seqs, room, strict=True)]
        longest = max(len(draft) for draft, *_ in found)
        if longest == 0:
            return None
        num_rows = next(n for n in VERIFY_ROWS if n > longest)
        if len(seqs) * num_rows > max_rows:
            return None
        if self._options.adaptive and not self._pays(sum(expected for *_, expected in found), len(seqs), num_rows):
            return None
        drafts = np.full((len(seqs), num_rows - 1), SEPARATOR, np.int32)
        for i, (draft, lookup, _) in enumerate(found):
            drafts[i, : len(draft)] = draft
            if lookup is not None:
                lookup.awaits = is_ahead and len(draft) > 0
        return drafts

    def _draft(self, seq: Sequence, room: int) -> tuple[list[int], Lookup | None, float]:
        """The draft of a sequence, whose it is, and how many of its tokens may be right."""
        lookup = self._lookups[seq.seq_id] if seq.seq_id in self._lookups else self._enter(seq)
        if lookup is None:
            return NO_DRAFT, None, 0.0
        size, enough = seq.num_tokens, max(self._enough, lookup.needed)
        if not lookup.follow(size):
            lookup.find(size, enough, self._kept)
        length = min(lookup.max_length, room, int(lookup.match * self._factor))
        if lookup.match < lookup.needed or length <= 0:
            return NO_DRAFT, lookup, 0.0
        is_own = lookup.source is lookup.chains.text
        stop = lookup.place + length
        known = lookup.source[lookup.place : min(stop, size) if is_own else stop].tolist()
        draft = list(takewhile(lambda token: token >= 0, known))  # up to the end of the text, or to an image
        if is_own and len(draft) == len(known):  # the text repeats with this period
            draft = [known[i % len(known)] for i in range(length)]
        return draft, lookup, len(draft) * max(lookup.rate, lookup.match / MAX_MATCH)

    def _enter(self, seq: Sequence) -> Lookup | None:
        params, lookup = seq.sampling_params, None
        # the tokens that these may sample depend on the tokens before, or on a table by request slot
        if not (params.is_constrained or params.has_penalties or params.logit_bias or params.logits_processors
                or params.allowed_token_ids or params.thinking_token_budget is not None):  # fmt: skip
            n, capacity = self._options.prompt_lookup_min, len(seq.tokens(0, seq.max_num_tokens))
            lookup = Lookup(HashChains(seq.tokens(0, capacity), n), self._options)
        self._lookups[seq.seq_id] = lookup
        return lookup

    def leave(self, seq: Sequence) -> None:
        """A sequence gives up its request slot, where its tokens were."""
        self._lookups.pop(seq.seq_id, None)
        if self._kept is not None and seq.finish_reason is not None:
            # the prompt tokens that the prefix cache had are most likely in the texts already
            self._kept.add(seq.tokens(max(0, seq.num_cached_tokens - MAX_MATCH), seq.num_tokens))

    # ---------------------------------------------------------------- gain

    def _pays(self, expected: float, num_seqs: int, num_rows: int) -> bool:
        """Whether the tokens expected outweigh the time of a verify step."""
        size = size_class(num_seqs)
        plain, verify = self._seconds.get((size, 1)), self._seconds.get((size, num_rows))
        if plain is None:
            return False  # a batch size starts with a plain step, to measure its time
        cost = verify / plain if verify else PRIOR_COST
        if num_seqs + expected >= MARGIN * cost * num_seqs:
            return True
        if verify:
            self._seconds[size, num_rows] = verify * 0.99  # decays, so that one slow step is not the last word
        return False

    def took_in(self, num_seqs: int, num_rows: int, is_decode: bool = True) -> None:
        """Record the duration of the step that just finished; keeps the minimum per size: others had pauses."""
        now = perf_counter()
        seconds, self._last_step = now - self._last_step, now
        if is_decode and num_seqs <= MAX_VERIFIED_SEQS:
            key = size_class(num_seqs), num_rows
            # The first time may include a pause or a kernel's loading, so it is capped at a plain step for each row.
            most = 1.05 * self._seconds.get(key, num_rows * self._seconds.get((key[0], 1), seconds))
            self._seconds[key] = min(seconds, most)

    def verified(self, seq_ids: list[int], drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        """The launch in flight is taken in. ``drafts`` [B, Q - 1] as proposed; ``num_accepted`` [B]."""
        self.is_verifying = False
        for seq_id, draft, accepted in zip(seq_ids, drafts.tolist(), num_accepted.tolist(), strict=True):
            if drafted := len(draft) - draft.count(SEPARATOR):
                self.num_drafts += 1
                self.num_draft_tokens += drafted
                for place in range(accepted):
                    self.num_accepted[place] += 1
                if (lookup := self._lookups.get(seq_id)) is not None:
                    lookup.judge(drafted, accepted)
        self.took_in(len(seq_ids), drafts.shape[1] + 1)


def size_class(num_seqs: int) -> int:
    """Powers of two, to which graphs are padded."""
    return (num_seqs - 1).bit_length()
