"""Speech recognition: Whisper-like decoders with their own rules, and CTC heads with theirs."""

from __future__ import annotations

import inspect
from typing import Any

from turnout.backends import transformers_models as models
from turnout.backends.base import BindingReport, LoadPlan
from turnout.backends.transformers_sessions import Emit, ModelSession, auto_tokenizer
from turnout.errors import InputError, LoadError
from turnout.tasks.contract import Segment, SegmentsOutput
from turnout.types import Request


class SpeechSession(ModelSession):
    """Audio to one segment of text. Decoders hear at most one window of their extractor (Whisper: 30 s)."""

    def __init__(self, plan: LoadPlan, model: Any, binding: BindingReport) -> None:
        super().__init__(plan, model, binding)
        from transformers import AutoFeatureExtractor

        self.tokenizer = auto_tokenizer(plan)
        try:
            with models.hushed():
                self.extractor = AutoFeatureExtractor.from_pretrained(
                    models.folder(plan.case), local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # OSError, ValueError, KeyError
            message = f"the feature extractor does not load: {models.first_line(error)}"
            raise LoadError(message, code="component.missing") from error
        self.decodes = bool(model.can_generate())
        self._accepts = set(inspect.signature(model.forward).parameters)

    def run(self, request: Request, emit: Emit | None = None) -> SegmentsOutput:
        """The transcript. ``request.options``: ``language`` for a decoder that knows several."""
        import torch

        samples, rate = self.samples(request)
        with models.hushed():
            features = self.extractor(samples, sampling_rate=rate, return_tensors="pt")
        inputs = {
            name: (value.to(self.model.dtype) if value.is_floating_point() else value).to(self.device)
            for name, value in features.items()
            if name in self._accepts
        }
        with torch.inference_mode(), models.hushed():
            ids = self._decoded(inputs, request) if self.decodes else self._spelled(inputs)
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        if emit is not None and text:
            emit(text)
        return SegmentsOutput([Segment(0.0, len(samples) / rate, text)], text)

    def samples(self, request: Request) -> tuple[Any, int]:
        """Mono float32 samples and their rate in hertz. Raises ``InputError`` for a rate or length that
        the extractor does not take."""
        import numpy as np

        wanted = int(self.extractor.sampling_rate)
        samples = np.asarray(request.inputs["audio"])
        if samples.dtype.kind not in "fiu" or samples.ndim != 1 or samples.size == 0:
            raise InputError("`audio` must be one channel of samples")
        if samples.dtype.kind in "iu":
            samples = samples / float(np.iinfo(samples.dtype).max)
        rate = int(request.inputs.get("sampling_rate") or wanted)
        if rate != wanted:
            raise InputError(f"the audio has {rate} samples a second, the model takes {wanted}", hints=["resample it"])
        window = int(getattr(self.extractor, "n_samples", 0) or 0)
        if window and len(samples) > window:
            raise InputError(
                f"the audio has {len(samples)} samples, the model hears {window} at once", hints=["cut it into pieces"]
            )
        return samples.astype(np.float32), rate

    def _decoded(self, inputs: dict[str, Any], request: Request) -> list[int]:
        """Token ids of a decoder; its generation settings hold language and task tokens."""
        limit = int(getattr(self.model.config, "max_target_positions", 0) or 448)
        arguments: dict[str, Any] = {"max_new_tokens": max(1, min(request.sampling.max_tokens, limit - 8))}
        if request.options.get("language"):
            arguments["language"] = str(request.options["language"])
        made = self.model.generate(**inputs, num_beams=1, do_sample=False, **arguments)
        ids: list[int] = made[0].tolist()
        return ids

    def _spelled(self, inputs: dict[str, Any]) -> list[int]:
        """Best unit of each frame; the tokenizer merges repeats and drops blanks (Graves et al. 2006)."""
        ids: list[int] = self.model(**inputs).logits[0].argmax(dim=-1).tolist()
        return ids
