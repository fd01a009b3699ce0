"""The ring buffer between processes: every reader gets every message, whole and in order."""

import ctypes
import multiprocessing

import numpy as np
import pytest
import worker_mains

from nanovllm.distributed.channel import Channel
from nanovllm.distributed.workers import hidden_main_module


def never():
    pass


def test_messages_of_any_size_reach_all_readers():
    context, size = multiprocessing.get_context("spawn"), 3
    memory = context.RawArray(ctypes.c_char, Channel.NUM_BYTES)
    channel, readers = Channel(memory, 0, size), []
    for rank in (1, 2):
        answers, theirs = context.Pipe(duplex=False)
        process = context.Process(target=worker_mains.echo, args=(memory, rank, size, theirs), daemon=True)
        with hidden_main_module():
            process.start()
        readers.append((process, answers))
    rng = np.random.default_rng(0)
    for num_words in (1, 7, 300_000, 2, Channel.NUM_WORDS, Channel.NUM_WORDS - 1, 1_500_000, 5, 0):
        words = rng.integers(-(2**31), 2**31, num_words).astype(np.int32)
        channel.send(words, never)
        for _, answers in readers:
            assert answers.poll(30)
            assert answers.recv() == (num_words, int(words.sum(dtype=np.int64)))
    for process, _ in readers:
        process.join(10)
        assert process.exitcode == 0


def test_a_full_channel_waits_for_the_slowest_reader():
    memory = bytearray(Channel.NUM_BYTES)
    channel, reader = Channel(memory, 0, 3), Channel(memory, 1, 3)  # no reader of rank 2

    class Full(Exception):
        pass

    def check():
        raise Full

    words = np.arange(Channel.NUM_WORDS - 1, dtype=np.int32)  # fills the ring, with its length
    channel.send(words, check)
    assert np.array_equal(reader.receive(), words)
    with pytest.raises(Full):
        channel.send(words[:0], check)
    Channel(memory, 2, 3).receive()
    channel.send(words[:0], check)
    assert len(reader.receive()) == 0


def test_only_int32_fits():
    with pytest.raises(TypeError):
        Channel(bytearray(Channel.NUM_BYTES), 0, 2).send(np.array([0.5]), never)
