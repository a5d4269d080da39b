"""A result on the terminal, in a pipe and in a file."""

from __future__ import annotations

import csv
import io
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from turnout.cli import printer
from turnout.errors import UsageError
from turnout.tasks.contract import (
    AudioOutput,
    BoxesOutput,
    EmbeddingsOutput,
    ForecastOutput,
    ImageOutput,
    LabelsOutput,
    RankingOutput,
    SegmentsOutput,
    SpansOutput,
    TableOutput,
    TensorsOutput,
    TextOutput,
)

TOP = 5  # classes shown of each input
PREVIEW = 6  # numbers shown of a vector or tensor on a terminal


def lines(output: Any, whole: bool) -> Iterator[str]:
    """Lines of an output: fields separated by tabs, so that a pipe can cut them. ``whole`` prints
    every number of a vector; without it a preview."""
    for kind, render in _RENDERERS.items():
        if isinstance(output, kind):
            yield from render(output, whole)
            return
    yield str(output)


def _text(output: TextOutput, whole: bool) -> Iterator[str]:
    yield output.text


def _embeddings(output: EmbeddingsOutput, whole: bool) -> Iterator[str]:
    for vector in output.vectors:
        if whole:
            yield " ".join(f"{value:.8g}" for value in vector)
        else:
            yield f"[{', '.join(f'{v:.4f}' for v in vector[:PREVIEW])}, ...] {len(vector)} values"


def _labels(output: LabelsOutput, whole: bool) -> Iterator[str]:
    for number, scores in enumerate(output.labels, 1):
        prefix = f"{number}\t" if len(output.labels) > 1 else ""
        for item in scores[:TOP]:
            yield f"{prefix}{printer.one_line(item.label)}\t{item.score:.4f}"


def _spans(output: SpansOutput, whole: bool) -> Iterator[str]:
    for number, spans in enumerate(output.spans, 1):
        prefix = f"{number}\t" if len(output.spans) > 1 else ""
        for s in spans:
            yield f"{prefix}{s.start}\t{s.end}\t{printer.one_line(s.label)}\t{s.score:.4f}\t{printer.one_line(s.text)}"


def _ranking(output: RankingOutput, whole: bool) -> Iterator[str]:
    for document in output.ranking:
        yield f"{document.index}\t{document.score:.4f}"


def _segments(output: SegmentsOutput, whole: bool) -> Iterator[str]:
    for s in output.segments:
        yield f"{s.start:.3f}\t{s.end:.3f}\t{s.score:.3f}{f'{chr(9)}{printer.one_line(s.text)}' if s.text else ''}"


def _boxes(output: BoxesOutput, whole: bool) -> Iterator[str]:
    for b in output.boxes:
        corners = "\t".join(f"{value:.1f}" for value in (b.x_min, b.y_min, b.x_max, b.y_max))
        yield f"{printer.one_line(b.label)}\t{b.score:.4f}\t{corners}"


def _table(output: TableOutput, whole: bool) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(output.columns)
    writer.writerows(output.rows)
    yield buffer.getvalue().rstrip("\n")


def _tensors(output: TensorsOutput, whole: bool) -> Iterator[str]:
    for name, array in output.tensors.items():
        flat = array.reshape(-1)
        shown = " ".join(
            f"{value:.8g}" if array.dtype.kind in "fc" else str(value) for value in (flat if whole else flat[:PREVIEW])
        )
        more = " ..." if not whole and flat.size > PREVIEW else ""
        yield f"{name}\t{array.dtype}\t{list(array.shape)}\t{shown}{more}"


def _forecast(output: ForecastOutput, whole: bool) -> Iterator[str]:
    yield "\t".join(["mean", *output.quantiles])
    for step, value in enumerate(output.mean):
        yield "\t".join(f"{v:.8g}" for v in [value, *(q[step] for q in output.quantiles.values())])


def _images(output: ImageOutput, whole: bool) -> Iterator[str]:
    for number, image in enumerate(output.images, 1):
        yield f"image {number}: {image.shape[1]} x {image.shape[0]} pixels (`--save FILE.png` keeps it)"


