"""Sound to model inputs; speech probabilities to segments."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.errors import InputError
from turnout.package.facts import Artifact
from turnout.tasks.adapter import Infer
from turnout.tasks.contract import Segment, SegmentsOutput
from turnout.types import Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Silero's detector (version 5 and later): samples of a window and of the context before it, by rate.
WINDOWS = {16000: (512, 64), 8000: (256, 32)}
UNITS = 128
MAX_SECONDS = 6 * 3600


def read_audio(value: Any, rate: int | None = None) -> tuple[NDArray[np.float32], int]:
    """Mono float32 samples in [-1, 1] and their rate, of a WAV path or an array (then ``rate`` is needed).

    Channels are averaged; nothing is resampled. Raises ``InputError`` for empty or unreadable sound.
    """
    import numpy as np

    if isinstance(value, (str, Path)):
        samples, rate = _read_wav(Path(value))
    else:
        samples = np.asarray(value)
        if rate is None:
            raise InputError("samples without a rate", hints=["give `sampling_rate` in hertz"])
        if samples.dtype.kind in "iu":
            samples = samples.astype(np.float32) / float(
                2 ** (8 * samples.dtype.itemsize - (samples.dtype.kind == "i")) - 1
            )
        samples = samples.astype(np.float32)
    if samples.ndim == 2:
        samples = samples.mean(axis=1 if samples.shape[1] <= samples.shape[0] else 0)
    if samples.ndim != 1 or not samples.size:
        raise InputError(f"the sound is empty or no wave: shape {list(samples.shape)}")
    if not np.isfinite(samples).all():
        raise InputError("the sound holds values that are not finite")
    if samples.size > MAX_SECONDS * rate:
        raise InputError(f"the sound is longer than {MAX_SECONDS} seconds", hints=["split it"])
    return samples, int(rate)


def _read_wav(path: Path) -> tuple[NDArray[np.float32], int]:
    import numpy as np

    try:
        with wave.open(str(path), "rb") as stream:
            width, channels, rate = stream.getsampwidth(), stream.getnchannels(), stream.getframerate()
            data = stream.readframes(min(stream.getnframes(), MAX_SECONDS * rate + 1))
    except (wave.Error, OSError, EOFError) as error:
        raise InputError(
            f"`{path}` is no PCM WAV file: {error}",
            code="artifact.corrupt",
            hints=["convert it: `ffmpeg -i IN -ac 1 -ar 16000 OUT.wav`"],
        ) from None
    kinds = {1: ("u1", 128.0, 128.0), 2: ("<i2", 0.0, 32768.0), 4: ("<i4", 0.0, 2147483648.0)}
    if width not in kinds:
        raise InputError(f"`{path}` has {8 * width}-bit samples", hints=["8, 16 or 32 bits are read"])
    kind, middle, scale = kinds[width]
    samples = (np.frombuffer(data, kind).astype(np.float32) - middle) / scale
    return samples.reshape(-1, channels).mean(axis=1).astype(np.float32), rate


class VoiceActivityAdapter:
    """Stretches of speech by a recurrent detector of Silero's family.

    Settings, with the defaults of the detector's authors: a stretch begins at ``threshold``, ends
    0.15 below it after 100 ms, lasts at least 250 ms and is widened by 30 ms on both sides.
    """

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.recipe = artifact.recipe.id if artifact.recipe else ""
        self.threshold = float(options.get("threshold") or 0.5)
        ports = artifact.graph.inputs if artifact.graph else []
        self._names = {port.name for port in ports}
        self._only_16k = "sr" not in self._names

    def run(self, request: Request, infer: Infer) -> SegmentsOutput:
        """Segments in seconds. Raises ``InputError`` for a rate that the detector does not know."""
        samples, rate = read_audio(request.inputs["audio"], request.inputs.get("sampling_rate"))
        if rate not in WINDOWS or (self._only_16k and rate != 16000):
            known = "16000" if self._only_16k else "8000 or 16000"
            raise InputError(
                f"the detector takes {known} hertz, the sound has {rate}", hints=["resample the sound first"]
            )
        probabilities = self.probabilities(samples, rate, infer)
        segments = speech_segments(probabilities, rate, len(samples), self.threshold)
        return SegmentsOutput(segments)

    def probabilities(self, samples: NDArray[np.float32], rate: int, infer: Infer) -> NDArray[np.float32]:
        """Probability of speech of each window [num_windows]."""
        import numpy as np

        window, context = WINDOWS[rate]
        count = -(-len(samples) // window)
        padded = np.zeros(context + count * window, np.float32)
        padded[context : context + len(samples)] = samples
        frames = np.stack([padded[i * window : i * window + context + window] for i in range(count)])
        if {"h", "c"} <= self._names:
            zeros = np.zeros((1, 1, UNITS), np.float32)
            outputs = infer({"input": frames, "h": zeros, "c": zeros})
            return np.asarray(outputs["speech_probs"], np.float32).reshape(-1)
        state = np.zeros((2, 1, UNITS), np.float32)
        found = np.empty(count, np.float32)
        for index in range(count):
            outputs = infer({"input": frames[index : index + 1], "state": state, "sr": np.array(rate, np.int64)})
            found[index] = float(np.asarray(outputs["output"]).reshape(-1)[0])
            state = outputs["stateN"]
        return found


def speech_segments(probabilities: NDArray[np.float32], rate: int, length: int, threshold: float) -> list[Segment]:
    """Segments [start, end) in seconds of window probabilities, by hysteresis; ``score`` is the mean."""
    window = WINDOWS[rate][0]
    low, pause, least, pad = max(threshold - 0.15, 0.01), int(0.1 * rate), int(0.25 * rate), int(0.03 * rate)
    found: list[tuple[int, int]] = []
    begin: int | None = None
    silent: int | None = None
    for index, probability in enumerate(probabilities):
        at = index * window
        if probability >= threshold:
            silent = None
            begin = at if begin is None else begin
        elif begin is not None and probability < low:
            silent = at if silent is None else silent
            if at - silent >= pause:
                found.append((begin, silent))
                begin = silent = None
    if begin is not None:
        found.append((begin, length))
    kept = [(start, end) for start, end in found if end - start >= least]
    return [_segment(kept, i, probabilities, window, rate, length, pad) for i in range(len(kept))]


def _segment(
    kept: list[tuple[int, int]], index: int, probabilities: Any, window: int, rate: int, length: int, pad: int
) -> Segment:
    """One segment, widened by ``pad`` samples, by half the gap where the neighbour is nearer."""
    start, end = kept[index]
    before = kept[index - 1][1] if index else None
    after = kept[index + 1][0] if index + 1 < len(kept) else None
    left = max(0, start - pad) if before is None else max(start - pad, (start + before) // 2)
    right = min(length, end + pad) if after is None else min(end + pad, (end + after) // 2)
    inside = probabilities[start // window : max(start // window + 1, end // window)]
    return Segment(left / rate, right / rate, score=float(inside.mean()))
