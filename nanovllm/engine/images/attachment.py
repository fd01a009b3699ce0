"""The images of one prompt: their places among its tokens, their positions, and the parts of them that chunks need."""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from nanovllm.errors import RequestError, as_request_error
from nanovllm.messages import Attachment
from nanovllm.messages.images import ImagePart, ImageRows
from nanovllm.models.vision import VisionConfig

if TYPE_CHECKING:
    from nanovllm.engine.images.loading import Image, Pixels


class Images(Attachment):
    """The images of a prompt.

    Args:
        vision: the tower of the checkpoint.
        prompt_ids: with a placeholder for each image, or already one for each of its tokens.
        images: in the order of their placeholders.
        layout: from the grid of an image to the ids that take the place of its placeholder.

    Attributes:
        prompt_ids: int64 [T], with a placeholder for each token of an image.
    """

    def __init__(self, vision: VisionConfig, prompt_ids: np.ndarray, images: "list[Image]",
                 layout: Callable[[np.ndarray], np.ndarray]):
        sizes = [image.num_tokens for image in images]
        num_placeholders = np.count_nonzero(prompt_ids == vision.image_token_id)
        if num_placeholders == len(images):
            first, *others = np.split(prompt_ids, np.flatnonzero(prompt_ids == vision.image_token_id))
            parts = []
            for image, text in zip(images, others, strict=True):
                ids = layout(image.grid)  # the prompt may already hold all tokens of the image, not only one
                parts += [text] if np.array_equal(ids, text[: len(ids)]) else [ids, text[1:]]
            prompt_ids = np.concatenate([first, *parts])
        elif num_placeholders < sum(sizes):
            raise wrong_count(vision, num_placeholders, len(images))
        else:
            check_places(vision, prompt_ids, [image.grid for image in images])
        self._vision, self._images, self.prompt_ids = vision, images, prompt_ids
        self._pixels: list[Pixels | None] = [None] * len(images)  # pixels of images that wait for the tower
        # Pixels that a batch holds. Several completions of the prompt may be in it: they share this object.
        self._launched: WeakValueDictionary[int, Pixels] = WeakValueDictionary()
        is_image = prompt_ids == vision.image_token_id
        is_image &= np.cumsum(is_image) <= sum(sizes)  # the model may have sampled the id after the images
        self._first_rows = np.append(0, np.cumsum(sizes))  # first row of each image, among the tokens of images
        self._row = np.append(0, np.cumsum(is_image))  # number of image tokens before each token
        self.token_ids = prompt_ids.astype(np.int32)
        if images:
            self.token_ids[is_image] = np.concatenate([content_ids(image.digest, image.num_tokens) for image in images])
        self._positions = vision.positions(is_image, [image.grid for image in images]) if vision.section else None

    def is_ready(self, start: int) -> bool:
        """Whether the pixels of images from token ``start`` on are in memory; begins to load missing ones."""
        first = self._row[min(start, len(self.token_ids))]
        for i, (image, end) in enumerate(zip(self._images, self._first_rows[1:], strict=True)):
            if end > first and self._pixels[i] is None:
                try:
                    self._pixels[i] = image.pixels_if_loaded()
                except BaseException as error:  # their user has closed the PIL image
                    self.failure = str(as_request_error(error))
                    return False
        return all(x is not None for x, end in zip(self._pixels, self._first_rows[1:], strict=True) if end > first)

    def chunk_end(self, start: int, stop: int) -> int:
        if not self._vision.both_ways:
            return stop
        row = self._row[min(stop, len(self.token_ids))]
        num_cut = row - self._first_rows[np.searchsorted(self._first_rows, row, "right") - 1]
        # Behind ``start`` may be the end of an image whose beginning is cached: computed with the whole of it, as well.
        return max(start, stop - int(num_cut))

    def part(self, start: int, stop: int) -> ImagePart | None:
        length = len(self.token_ids)
        first, last = self._row[min(start, length)], self._row[min(stop, length)]
        rows = []
        for i, image in enumerate(self._images):
            begin, end = self._first_rows[i : i + 2]
            if begin < last and end > first:
                pixels = self._pixels[i] or self._launched.get(i)
                assert pixels is not None, "is_ready was false"
                of_image = int(max(first - begin, 0)), int(min(last, end) - begin)
                rows.append(ImageRows(image.digest, image.num_tokens, *of_image, pixels))
                self._launched[i], self._pixels[i] = pixels, pixels
                if end <= last:  # after a preemption they are loaded again
                    self._pixels[i] = image.pixels = None
        if self._positions is None:
            return ImagePart(tuple(rows), None, 0) if rows else None
        shift = int(self._positions[:, -1].max()) + 1 - length
        after = np.arange(max(start, length), max(stop, length), dtype=np.int32) + shift
        positions = np.concatenate([self._positions[:, start:stop], np.broadcast_to(after, (3, len(after)))], axis=1)
        return ImagePart(tuple(rows), positions, shift)


def wrong_count(vision: VisionConfig, num_placeholders: Any, num_images: int) -> RequestError:
    return RequestError(
        f"the prompt has {num_placeholders} image placeholders (token {vision.image_token_id}) and {num_images} "
        "images; write one placeholder for each image."
    )


def check_places(vision: VisionConfig, prompt_ids: np.ndarray, grids: list[np.ndarray]) -> None:
    """Raise RequestError unless the tokens of each image are together in a prompt that has all of them."""
    is_image, stop, marks = prompt_ids == vision.image_token_id, 0, [-1] * len(vision.family.marks)
    for i, grid in enumerate(grids):
        expected = vision.layout(grid, marks) == vision.image_token_id
        start = stop + int(is_image[stop:].argmax())
        stop = start + len(expected)
        is_longer = i == len(grids) - 1 and is_image[stop : stop + 1].any()  # another image may follow at once
        if is_longer or not np.array_equal(is_image[start:stop], expected):
            num_given = int(np.append(is_image[start:], False).argmin())
            raise RequestError(
                f"the prompt has {num_given} image placeholders (token {vision.image_token_id}) in a row at token "
                f"{start}, which do not fit image {i} of {vision.num_tokens(grid)} tokens; write one placeholder for "
                "each image."
            )


def content_ids(digest: bytes, num_tokens: int) -> np.ndarray:
    """Negative ids for the tokens of an image, int32 [num_tokens], made of its contents."""
    words = np.frombuffer(hashlib.shake_128(digest).digest(4 * num_tokens), np.int32)
    return words | np.int32(-(2**31))