def _audio(output: AudioOutput, whole: bool) -> Iterator[str]:
    seconds = len(output.samples) / output.sampling_rate
    yield f"{seconds:.2f} s of sound at {output.sampling_rate} Hz (`--save FILE.wav` keeps it)"


_RENDERERS: dict[type, Callable[[Any, bool], Iterator[str]]] = {
    TextOutput: _text,
    EmbeddingsOutput: _embeddings,
    LabelsOutput: _labels,
    SpansOutput: _spans,
    RankingOutput: _ranking,
    SegmentsOutput: _segments,
    BoxesOutput: _boxes,
    TableOutput: _table,
    TensorsOutput: _tensors,
    ForecastOutput: _forecast,
    ImageOutput: _images,
    AudioOutput: _audio,
}


# ---- files -------------------------------------------------------------------------------------


def check_save(path: str) -> None:
    """Raises ``UsageError`` unless ``path`` can be written; asked before anything is loaded."""
    folder = Path(path).expanduser().absolute().parent
    if not folder.is_dir():
        raise UsageError(f"no directory `{folder}` to save in", code="artifact.missing", hints=[f"`mkdir -p {folder}`"])


def save(output: Any, path: str) -> None:
    """Writes an output in the file's own format: .npy, .npz, .png, .wav, or text lines.

    Raises ``UsageError`` when the output has no such form or the disk refuses.
    """
    target = Path(path).expanduser()
    try:
        writer = _WRITERS.get(target.suffix.lower())
        if writer is None:
            target.write_text("\n".join(lines(output, whole=True)) + "\n", encoding="utf-8")
        else:
            writer(output, target)
    except OSError as error:
        raise UsageError(f"cannot write `{path}`: {error.strerror or error}") from None


def _save_npy(output: Any, target: Path) -> None:
    import numpy as np

    if isinstance(output, EmbeddingsOutput):
        np.save(target, output.vectors, allow_pickle=False)
    elif isinstance(output, TensorsOutput) and len(output.tensors) == 1:
        np.save(target, next(iter(output.tensors.values())), allow_pickle=False)
    else:
        raise _unfit(output, target, "one array")


def _save_npz(output: Any, target: Path) -> None:
    import numpy as np

    if isinstance(output, TensorsOutput):
        np.savez(target, **output.tensors)
    elif isinstance(output, EmbeddingsOutput):
        np.savez(target, vectors=output.vectors)
    else:
        raise _unfit(output, target, "arrays")


def _save_image(output: Any, target: Path) -> None:
    if not isinstance(output, ImageOutput) or not output.images:
        raise _unfit(output, target, "a picture")
    from PIL import Image

    Image.fromarray(output.images[0]).save(target)


def _save_wave(output: Any, target: Path) -> None:
    if not isinstance(output, AudioOutput):
        raise _unfit(output, target, "sound")
    import numpy as np

    samples = (np.clip(output.samples, -1.0, 1.0) * 32767).astype("<i2")
    with wave.open(str(target), "wb") as stream:
        stream.setnchannels(1)
        stream.setsampwidth(2)
        stream.setframerate(output.sampling_rate)
        stream.writeframes(samples.tobytes())


def _unfit(output: Any, target: Path, what: str) -> UsageError:
    return UsageError(
        f"`{target.name}` holds {what}, and the result is {type(output).__name__}",
        hints=["another ending saves the printed lines"],
    )


_WRITERS: dict[str, Callable[[Any, Path], None]] = {
    ".npy": _save_npy,
    ".npz": _save_npz,
    ".png": _save_image,
    ".jpg": _save_image,
    ".wav": _save_wave,
}


class Stream:
    """Prints pieces of text as they come; knows whether it printed any."""

    def __init__(self, before: Callable[[], None]) -> None:
        self.used = False
        self._before = before

    def __call__(self, piece: str) -> None:
        """One piece of generated text."""
        if not self.used:
            self._before()
            self.used = True
        sys.stdout.write(printer.clean(piece))
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the line."""
        if self.used:
            sys.stdout.write("\n")
            sys.stdout.flush()
