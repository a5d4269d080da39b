"""Pictures to model inputs, class scores to labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.errors import InputError
from turnout.package.facts import Artifact, GraphPort
from turnout.tasks.adapter import Infer
from turnout.tasks.contract import LabelsOutput
from turnout.tasks.language import label_names, ranked_labels, softmax
from turnout.tasks.numeric import numpy_dtype
from turnout.types import Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_PIXELS = 40_000_000
MIN_SIDE = 2
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
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            _check_size(image.width, image.height, f"`{path}`")
            upright = ImageOps.exif_transpose(image) or image
            return np.asarray(upright.convert("RGB"), dtype=np.uint8)
    except Image.DecompressionBombError:
        raise InputError(f"`{path}` has more than {MAX_PIXELS} pixels", hints=["scale the picture down"]) from None
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise InputError(f"`{path}` is no picture that can be read: {error}", code="artifact.corrupt") from None


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


class ImagePreparation:
    """Resize, crop, scale and normalise as the stored processor says, or the options where there is none."""

    def __init__(self, artifact: Artifact, options: dict[str, Any], port: GraphPort | None) -> None:
        stored = next((p.settings for p in artifact.processors if p.kind in ("image", "multimodal")), {})
        self.layout = _layout(options, port)
        self.size = _size(stored, options, port, self.layout)
        self.crop = _crop(stored)
        self.shortest = isinstance(stored.get("size"), dict) and "shortest_edge" in stored["size"]
        self.resample = int(stored.get("resample", 3 if not stored else 2))
        self.scale = float(stored.get("rescale_factor", 1 / 255)) if stored.get("do_rescale", True) else 1.0
        normalise = bool(stored.get("do_normalize", "image_mean" in stored)) or "image_mean" in options
        self.mean = _numbers(options, "image_mean") or (stored.get("image_mean") if normalise else None)
        self.std = _numbers(options, "image_std") or (stored.get("image_std") if normalise else None)

    def __call__(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Batch of one: [1, 3, height, width] or [1, height, width, 3]."""
        import numpy as np
        from PIL import Image

        image = Image.fromarray(picture)
        if self.shortest or self.crop:
            image = self._fit(image)
        else:
            image = image.resize((self.size[1], self.size[0]), Image.Resampling(self.resample))
        pixels: NDArray[Any] = np.asarray(image, np.float32) * np.float32(self.scale)
        if self.mean is not None and self.std is not None:
            pixels = ((pixels - np.asarray(self.mean)) / np.asarray(self.std)).astype(np.float32)
        return pixels[None] if self.layout == "NHWC" else np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])

    def _fit(self, image: Any) -> Any:
        """Scales the shorter side, then cuts the middle."""
        from PIL import Image

        target = self.crop or self.size
        shortest = self.size[0]
        ratio = shortest / min(image.size)
        width, height = (max(target[1], int(image.width * ratio)), max(target[0], int(image.height * ratio)))
        image = image.resize((width, height), Image.Resampling(self.resample))
        left, top = (width - target[1]) // 2, (height - target[0]) // 2
        return image.crop((left, top, left + target[1], top + target[0]))


def _layout(options: dict[str, Any], port: GraphPort | None) -> str:
    named = str(options.get("image_layout") or "").upper()
    if named in ("NCHW", "NHWC"):
        return named
    if named:
        raise InputError(f"unknown image layout `{named}`", hints=["NCHW or NHWC"])
    shape = port.shape if port is not None else None
    return "NHWC" if shape is not None and len(shape) == 4 and shape[3] == 3 else "NCHW"


def _size(stored: dict[str, Any], options: dict[str, Any], port: GraphPort | None, layout: str) -> tuple[int, int]:
    """Height and width to resize to: option, processor, graph; ``recipe.missing`` when nobody says."""
    if options.get("image_size"):
        numbers = [int(n) for n in str(options["image_size"]).replace("x", ",").split(",")]
        return numbers[0], numbers[-1]
    size = stored.get("size")
    if isinstance(size, dict):
        if "shortest_edge" in size:
            return int(size["shortest_edge"]), int(size["shortest_edge"])
        if "height" in size:
            return int(size["height"]), int(size["width"])
    if isinstance(size, int):
        return size, size
    shape = port.shape if port is not None else None
    if shape is not None and len(shape) == 4:
        sides = shape[2:] if layout == "NCHW" else shape[1:3]
        if all(isinstance(side, int) and side > 0 for side in sides):
            return int(str(sides[0])), int(str(sides[1]))
    raise InputError(
        "nothing says which picture size the model takes",
        code="recipe.missing",
        hints=["name it with `--option image_size=224`"],
    )


def _crop(stored: dict[str, Any]) -> tuple[int, int] | None:
    crop = stored.get("crop_size")
    if not stored.get("do_center_crop") or crop is None:
        return None
    return (int(crop["height"]), int(crop["width"])) if isinstance(crop, dict) else (int(crop), int(crop))


def _numbers(options: dict[str, Any], name: str) -> list[float] | None:
    if options.get(name) is None:
        return None
    try:
        numbers = [float(n) for n in str(options[name]).split(",")]
    except ValueError:
        raise InputError(f"`{name}={options[name]}` is no list of numbers") from None
    return numbers * 3 if len(numbers) == 1 else numbers


class ImageClassificationAdapter:
    """A picture to its classes; scores are probabilities, by softmax unless the graph gives them so."""

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
        if not _are_probabilities(scores):
            scores = softmax(scores)
        names = label_names(self._artifact, self._options, scores.shape[1])
        return LabelsOutput([ranked_labels(scores[0], names)[:SHOWN]])


def _are_probabilities(scores: NDArray[Any]) -> bool:
    return bool(((scores >= 0) & (scores <= 1)).all() and abs(float(scores.sum()) - 1) < 1e-2)
