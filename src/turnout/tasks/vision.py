"""Pictures to model inputs, class scores to labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.errors import InputError, NotSupportedError
from turnout.package.facts import Artifact, GraphPort, Processor
from turnout.tasks.adapter import Infer
from turnout.tasks.contract import LabelsOutput
from turnout.tasks.language import label_names, ranked_labels, softmax
from turnout.tasks.numeric import numpy_dtype
from turnout.types import Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

MAX_PIXELS = 40_000_000
MIN_SIDE = 2
MAX_SIDE = 4096  # of what a model takes
SHOWN = 10  # classes of a result


def read_image(value: Any) -> NDArray[np.uint8]:
    """Picture [height, width, 3] in sRGB of a path or an array, orientation applied.

    Raises ``InputError`` for files that are no picture, for pictures under 2 pixels a side and for
    pictures of over 40 million pixels (which are not decoded).
    """
    import numpy as np

    if isinstance(value, (str, Path)):
        return _decode(Path(value))
    array = np.asarray(value)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, axis=2)
    if array.ndim != 3 or array.shape[2] not in (3, 4) or array.dtype != np.uint8:
        raise InputError(f"a picture must be uint8 [height, width, 3], got {array.dtype} {list(array.shape)}")
    _check_size(array.shape[1], array.shape[0], "the picture")
    return np.ascontiguousarray(array[:, :, :3])


def _decode(path: Path) -> NDArray[np.uint8]:
    import warnings

    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        # Pillow warns before it refuses; the size is checked here before anything is decoded.
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            opened = Image.open(path)
        with opened as image:
            _check_size(image.width, image.height, f"`{path}`")
            upright = ImageOps.exif_transpose(image) or image
            return _bytes_of(upright, path)
    except Image.DecompressionBombError:
        raise InputError(f"`{path}` has more than {MAX_PIXELS} pixels", hints=["scale the picture down"]) from None
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise InputError(f"`{path}` is no picture that can be read: {error}", code="artifact.corrupt") from None


def _bytes_of(image: Image.Image, path: Path) -> NDArray[np.uint8]:
    """Pixels [height, width, 3] of a picture of any mode. Pillow would cut off what exceeds a byte."""
    import numpy as np

    if image.mode.startswith("I;16"):  # the upper byte, as Pillow does it for 16-bit colours
        grey = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise InputError(
            f"`{path}` holds values of 32 bits, whose black and white are not stated",
            hints=["convert it to 8 or 16 bits a channel"],
        )
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def _check_size(width: int, height: int, what: str) -> None:
    if width * height > MAX_PIXELS:
        raise InputError(
            f"{what} has {width} x {height} pixels, the limit is {MAX_PIXELS}", hints=["scale the picture down"]
        )
    if min(width, height) < MIN_SIDE:
        raise InputError(
            f"{what} has {width} x {height} pixels, too few to see anything",
            hints=[f"at least {MIN_SIDE} x {MIN_SIDE}"],
        )


# Settings of stored processors that are carried out here; another `do_...` that is on is refused.
CARRIED_OUT = frozenset(
    {"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb", "do_flip_channel_order"}
)
OTHER_STEPS = ("rescale_offset", "include_top")
# Classes of Transformers that read `size` in ways of their own.
OTHER_RESIZERS = ("Levit", "PoolFormer", "Perceiver", "EfficientFormer")
# Has no such step, yet its files carry the base class's mean.
NEVER_NORMALISES = "MobileViT"
# Transformers' ConvNextImageProcessor: sides under this are resized larger by `crop_pct`, then cut.
CROP_PCT_LIMIT, CROP_PCT = 384, 224 / 256


class ImagePreparation:
    """Resize, crop, scale and normalise as the stored processor says, or the options where there is none.

    Raises ``NotSupportedError`` for a processor with a step that is not carried out here, ``InputError``
    for options that do not make sense and ``recipe.missing`` where nobody says what to do.
    """

    def __init__(self, artifact: Artifact, options: dict[str, Any], port: GraphPort | None) -> None:
        processor = image_processor(artifact)
        stored = processor.settings if processor else {}
        if processor:
            _check_steps(processor)
        self.layout, self.channels = _layout(options, port)
        self.raw = port is not None and numpy_dtype(port.dtype) == "uint8"  # the graph scales by itself
        self.size, self.shortest = _size(stored, options, port, self.layout)
        self.crop = _crop(stored)
        self.resize = bool(stored.get("do_resize", True))
        if "crop_pct" in stored:
            self.shortest = self.size[0] < CROP_PCT_LIMIT
            if self.shortest:
                self.crop, side = self.size, int(self.size[0] / float(stored["crop_pct"] or CROP_PCT))
                self.size = (side, side)
        resample = stored.get("resample")
        self.resample = int(resample) if resample is not None else 2 if stored else 3
        self.scale = float(stored.get("rescale_factor", 1 / 255)) if stored.get("do_rescale", True) else 1.0
        self.flip = bool(stored.get("do_flip_channel_order"))
        if processor and (processor.class_name or "").startswith(NEVER_NORMALISES):
            stored = {**stored, "do_normalize": False}
        self.mean, self.std = _normalisation(stored, options, self.channels)

    def __call__(self, picture: NDArray[np.uint8]) -> NDArray[Any]:
        """Batch of one: [1, channel, height, width] or [1, height, width, channel]."""
        import numpy as np
        from PIL import Image

        image = Image.fromarray(picture)
        if self.resize:
            image = image.resize(self._target(image.width, image.height), Image.Resampling(self.resample))
        pixels: NDArray[Any] = np.asarray(image if self.channels == 3 else image.convert("L"))
        pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
        pixels = self._cut(pixels) if self.crop else pixels
        if not self.raw:
            pixels = pixels.astype(np.float32) * np.float32(self.scale)
            if self.mean is not None:
                pixels = (pixels - np.float32(self.mean)) / np.float32(self.std)
        if self.flip:
            pixels = pixels[:, :, ::-1]
        ordered = pixels if self.layout == "NHWC" else pixels.transpose(2, 0, 1)
        return np.ascontiguousarray(ordered[None])

    def _target(self, width: int, height: int) -> tuple[int, int]:
        """Width and height to resize to."""
        if not self.shortest:
            return self.size[1], self.size[0]
        # Integer arithmetic, as Transformers' get_resize_output_image_size does it.
        side, short = self.size[0], min(width, height)
        return (side, int(side * height / short)) if width <= height else (int(side * width / short), side)

    def _cut(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """The middle of ``pixels`` [height, width, channel], with zeros where it is too small."""
        import numpy as np

        assert self.crop is not None
        height, width = self.crop
        short = [max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1])]
        if any(short):
            pixels = np.pad(pixels, [*((-(-n // 2), n // 2) for n in short), (0, 0)])
        top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
        return pixels[top : top + height, left : left + width]


def image_processor(artifact: Artifact) -> Processor | None:
    """Stored picture processor of a package."""
    return next((p for p in artifact.processors if p.kind in ("image", "multimodal")), None)


def _check_steps(processor: Processor) -> None:
    stored, name = processor.settings, (processor.class_name or "").removesuffix("Fast")
    if name.startswith(OTHER_RESIZERS):
        raise NotSupportedError(
            f"the stored image processor is a `{name}`, whose way to resize is not carried out here",
            code="config.unsupported_variant",
        )
    others = [k for k, v in stored.items() if v and k.startswith("do_") and k not in CARRIED_OUT]
    others += [k for k in OTHER_STEPS if stored.get(k)]
    if others:
        raise NotSupportedError(
            f"the stored image processor asks for `{others[0]}`, which is not carried out here",
            code="config.unknown_semantic_key",
        )


def _normalisation(stored: dict[str, Any], options: dict[str, Any], channels: int) -> tuple[Any, Any]:
    """Mean and standard deviation by channel: options, processor, or None for none."""
    mean, std = _numbers(options, "image_mean", channels), _numbers(options, "image_std", channels)
    if mean is not None and std is not None:
        if 0.0 in std:
            raise InputError("`image_std` holds 0")
        return mean, std
    if mean is not None or std is not None:
        raise InputError("`image_mean` and `image_std` go together", hints=["`image_mean=0`, `image_std=1` for none"])
    if not stored.get("do_normalize", "image_mean" in stored):
        return None, None
    if stored.get("image_mean") is None or stored.get("image_std") is None:
        raise NotSupportedError(
            "the stored image processor normalises, but says not by what mean and standard deviation",
            code="recipe.missing",
        )
    return stored["image_mean"], stored["image_std"]


def _layout(options: dict[str, Any], port: GraphPort | None) -> tuple[str, int]:
    """Order of the axes and number of channels: option, then what the graph's fixed axes tell."""
    shape = port.shape if port is not None and port.shape is not None and len(port.shape) == 4 else None
    named = str(options.get("image_layout") or "").upper()
    if named not in ("", "NCHW", "NHWC"):
        raise InputError(f"unknown image layout `{named}`", hints=["NCHW or NHWC"])
    if shape is None:
        return named or "NCHW", 3
    if not named:
        last = shape[3] in (1, 3) and shape[1] not in (1, 3)
        if not last and isinstance(shape[1], int) and shape[1] not in (1, 3):
            raise InputError(
                f"the graph's input {shape} has no axis of 1 or 3 channels",
                code="graph.io_mismatch",
                hints=["it is no picture, or of a kind that is not served here"],
            )
        named = "NHWC" if last else "NCHW"
    channels = shape[1] if named == "NCHW" else shape[3]
    return named, 1 if channels == 1 else 3


