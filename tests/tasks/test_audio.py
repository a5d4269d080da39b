"""Sound is read as it was written; the voice detector's numbers and segments are those of its authors.

The references are the ``silero-vad`` package's own wrapper and post-processing, and samples written here.
"""

from __future__ import annotations

import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import package_dir

from turnout.backends.base import Case
from turnout.backends.onnxruntime import OnnxRuntimeBackend
from turnout.errors import InputError
from turnout.package.facts import Artifact, ArtifactKind, Graph, GraphPort
from turnout.package.inspect import inspect
from turnout.tasks.audio import VoiceActivityAdapter, read_audio, speech_segments
from turnout.types import Request, Task

RATE = 16000


def wav(path: Path, data: bytes, code: int, bits: int, channels: int = 1, extensible: bool = False) -> Path:
    """A WAV file by hand, so that any encoding can be written."""
    block = channels * bits // 8
    header = struct.pack("<HHIIHH", 0xFFFE if extensible else code, channels, RATE, RATE * block, block, bits)
    if extensible:
        header += struct.pack("<HHI", 22, bits, 0) + struct.pack("<H", code) + bytes(14)
    note = b"LIST" + struct.pack("<I", 3) + b"odd\0"  # an odd chunk is padded to an even length
    chunks = note + b"fmt " + struct.pack("<I", len(header)) + header
    chunks += b"data" + struct.pack("<I", len(data)) + data
    path.write_bytes(b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks)
    return path


WAVE = np.array([0.0, 0.5, -0.5, 0.25, -1.0])
ENCODED: list[tuple[int, int, bytes]] = [
    (1, 8, (WAVE * 128 + 128).astype(np.uint8).tobytes()),
    (1, 16, (WAVE * 32768).astype("<i2").tobytes()),
    (1, 24, b"".join(int(v * (1 << 23)).to_bytes(3, "little", signed=True) for v in WAVE)),
    (1, 32, (WAVE * (1 << 31)).astype("<i4").tobytes()),
    (3, 32, WAVE.astype("<f4").tobytes()),
    (3, 64, WAVE.astype("<f8").tobytes()),
]


@pytest.mark.parametrize("extensible", [False, True], ids=["plain", "extensible"])
@pytest.mark.parametrize(("code", "bits", "data"), ENCODED, ids=lambda v: str(v) if isinstance(v, int) else "")
def test_every_encoding_gives_the_same_wave(
    tmp_path: Path, code: int, bits: int, data: bytes, extensible: bool
) -> None:
    samples, rate = read_audio(wav(tmp_path / "a.wav", data, code, bits, extensible=extensible))
    assert rate == RATE and samples.dtype == np.float32
    np.testing.assert_allclose(samples, WAVE, atol=1e-6)


def test_a_file_of_the_standard_library_in_stereo(tmp_path: Path) -> None:
    left, right = np.arange(-5, 5) * 1000, np.arange(10) * 100
    with wave.open(str(tmp_path / "s.wav"), "wb") as stream:
        stream.setparams((2, 2, 8000, 0, "NONE", ""))
        stream.writeframes(np.stack([left, right], 1).astype("<i2").tobytes())
    samples, rate = read_audio(str(tmp_path / "s.wav"))
    assert rate == 8000
    np.testing.assert_allclose(samples, (left + right) / 2 / 32768, atol=1e-7)


def test_arrays_are_scaled_by_their_type() -> None:
    for array in (WAVE, (WAVE * 32768).astype(np.int16), (WAVE * 128 + 128).astype(np.uint8), np.stack([WAVE, WAVE])):
        samples, _ = read_audio(array, RATE)
        np.testing.assert_allclose(samples, WAVE, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "rate", "word"),
    [
        (WAVE, None, "rate"),
        (WAVE, -1, "rate"),
        (WAVE, 0.5, "rate"),
        (WAVE, "fast", "rate"),
        (WAVE, float("nan"), "rate"),
        (np.zeros(0), RATE, "empty"),
        (np.array([0.0, np.nan]), RATE, "finite"),
        (np.array(["a"]), RATE, "numbers"),
        (np.zeros((2, 2, 2)), RATE, "no wave"),
    ],
)
def test_sound_that_is_none(value: Any, rate: int | None, word: str) -> None:
    with pytest.raises(InputError, match=word):
        read_audio(value, rate)


