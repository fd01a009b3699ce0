"""Sizes of the CUDA graphs of decode steps: a batch is padded to the next. Numbers only."""


def decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then steps of 16 to 256 and of 32 beyond, up to ``max_num_seqs``."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def grouped_sizes(decode_sizes: list[int]) -> list[int]:
    """Sizes of CUDA graphs with groups: fewer than without, since each is captured when a batch waits for it."""
    return [size for size in decode_sizes[:-1] if size == 32 or size % 64 == 0] + decode_sizes[-1:]