def _size(
    stored: dict[str, Any], options: dict[str, Any], port: GraphPort | None, layout: str
) -> tuple[tuple[int, int], bool]:
    """Height and width to resize to, and whether they are for the shorter side: option, processor,
    graph; ``recipe.missing`` when nobody says."""
    if options.get("image_size"):
        return _size_option(str(options["image_size"])), False
    size = stored.get("size")
    if isinstance(size, dict) and "shortest_edge" in size:
        return (int(size["shortest_edge"]),) * 2, True
    if isinstance(size, dict) and "height" in size and "width" in size:
        return (int(size["height"]), int(size["width"])), False
    if isinstance(size, int):  # before Transformers 4.26; those that cut the middle meant the shorter side
        return (size, size), _crop(stored) is not None
    shape = port.shape if port is not None else None
    if shape is not None and len(shape) == 4:
        sides = shape[2:] if layout == "NCHW" else shape[1:3]
        if all(isinstance(side, int) and side > 0 for side in sides):
            return (int(str(sides[0])), int(str(sides[1]))), False
    raise InputError(
        "nothing says which picture size the model takes",
        code="recipe.missing",
        hints=["name it with `--option image_size=224`"],
    )


def _size_option(text: str) -> tuple[int, int]:
    try:
        numbers = [int(n) for n in text.lower().replace("x", ",").split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(0 < n <= MAX_SIDE for n in numbers):
        raise InputError(f"`image_size={text}` is no size", hints=["224, or height and width: 192x256"])
    return numbers[0], numbers[-1]


def _crop(stored: dict[str, Any]) -> tuple[int, int] | None:
    crop = stored.get("crop_size")
    if not stored.get("do_center_crop") or crop is None:
        return None
    return (int(crop["height"]), int(crop["width"])) if isinstance(crop, dict) else (int(crop), int(crop))


def _numbers(options: dict[str, Any], name: str, channels: int) -> list[float] | None:
    if options.get(name) is None:
        return None
    try:
        numbers = [float(n) for n in str(options[name]).strip("[]()").split(",")]
    except ValueError:
        raise InputError(f"`{name}={options[name]}` is no list of numbers") from None
    if len(numbers) not in (1, channels):
        raise InputError(f"`{name}` has {len(numbers)} numbers, the picture {channels} channels")
    return numbers * channels if len(numbers) == 1 else numbers


class ImageClassificationAdapter:
    """A picture to its classes; scores are probabilities, by softmax (sigmoid where several labels may
    hold at once) unless the graph gives them so."""

    recipe = ""

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self._artifact, self._options = artifact, options
        ports = artifact.graph.inputs if artifact.graph else []
        self._port = next((p for p in ports if p.shape is not None and len(p.shape) == 4), None)
        self._name = self._port.name if self._port else "pixel_values"
        self._prepare = ImagePreparation(artifact, options, self._port)

    def run(self, request: Request, infer: Infer) -> LabelsOutput:
        """Classes of the picture, best first, at most ten. Raises ``InputError``."""
        import numpy as np

        pixels = self._prepare(read_image(request.inputs["image"]))
        dtype = numpy_dtype(self._port.dtype) if self._port else None
        outputs = infer({self._name: pixels.astype(dtype or "float32")})
        scores = np.asarray(outputs.get("logits", next(iter(outputs.values()))), np.float32).reshape(1, -1)
        labels = self._artifact.labels
        if labels is not None and labels.problem_type == "multi_label_classification":
            inside = bool(((scores >= 0) & (scores <= 1)).all())
            scores = scores if inside else 1 / (1 + np.exp(-scores.clip(-80, 80)))
        elif not _are_probabilities(scores):
            scores = softmax(scores)
        names = label_names(self._artifact, self._options, scores.shape[1])
        return LabelsOutput([ranked_labels(scores[0], names)[:SHOWN]])


def _are_probabilities(scores: NDArray[Any]) -> bool:
    return bool(((scores >= 0) & (scores <= 1)).all() and abs(float(scores.sum()) - 1) < 1e-2)