@pytest.mark.parametrize(
    "content",
    [b"", b"RIFF", b"RIFF\0\0\0\0WAVE", b"OggS" + bytes(40), b"RIFF\xff\xff\xff\xffWAVEdata\xff\xff\xff\xff"],
)
def test_files_that_are_no_sound(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.wav").write_bytes(content)
    with pytest.raises(InputError, match="x.wav") as caught:
        read_audio(tmp_path / "x.wav")
    assert caught.value.code == "artifact.corrupt"


def test_other_encodings_and_contradicting_rates_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="format 6, 8 bits"):
        read_audio(wav(tmp_path / "alaw.wav", bytes(8), 6, 8))
    with pytest.raises(InputError, match="16000 samples a second, the request says 8000"):
        read_audio(wav(tmp_path / "a.wav", bytes(8), 1, 16), 8000)


def test_what_is_there_counts_not_what_the_header_claims(tmp_path: Path) -> None:
    """A recorder that streams claims 4 GiB; more than the limit is refused, not cut off in silence."""
    path = wav(tmp_path / "stream.wav", (WAVE * 32768).astype("<i2").tobytes(), 1, 16)
    content = path.read_bytes()
    at = content.index(b"data") + 4
    path.write_bytes(content[:at] + b"\xff\xff\xff\xff" + content[at + 4 :])
    np.testing.assert_allclose(read_audio(path)[0], WAVE, atol=1e-6)
    with path.open("r+b") as stream:  # sparse: no byte of it is written
        stream.truncate(at + 4 + (3 << 30))
    with pytest.raises(InputError, match="bytes of sound, the limit is"):
        read_audio(path)


# ---- segments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("seed", range(12))
def test_segments_are_those_of_the_authors(seed: int, rate: int) -> None:
    from silero_vad.utils_vad import get_speech_timestamps_from_probs

    rng = np.random.default_rng(seed)
    steps = np.repeat(rng.random(40), rng.integers(1, 12, 40))
    noisy = steps + rng.normal(0, 0.08, steps.size)
    probabilities = np.clip(noisy, 0, 1).astype(np.float32)
    length = len(probabilities) * (512 if rate == 16000 else 256) - 17
    threshold = float(rng.uniform(0.2, 0.7))
    wanted = get_speech_timestamps_from_probs(
        probabilities.tolist(), sampling_rate=rate, threshold=threshold, audio_length_samples=length
    )
    found = speech_segments(probabilities, rate, length, threshold)
    assert [(round(s.start * rate), round(s.end * rate)) for s in found] == [(w["start"], w["end"]) for w in wanted]
    assert found
    assert all(0 <= segment.score <= 1 for segment in found)


# ---- the six exports of one detector -------------------------------------------------------------


