"""Sound to model inputs; speech probabilities to segments."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

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
MAX_RATE = 1_000_000
MAX_BYTES = 1 << 31  # of sound in a file
# Encodings of a WAV file by format code (1 integers, 3 floats) and bits.
EXTENSIBLE = 0xFFFE
ENCODINGS = {(1, 8): "u1", (1, 16): "<i2", (1, 24): "", (1, 32): "<i4", (3, 32): "<f4", (3, 64): "<f8"}


def read_audio(value: Any, rate: Any = None) -> tuple[NDArray[np.float32], int]:
    """Mono float32 samples in [-1, 1] and their rate, of a WAV path or an array (then ``rate`` is needed).

    Channels are averaged; nothing is resampled. Raises ``InputError`` for empty or unreadable sound, and
    for a rate that contradicts the file's.
    """
    import numpy as np

    said = None if rate is None else _rate(rate)
    if isinstance(value, (str, Path)):
        samples, hertz = _read_wav(Path(value))
        if said is not None and said != hertz:
            raise InputError(f"`{value}` has {hertz} samples a second, the request says {said}")
    else:
        if said is None:
            raise InputError("samples without a rate", hints=["give `sampling_rate` in hertz"])
        hertz = said
        samples = np.asarray(value)
        if samples.dtype.kind not in "fiu":
            raise InputError(f"samples must be numbers, got {samples.dtype}")
        samples = _scaled(samples)
    if samples.ndim == 2:
        samples = samples.mean(axis=1 if samples.shape[1] <= samples.shape[0] else 0)
    if samples.ndim != 1 or not samples.size:
        raise InputError(f"the sound is empty or no wave: shape {list(samples.shape)}")
    if not np.isfinite(samples).all():
        raise InputError("the sound holds values that are not finite")
    if samples.size > MAX_SECONDS * hertz:
        raise InputError(f"the sound is longer than {MAX_SECONDS} seconds", hints=["split it"])
    return samples.astype(np.float32), hertz


def _rate(value: Any) -> int:
    """A rate in hertz. Raises ``InputError`` for what is no whole number of samples a second."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 1 <= number < MAX_RATE or number != int(number):
        raise InputError(f"`{value}` is no rate of sound", hints=["give `sampling_rate` in hertz"])
    return int(number)


def _scaled(samples: NDArray[Any]) -> NDArray[np.float32]:
    """Floats of samples: integers by their full scale, unsigned bytes around 128, as WAV has them."""
    import numpy as np

    kind, bits = samples.dtype.kind, 8 * samples.dtype.itemsize
    floats = samples.astype(np.float32)
    if kind == "f":
        return floats
    return (floats - 2.0 ** (bits - 1) if kind == "u" else floats) / np.float32(2.0 ** (bits - 1))


def _read_wav(path: Path) -> tuple[NDArray[np.float32], int]:
    """Samples [num_frames, channels] of a RIFF WAVE file: integers of 8 to 32 bits, or floats, also
    with the extensible header that Python's ``wave`` refuses before 3.12."""
    hints = ["convert it: `ffmpeg -i IN -ac 1 -ar 16000 OUT.wav`"]
    try:
        with path.open("rb") as stream:
            header, data = _chunks(stream)
    except (OSError, struct.error, ValueError) as error:
        raise InputError(f"`{path}` is no WAV file: {error}", code="artifact.corrupt", hints=hints) from None
    code, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", header)
    if code == EXTENSIBLE and len(header) >= 26:
        code = struct.unpack_from("<H", header, 24)[0]
    if (code, bits) not in ENCODINGS or not channels or not 0 < rate < MAX_RATE:
        raise InputError(
            f"`{path}` holds samples of an encoding that is not read: format {code}, {bits} bits",
            code="artifact.corrupt",
            hints=hints,
        )
    samples = _decode(data, code, bits)
    frames = len(samples) // channels
    return samples[: frames * channels].reshape(frames, channels), rate


