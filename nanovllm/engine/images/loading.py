"""Images of prompts, from their source to the pixels that the tower takes, on threads.

Owns the checkpoint's image processor, which is transformers', and the pixels that wait for the tower: at most
``max_pixel_gib``, and those of the next prompt. Where they were dropped, because there was no room or because a request
was preempted, an image is processed again from its source while the request waits.
"""

import hashlib
import json
import math
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.images.attachment import Images, wrong_count
from nanovllm.engine.images.decoding import open_image
from nanovllm.engine.images.factory import KEYS, data_of, has_keys, options_of
from nanovllm.engine.images.fetching import end_all
from nanovllm.engine.images.messages import SizedImage, take_images
from nanovllm.engine.images.processing import PIXELS, ImageProcessor
from nanovllm.engine.images.sources import Permissions, name_of, read_source
from nanovllm.engine.loading import NUM_THREADS, Attachments, Loading
from nanovllm.engine.text.prompts import as_token_ids, split_prompt
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.errors import CheckpointError, ConfigError, RequestError, as_request_error
from nanovllm.models.vision import VisionConfig

NO_LIMIT = 999  # images in a prompt
SIDES = ("resized_height", "resized_width")  # size of an image in pixels
MAX_PROCESSORS = 64  # processors that are kept, each with different options
# Permits to decode and resize, for a quarter of the cores (of 4 to 8: two); the other threads wait for files and hosts.
# A processor may start threads of its own, and with all cores busy, launches would be late (docs/experiments.md).
CORES = threading.BoundedSemaphore(max(1, min(2, NUM_THREADS // 2), NUM_THREADS // 4))
EXECUTORS: "weakref.WeakSet[ThreadPoolExecutor]" = weakref.WeakSet()  # executors of all engines


def _end() -> None:
    """Let the interpreter's end wait for images being decoded, but not for hosts or queued images."""
    end_all()
    for threads in list(EXECUTORS):
        threads.shutdown(wait=False, cancel_futures=True)


threading._register_atexit(_end)  # type: ignore[attr-defined]  # before executors are joined, which were imported above


class Pixels:
    """The tensors of one image that the tower takes, by name, on the CPU; they count while they are referenced."""

    def __init__(self, loader: "ImageLoader", tensors: dict[str, Any]):
        self.tensors, num_bytes = tensors, sum(tensor.nbytes for tensor in tensors.values())
        loader.count(num_bytes)
        weakref.finalize(self, loader.count, -num_bytes)


class Image:
    """One image of a prompt; its source is kept until the request is finished.

    Attributes:
        pixels: None if they were dropped, or while they load again.
        digest: of the contents and of the options of the processor.
        grid: frames, rows and columns of patches.
        num_tokens: of the language model.
    """

    def __init__(self, loader: "ImageLoader", source: Any, options: dict[str, Any]):
        self._loader, self._source, self._options = loader, source, options
        image, pixels = self._process()
        self.grid = loader.vision.grid(pixels)
        self.num_tokens = loader.vision.num_tokens(self.grid)
        if loader.vision.both_ways and self.num_tokens > loader.max_tokens:
            raise RequestError(
                f"the image has {self.num_tokens} tokens, which attend each other both ways, and a launch takes "
                f"{loader.max_tokens}; raise max_num_batched_tokens, or make the image smaller by mm_processor_kwargs."
            )
        contents = source if isinstance(source, bytes) else b"%r" % (image.size,) + image.tobytes()
        name = json.dumps([options, self.grid.tolist()], sort_keys=True, default=str)
        self.digest = hashlib.blake2b(contents, digest_size=16, key=hashlib.md5(name.encode()).digest()).digest()
        self.pixels = loader.keep(pixels)
        self._again: Future[Pixels] | None = None

    def pixels_if_loaded(self) -> Pixels | None:
        """The pixels; None while they load again, which this begins."""
        if self.pixels is None:
            self._again = self._again or self._loader.threads.submit(self._process_again)
            if self._again.done():
                self.pixels, self._again = self._again.result(), None
        return self.pixels

    def _process(self) -> tuple[Any, dict[str, Any]]:
        """The upright image, and the tensors that the tower takes."""
        with CORES:
            image = open_image(self._source)
            return image, self._loader.process(image, self._options)

    def _process_again(self) -> Pixels:
        return Pixels(self._loader, self._process()[1])


class LoadingImages(Loading):
    """The images of one prompt. ``options``: of the image processor."""

    def __init__(self, loader: "ImageLoader", prompt_ids: np.ndarray, sources: list[Any], options: dict[str, Any]):
        self._loader, self._sources, self._options = loader, sources, options
        self.prompt_ids, self.num_inputs = prompt_ids, len(sources)
        self._images: list[Future[Image]] = []

    def begin(self) -> None:
        load, threads = self._loader.load, self._loader.threads
        self._images = self._images or [threads.submit(load, source, self._options) for source in self._sources]

    def is_ready(self, timeout_s: float) -> bool:
        return not wait(self._images, timeout_s).not_done

    def images(self) -> list[Image]:
        """The images, once they are loaded; raises RequestError for one that cannot be read."""
        self.begin()
        found = []
        for i, image in enumerate(self._images):
            try:
                found.append(image.result())
            except BaseException as error:
                refused = as_request_error(error)
                raise RequestError(f"image {i}: {refused}" if len(self._images) > 1 else str(refused)) from None
        return found

    def attachment(self) -> Images:
        return Images(self._loader.vision, self.prompt_ids, self.images(), self._loader.layout)


class ImageLoader(Attachments):
    """Makes the images of prompts; one per engine.

    Args:
        vision: the tower of the checkpoint.
        config: what may be read, how many images a prompt may have, options of the image processor.
        tokenizer: for prompts that are text.
    """

    def __init__(self, vision: VisionConfig, config: Config, tokenizer: AsyncTokenizer):
        self.vision, self._model_path, self._tokenizer = vision, config.model_path, tokenizer
        self.placeholder = vision.family.text
        path, domains = config.allowed_local_media_path, tuple(map(str.lower, config.allowed_media_domains or ()))
        self.permissions = Permissions(Path(path).resolve() if path else None, domains)
        self.max_tokens = config.max_num_batched_tokens
        self._limit = (config.limit_mm_per_prompt or {}).get("image", NO_LIMIT)
        self._options = options = {**vision.processor_options, **options_of(config.mm_processor_kwargs)}
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="nanovllm-images")
        EXECUTORS.add(self.threads)
        self.max_bytes, self.num_bytes = int(config.max_pixel_gib * 2**30), 0  # bytes of ``Pixels``
        self._lock = threading.RLock()  # reentrant: garbage collection may drop pixels in a thread that holds it
        self._processors: dict[str, ImageProcessor] = {}  # processors by their options
        self._processor({}, CheckpointError)
        self._processor(options, ConfigError)
        from nanovllm.runner.images import pixel_form  # imports torch

        self._convert = pixel_form(config)

    # ---------------------------------------------------------------- prompts

    @cached_property
    def _placeholder(self) -> str:
        """The text of an image's placeholder; "" without a tokenizer."""
        has_tokenizer = self._tokenizer.tokenizer is not None
        return self._tokenizer.decode([[self.vision.image_token_id]], False)[0] if has_tokenizer else ""

    def takes(self, prompt: Any) -> bool:
        """Whether a prompt has images, or its text a placeholder of one: without the image, that is an error."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        has_placeholder = isinstance(text, str) and self._placeholder != "" and self._placeholder in text
        return has_placeholder or has_keys(prompt)

    def split(self, conversation: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        messages, images = take_images(list(conversation))
        return messages, {"multi_modal_data": {"image": images}} if images else {}

    def placed(self, text: str) -> str:
        return self.vision.placed(text)

    def loaded(self, prompt: Any) -> Any:
        if not self.takes(prompt):
            return prompt
        text, loading = self.encode(prompt)
        loading.attachment()  # checks the number of placeholders
        images = {"image": loading.images()}
        return {"prompt": text, "prompt_token_ids": loading.prompt_ids, "multi_modal_data": images}

    def has_room(self) -> bool:
        return self.num_bytes < self.max_bytes // 2

    def encode(self, prompt: Any) -> tuple[str | None, LoadingImages]:
        """Check the form of a prompt, and tokenize it."""
        prompt = {"prompt": prompt} if isinstance(prompt, str) else prompt
        text, ids = split_prompt({key: prompt[key] for key in prompt if key not in KEYS})
        if ids is None:
            (ids,) = self._tokenizer.encode([self.vision.placed(str(text))])
        sources = self._sources(prompt)
        given = options_of(prompt.get("mm_processor_kwargs"))
        without = PIXELS if "size" in given else {}  # the engine's bounds would take the place of this prompt's
        options = {name: value for name, value in self._options.items() if name not in without} | given
        self._processor(options, RequestError)
        for source in sources:
            if isinstance(source, SizedImage):
                self._check_sizes(source.options)
                self._processor({**options, **source.options}, RequestError)
        ids = as_token_ids(ids)
        num_placeholders = np.count_nonzero(ids == self.vision.image_token_id)
        # the placeholder ids outnumber the images: one for each token of an image, and others that the model sampled
        if num_placeholders != len(sources) and (num_placeholders < len(sources) or not sources):
            raise wrong_count(self.vision, num_placeholders, len(sources))
        return text, LoadingImages(self, ids, sources, options)

    def layout(self, grid: np.ndarray) -> np.ndarray:
        """The ids that take the place of an image's placeholder."""
        return self.vision.layout(grid, self._marks)

    @property
    def _bounds(self) -> dict[str, int]:
        """Bounds of qwen_vl_utils for an image whose part gives its sides: 4 to 16,384 tokens."""
        factor = self.vision.patch_size * self.vision.merge_size
        return {"factor": factor, "min_pixels": 4 * factor**2, "max_pixels": 16384 * factor**2}

    @cached_property
    def _marks(self) -> list[int]:
        """The ids of ``TowerFamily.marks``."""
        marks = self.vision.family.marks
        (ids,) = self._tokenizer.encode(["".join(marks)], add_special_tokens=False) if marks else ([],)
        if len(ids) != len(marks):
            raise RequestError(f"the tokenizer lacks {' or '.join(marks)}, so images have no place in a prompt.")
        return ids

    def load(self, source: Any, options: dict[str, Any]) -> Image:
        """Read and process an image, on a thread; raises RequestError."""
        if isinstance(source, SizedImage):
            source, options = source.source, {**options, **source.options}
        if isinstance(source, Image):
            return source
        data = read_source(source, self.permissions)
        try:
            return Image(self, data, options)
        except RequestError as error:
            name = name_of(source)
            raise RequestError(f"{name}: {error}" if name else str(error)) from None

    def _check_sizes(self, sizes: dict[str, int]) -> None:
        """Raise RequestError for sizes of one image that contradict each other, or where the processor has none."""
        for name in sizes:
            if "min_pixels" not in self._processor({}, RequestError).given.valid_kwargs.__annotations__:
                raise RequestError(f"the image processor of this model has no option {name!r} for an image.")
        if len(alone := [side for side in SIDES if side in sizes]) == 1:
            raise RequestError(f"{alone[0]} of an image needs {' and '.join(SIDES)}.")
        least, most = sizes.get("min_pixels", 0), sizes.get("max_pixels", math.inf)
        if least > most:
            raise RequestError(f"min_pixels={least} of an image exceeds its max_pixels={most}.")

    def _sources(self, prompt: Mapping[str, Any]) -> list[Any]:
        data = data_of(prompt.get("multi_modal_data"))
        if others := [modality for modality in data if modality != "image"]:
            raise RequestError(f"multi_modal_data cannot have {', '.join(map(repr, others))}: images only.")
        images = data.get("image")
        images = [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]
        if len(images) > self._limit:
            raise RequestError(
                f"the prompt has {len(images)} images; LLM(limit_mm_per_prompt={{'image': {self._limit}}}) allows "
                f"{self._limit}."
            )
        return images

    # ---------------------------------------------------------------- pixels

    def process(self, image: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The tensors that the tower takes of an upright RGB image, on the CPU; raises RequestError."""
        try:
            processor = self._processor(options, RequestError)
            if SIDES[0] in options:
                fit = sys.modules[type(processor.given).__module__].smart_resize
                height, width = fit(*(options[side] for side in SIDES), **self._bounds)
                image = image.resize((width, height))
            return self._convert(processor(image))
        except Exception as error:  # the processor rejects such sizes
            raise RequestError(f"the image processor cannot take this image: {error!s:.300}") from None

    def keep(self, pixels: dict[str, Any]) -> Pixels | None:
        """The pixels; None if there is no room for them."""
        with self._lock:
            fit = self.num_bytes + sum(tensor.nbytes for tensor in pixels.values()) <= self.max_bytes
            return Pixels(self, pixels) if fit else None

    def count(self, num_bytes: int) -> None:
        """Pixels of this size come into memory or, with a negative size, leave it."""
        with self._lock:
            self.num_bytes += num_bytes

    def _processor(self, options: dict[str, Any], kind: type[Exception]) -> ImageProcessor:
        """The image processor of the checkpoint with these options; it keeps the size of a resized image."""
        if SIDES[0] in options:
            options = {name: value for name, value in options.items() if name not in SIDES}
            options |= {name: value for name, value in self._bounds.items() if name != "factor"}
        key = json.dumps(options, sort_keys=True, default=str)
        with self._lock:
            if key in self._processors:
                return self._processors[key]
        try:
            processor = ImageProcessor(self._model_path, options, self.vision)
        except TypeError as error:
            raise kind(f"mm_processor_kwargs: {error}") from None
        for name, size in self.vision.processor_sizes.items():
            if (found := getattr(processor.given, name, size)) != size:
                raise kind(f"the image processor has {name}={found!r:.50}, and the vision tower of config.json {size}.")
        with self._lock:
            if len(self._processors) == MAX_PROCESSORS:
                self._processors.clear()
            return self._processors.setdefault(key, processor)
