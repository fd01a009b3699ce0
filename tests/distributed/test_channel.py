"""The ring buffer between processes: every reader gets every message, whole and in order."""

import ctypes
import multiprocessing
import zlib
from random import Random

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
    rng = Random(0)
    for num_bytes in (1, 7, 1_200_000, 2, Channel.RING_BYTES, Channel.RING_BYTES - 8, 6_000_000, 5, 0):
        message = rng.randbytes(num_bytes)
        channel.send(message, never)
        for _, answers in readers:
            assert answers.poll(30)
            assert answers.recv() == (num_bytes, zlib.crc32(message))
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

    message = Random(0).randbytes(Channel.RING_BYTES - 8)  # fills the ring, with its length
    channel.send(message, check)
    assert reader.receive() == message
    with pytest.raises(Full):
        channel.send(b"", check)
    Channel(memory, 2, 3).receive()
    channel.send(b"", check)
    assert reader.receive() == b""
