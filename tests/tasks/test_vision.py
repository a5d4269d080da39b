"""Pictures become the numbers that Transformers' own processors make of them; others are refused by name."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from turnout.errors import InputError, NotSupportedError, TurnoutError
from turnout.package.facts import Artifact, ArtifactKind, Graph, GraphPort, Labels, Processor
from turnout.tasks.vision import ImageClassificationAdapter, ImagePreparation, read_image
from turnout.types import Request, Task

NAMES = ["cat", "dog", "bird"]
PICTURE = np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)


def artifact(
    settings: dict[str, Any] | None = None, shape: list[Any] | None = None, dtype: str = "float32", name: str = ""
) -> Artifact:
    made = Artifact("onnx:m.onnx", ArtifactKind.ONNX, "m.onnx", labels=Labels(NAMES, "test"))
    made.graph = Graph(inputs=[GraphPort("pixels", dtype, shape or [1, 3, 32, 32])])
    if settings is not None:
        made.processors = [Processor("image", "preprocessor_config.json", name or None, settings)]
    return made


def prepared(made: Artifact, options: dict[str, Any] | None = None, picture: np.ndarray = PICTURE) -> np.ndarray:
    assert made.graph is not None
    result: np.ndarray = ImagePreparation(made, options or {}, made.graph.inputs[0])(picture)
    return result


PROCESSORS: list[tuple[str, dict[str, Any]]] = [
    ("ViTImageProcessor", {"size": {"height": 32, "width": 40}}),
    ("ViTImageProcessor", {"size": {"height": 32, "width": 32}, "resample": 0, "do_rescale": True}),
    ("ViTImageProcessor", {"do_resize": False, "do_normalize": False}),
    ("ViTImageProcessor", {"size": {"height": 32, "width": 32}, "do_rescale": False}),
    ("CLIPImageProcessor", {"size": {"shortest_edge": 37}, "crop_size": {"height": 32, "width": 32}}),
    ("CLIPImageProcessor", {"size": {"shortest_edge": 20}, "crop_size": {"height": 33, "width": 33}}),
    ("CLIPImageProcessor", {"size": {"shortest_edge": 333}, "crop_size": {"height": 32, "width": 32}}),
    ("ConvNextImageProcessor", {"size": {"shortest_edge": 32}}),
    ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}, "crop_pct": 0.9}),
    ("DeiTImageProcessor", {}),
    ("MobileNetV2ImageProcessor", {}),
    ("MobileViTImageProcessor", {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}),
]


@pytest.mark.parametrize("tall", [False, True], ids=["wide", "tall"])
@pytest.mark.parametrize(("name", "changes"), PROCESSORS, ids=lambda v: v if isinstance(v, str) else "")
def test_as_transformers_prepares_it(name: str, changes: dict[str, Any], tall: bool) -> None:
    import transformers.models.auto.image_processing_auto as auto

    kind = auto.get_image_processor_class_from_name(f"{name}Pil") or auto.get_image_processor_class_from_name(name)
    theirs = kind(**changes)
    picture = PICTURE.transpose(1, 0, 2).copy() if tall else PICTURE
    wanted = np.asarray(theirs(Image.fromarray(picture), return_tensors="np")["pixel_values"])
    stored = {k: v for k, v in theirs.to_dict().items() if k != "image_processor_type"}
    found = prepared(artifact(stored, ["batch", 3, "height", "width"], name=name), picture=picture)
    assert found.shape == wanted.shape and found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize(
    ("settings", "name", "code", "word"),
    [
        ({"do_pad": True, "size": 32}, "", "config.unknown_semantic_key", "do_pad"),
        ({"rescale_offset": True, "size": 32}, "", "config.unknown_semantic_key", "rescale_offset"),
        ({"size": 32}, "LevitImageProcessor", "config.unsupported_variant", "Levit"),
        ({"size": 32, "do_normalize": True}, "", "recipe.missing", "mean"),
    ],
)
def test_steps_that_are_not_carried_out_are_named(settings: dict[str, Any], name: str, code: str, word: str) -> None:
    with pytest.raises(NotSupportedError, match=word) as caught:
        ImageClassificationAdapter("", artifact(settings, name=name), {})
    assert caught.value.code == code


# ---- without a stored processor ------------------------------------------------------------------


def test_options_where_nothing_is_stored() -> None:
    options = {"image_mean": "0.5,0.4,0.3", "image_std": "0.25"}
    resized = np.asarray(Image.fromarray(PICTURE).resize((32, 24), Image.Resampling.BICUBIC), np.float32) / 255
    wanted = (resized - np.float32([0.5, 0.4, 0.3])) / np.float32(0.25)
    found = prepared(artifact(shape=[1, 24, 32, 3]), options)
    np.testing.assert_allclose(found, wanted[None], atol=1e-6)
    found = prepared(artifact(shape=["n", "c", "h", "w"]), options | {"image_size": "24x32"})
    np.testing.assert_allclose(found, wanted.transpose(2, 0, 1)[None], atol=1e-6)


def test_graphs_of_bytes_get_bytes() -> None:
    adapter = ImageClassificationAdapter("", artifact(shape=[1, 32, 32, 3], dtype="uint8"), {})
    seen = {}

    def infer(feeds: dict[str, Any]) -> dict[str, Any]:
        seen.update(feeds)
        return {"scores": np.array([[0.0, 1.0, 0.0]], np.float32)}

    output = adapter.run(Request(Task.IMAGE_CLASSIFICATION, {"image": np.full((9, 9, 3), 200, np.uint8)}), infer)
    assert seen["pixels"].dtype == np.uint8 and (seen["pixels"] == 200).all()
    assert (output.labels[0][0].label, output.labels[0][0].score) == ("dog", 1.0)


def test_grey_graphs_get_one_channel() -> None:
    grey = np.asarray(Image.fromarray(PICTURE).resize((28, 28), Image.Resampling.BICUBIC).convert("L"), np.float32)
    found = prepared(artifact(shape=[1, 1, 28, 28]), {"image_mean": "0", "image_std": "1"})
    np.testing.assert_allclose(found[0, 0], grey / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "options", "word"),
    [
        ([1, 3, "h", "w"], {}, "picture size"),
        ([1, 3, 32, 32], {"image_size": "huge"}, "no size"),
        ([1, 3, 32, 32], {"image_size": "100000"}, "no size"),
        ([1, 3, 32, 32], {"image_mean": "a", "image_std": "1"}, "no list of numbers"),
        ([1, 3, 32, 32], {"image_mean": "0,1", "image_std": "1"}, "2 numbers"),
        ([1, 3, 32, 32], {"image_mean": "0"}, "go together"),
        ([1, 3, 32, 32], {"image_mean": "0", "image_std": "0"}, "holds 0"),
        ([1, 3, 32, 32], {"image_layout": "CHWN"}, "CHWN"),
        ([1, 64, 7, 7], {}, "1 or 3 channels"),
    ],
)
def test_options_that_make_no_sense(shape: list[Any], options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        ImageClassificationAdapter("", artifact(shape=shape), options)


# ---- pictures ------------------------------------------------------------------------------------


def test_pictures_of_all_modes(tmp_path: Path) -> None:
    for mode in ("L", "RGBA", "P", "CMYK", "I;16"):
        path = tmp_path / f"{mode.replace(';', '')}.{'tiff' if mode == 'CMYK' else 'png'}"
        source = Image.fromarray(PICTURE)
        (source.convert("I;16") if mode == "I;16" else source.convert(mode)).save(path)
        assert read_image(path).shape == (61, 83, 3)
    assert read_image(PICTURE[:, :, 0]).shape == (61, 83, 3)


def test_deep_pictures_keep_their_greys(tmp_path: Path) -> None:
    """Pillow's own way to RGB makes every value over 255 white."""
    grey = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(grey).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(read_image(tmp_path / "deep.png")[:, :, 1], grey // 256)
    Image.fromarray(np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)).save(tmp_path / "float.tiff")
    with pytest.raises(InputError, match=r"float.tiff.*32 bits"):
        read_image(tmp_path / "float.tiff")