def _chunks(stream: BinaryIO) -> tuple[bytes, bytes]:
    """The ``fmt `` and ``data`` chunks of a RIFF stream. Raises ``ValueError`` when one is not there."""
    if stream.read(4) != b"RIFF" or len(stream.read(4)) != 4 or stream.read(4) != b"WAVE":
        raise ValueError("it does not begin like one")
    header = b""
    while True:
        head = stream.read(8)
        if len(head) < 8:
            raise ValueError("it has no sound")
        name, size = head[:4], struct.unpack("<I", head[4:])[0]
        if name == b"data" and len(header) >= 16:
            # A stream's header claims 2^32 - 1 bytes: what is there counts.
            size = min(size, os.fstat(stream.fileno()).st_size - stream.tell())
            if size > MAX_BYTES:
                raise ValueError(f"it holds {size} bytes of sound, the limit is {MAX_BYTES}")
            return header, stream.read(size)
        if name == b"fmt ":
            header = stream.read(min(size, 64))
            size -= len(header)
        stream.seek(size + size % 2 if name != b"fmt " else size, 1)


def _decode(data: bytes, code: int, bits: int) -> NDArray[np.float32]:
    import numpy as np

    width = bits // 8
    data = data[: len(data) // width * width]
    if bits == 24:  # three bytes become the upper ones of four
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return _scaled(wide.view("<i4").reshape(-1))
    return _scaled(np.frombuffer(data, ENCODINGS[code, bits]))


class VoiceActivityAdapter:
    """Stretches of speech by a recurrent detector of Silero's family.

    Settings, with the defaults of the detector's authors: a stretch begins at ``threshold``, ends
    0.15 below it after 100 ms, lasts at least 250 ms and is widened by 30 ms on both sides.
    """

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.recipe = artifact.recipe.id if artifact.recipe else ""
        self.threshold = _threshold(options.get("threshold"))
        ports = artifact.graph.inputs if artifact.graph else []
        self._names = {port.name for port in ports}
        self._only_16k = "sr" not in self._names

    def run(self, request: Request, infer: Infer) -> SegmentsOutput:
        """Segments in seconds. Raises ``InputError`` for a rate that the detector does not know."""
        samples, rate = read_audio(request.inputs["audio"], request.inputs.get("sampling_rate"))
        if rate not in WINDOWS or (rate != 16000 and not self._heeds_rate(infer)):
            known = "8000 or 16000" if rate not in WINDOWS and not self._only_16k else "16000"
            raise InputError(
                f"the detector takes {known} hertz, the sound has {rate}", hints=["resample the sound first"]
            )
        threshold = _threshold(request.options.get("threshold", self.threshold))
        probabilities = self.probabilities(samples, rate, infer)
        return SegmentsOutput(speech_segments(probabilities, rate, len(samples), threshold))

    def _heeds_rate(self, infer: Infer) -> bool:
        """Whether the graph computes otherwise when it is told another rate. One of Silero's exports has
        the input ``sr`` and ignores it, so that 8000 hertz would be heard as 16000."""
        import numpy as np

        if self._only_16k:
            return False
        noise = np.random.default_rng(0).normal(0, 0.1, 4 * sum(WINDOWS[8000])).astype(np.float32)
        told = self.probabilities(noise, 8000, infer)
        try:
            untold = self.probabilities(noise, 8000, infer, told_rate=16000)
        except InputError:  # a graph that counts its samples by the rate
            return True
        return not np.array_equal(told, untold)

    def probabilities(
        self, samples: NDArray[np.float32], rate: int, infer: Infer, told_rate: int | None = None
    ) -> NDArray[np.float32]:
        """Probability of speech of each window [num_windows]; the graph is told ``told_rate``."""
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
            outputs = infer(
                {"input": frames[index : index + 1], "state": state, "sr": np.array(told_rate or rate, np.int64)}
            )
            found[index] = float(np.asarray(outputs["output"]).reshape(-1)[0])
            state = outputs["stateN"]
        return found


def _threshold(value: Any) -> float:
    try:
        number = 0.5 if value is None else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number < 1:
        raise InputError(f"`threshold={value}` is no probability between 0 and 1")
    return number


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
    kept = [(start, end) for start, end in found if end - start > least]
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