def babble(rate: int) -> np.ndarray:
    """2.5 s: noise, a voiced sound (pulses through moving formants), noise. Seeded; no speech, but alike."""
    rng = np.random.default_rng(3)
    time = np.arange(int(2.5 * rate)) / rate
    pitch = 120 + 20 * np.sin(2 * np.pi * 3 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = sum(
        np.sin(k * phase) * np.exp(-(((k * 120 - f) / 120) ** 2)) for k in range(1, 30) for f in (600, 1200, 2500)
    )
    loud = ((time > 0.7) & (time < 1.9)) * (0.6 + 0.4 * np.sin(2 * np.pi * 4 * time))
    wave_: np.ndarray = (0.2 * voice * loud + rng.normal(0, 0.003, time.size)).astype(np.float32)
    return wave_


def reference(path: Path, samples: np.ndarray, rate: int) -> np.ndarray:
    """Probabilities [num_windows] of the package's own wrapper around ONNX Runtime."""
    import torch
    from silero_vad.utils_vad import OnnxWrapper

    model = OnnxWrapper(str(path), force_onnx_cpu=True)
    window = 512 if rate == 16000 else 256
    padded = np.pad(samples, (0, -len(samples) % window))
    chunks = torch.from_numpy(padded).reshape(-1, window)
    return np.array([model(chunk, rate).item() for chunk in chunks], np.float32)


def session(path: Path) -> Any:
    package = inspect(path)
    artifact = next(a for a in package.artifacts if Task.VAD in a.task_ids())
    backend = OnnxRuntimeBackend()
    return backend.load(backend.plan(Case(package.root, artifact, Task.VAD)))


VARIANTS = ["silero_vad", "silero_vad_half", "silero_vad_16k_op15", "silero_vad_op18_ifless"]
VARIANTS += ["silero_vad_16k_sequence", "silero_vad_openvino_16k"]


def by_hand(path: Path, samples: np.ndarray) -> np.ndarray:
    """The same for an export without `sr`, whose inputs the package's wrapper does not know."""
    import onnxruntime

    model = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    padded = np.concatenate([np.zeros(64, np.float32), samples, np.zeros(-len(samples) % 512, np.float32)])
    state, found = np.zeros((2, 1, 128), np.float32), []
    for start in range(0, len(padded) - 64, 512):
        out, state = model.run(None, {"input": padded[None, start : start + 576], "state": state})
        found.append(out.item())
    return np.array(found, np.float32)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_export_hears_what_its_authors_hear(name: str) -> None:
    folder = package_dir("silero_vad") / "data"
    samples = babble(RATE)
    # `half` holds weights of another training (all float32, no matter its name): it is its own reference.
    half = name.endswith("half")
    wanted = by_hand(folder / f"{name}.onnx", samples) if half else reference(folder / "silero_vad.onnx", samples, RATE)
    assert half or wanted.max() > 0.5 > wanted.min(), "the sound does not tell anything"
    loaded = session(folder / f"{name}.onnx")
    found = loaded.adapter.probabilities(samples, RATE, loaded.graphs["model"].infer)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    output = loaded.run(Request(Task.VAD, {"audio": samples, "sampling_rate": RATE}))
    segments = speech_segments(wanted, RATE, len(samples), 0.5)
    assert [(s.start, s.end) for s in output.segments] == [(s.start, s.end) for s in segments]


@pytest.mark.parametrize("name", VARIANTS)
def test_8000_hertz_only_where_the_graph_hears_it(name: str) -> None:
    path = package_dir("silero_vad") / "data" / f"{name}.onnx"
    samples, loaded = babble(8000), session(path)
    request = Request(Task.VAD, {"audio": samples, "sampling_rate": 8000}, options={"threshold": 0.3})
    if name in ("silero_vad", "silero_vad_op18_ifless"):
        # The two exports differ at this rate, in the package's own wrapper as here.
        wanted = reference(path, samples, 8000)
        found = loaded.adapter.probabilities(samples, 8000, loaded.graphs["model"].infer)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert len(loaded.run(request).segments) == len(speech_segments(wanted, 8000, len(samples), 0.3))
    else:
        with pytest.raises(InputError, match="takes 16000 hertz, the sound has 8000"):
            loaded.run(request)


def detector(inputs: tuple[str, ...]) -> VoiceActivityAdapter:
    ports = [GraphPort(name, "float32") for name in inputs]
    return VoiceActivityAdapter("", Artifact("onnx:v", ArtifactKind.ONNX, "v", graph=Graph(inputs=ports)), {})


def test_other_rates_and_thresholds_are_refused() -> None:
    def infer(feeds: dict[str, Any]) -> dict[str, Any]:
        return {"output": np.full((1, 1), 0.6, np.float32), "stateN": feeds["state"]}

    adapter, sound = detector(("input", "state", "sr")), np.zeros(44100, np.float32)
    with pytest.raises(InputError, match="8000 or 16000 hertz, the sound has 44100"):
        adapter.run(Request(Task.VAD, {"audio": sound, "sampling_rate": 44100}), infer)
    with pytest.raises(InputError, match="takes 16000 hertz"):
        detector(("input", "state")).run(Request(Task.VAD, {"audio": sound, "sampling_rate": 8000}), infer)
    with pytest.raises(InputError, match="threshold=2"):
        adapter.run(Request(Task.VAD, {"audio": sound, "sampling_rate": RATE}, options={"threshold": "2"}), infer)
    low = Request(Task.VAD, {"audio": sound, "sampling_rate": RATE}, options={"threshold": 0.7})
    assert adapter.run(low, infer).segments == []
    assert len(adapter.run(Request(Task.VAD, {"audio": sound, "sampling_rate": RATE}), infer).segments) == 1