def test_pictures_are_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    Image.fromarray(PICTURE).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), np.rot90(PICTURE, -1))


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "no picture"), (b"\x89PNG\r\n\x1a\n" + bytes(20), "no picture"), (b"text", "no picture")],
)
def test_files_that_are_no_picture(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(InputError, match=f"x.png.*{word}"):
        read_image(tmp_path / "x.png")


def header_only(path: Path, width: int, height: int) -> None:
    """The beginning of a PNG that claims a size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data + struct.pack(">I", 0) + b"IDAT")


def test_sizes_are_bounded_before_anything_is_decoded(tmp_path: Path) -> None:
    header_only(tmp_path / "big.png", 8000, 5001)
    with pytest.raises(InputError, match="8000 x 5001 pixels, the limit is 40000000"):
        read_image(tmp_path / "big.png")
    header_only(tmp_path / "wide.png", 10000, 10000)  # what Pillow itself warns of
    with pytest.raises(InputError, match="10000 x 10000 pixels"):
        read_image(tmp_path / "wide.png")
    header_only(tmp_path / "bomb.png", 1 << 30, 1 << 30)  # what Pillow itself calls a bomb
    with pytest.raises(InputError, match="bomb.png"):
        read_image(tmp_path / "bomb.png")
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    with pytest.raises(InputError, match="1 x 1 pixels"):
        read_image(tmp_path / "dot.png")
    for wrong in (PICTURE.astype(np.float32), np.zeros((4, 4, 7), np.uint8), np.zeros(3, np.uint8)):
        with pytest.raises(InputError, match="uint8"):
            read_image(wrong)


# ---- scores --------------------------------------------------------------------------------------


def classify(scores: list[float], made: Artifact | None = None, options: dict[str, Any] | None = None) -> list[Any]:
    adapter = ImageClassificationAdapter("", made or artifact(), options or {})
    request = Request(Task.IMAGE_CLASSIFICATION, {"image": PICTURE})
    output = adapter.run(request, lambda feeds: {"scores": np.array([scores], np.float32)})
    return [(entry.label, round(entry.score, 5)) for entry in output.labels[0]]


def test_logits_become_probabilities_and_probabilities_stay() -> None:
    logits = np.array([1.0, 3.0, -2.0])
    wanted = np.exp(logits) / np.exp(logits).sum()
    found = classify(logits.tolist())
    assert [label for label, _ in found] == ["dog", "cat", "bird"]
    np.testing.assert_allclose([score for _, score in found], wanted[[1, 0, 2]], atol=1e-5)
    assert classify([0.2, 0.1, 0.7]) == [("bird", 0.7), ("cat", 0.2), ("dog", 0.1)]


def test_labels_that_hold_at_once() -> None:
    made = artifact()
    assert made.labels is not None
    made.labels.problem_type = "multi_label_classification"
    assert classify([0.0, 100.0, -100.0], made) == [("dog", 1.0), ("cat", 0.5), ("bird", 0.0)]


def test_names_of_a_file_and_of_another_number(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a\nb\nc\n")
    assert classify([0.2, 0.1, 0.7], options={"labels": str(tmp_path / "names.txt")})[0][0] == "c"
    with pytest.raises(TurnoutError, match="names 3 classes, the model gives 4") as caught:
        classify([0.1, 0.2, 0.3, 0.4])
    assert caught.value.code == "task.label_map_missing"
