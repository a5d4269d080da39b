"""A loaded diffusion pipeline: requests to the library's arguments, its pictures to bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from turnout.backends.base import BindingReport, LoadPlan
from turnout.backends.diffusers_components import first_line, parameters
from turnout.errors import InputError, LoadError
from turnout.tasks.contract import ImageOutput
from turnout.tasks.vision import read_image
from turnout.types import Request, Sampling, Task

# Request options: the pipeline's own name, and the type of the value.
REQUEST_OPTIONS: dict[str, tuple[str, type]] = {
    "steps": ("num_inference_steps", int),
    "guidance": ("guidance_scale", float),
    "width": ("width", int),
    "height": ("height", int),
    "strength": ("strength", float),
    "negative_prompt": ("negative_prompt", str),
}
PROBE_SIDE = 64  # pixels


@dataclass(slots=True)
class DiffusionSession:
    """One pipeline."""

    plan: LoadPlan
    dtype: str
    pipeline: Any
    binding: BindingReport = field(default_factory=BindingReport)

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> ImageOutput:
        """Pictures for a prompt, and for a picture to change. ``request.options``: steps, guidance, width,
        height, strength, negative_prompt. A pipeline of classes takes a class's name or number as prompt,
        one without any condition takes the empty prompt alone."""
        if self.pipeline is None:
            raise LoadError("the session is closed")
        import torch

        accepted = parameters(type(self.pipeline))
        given = self._inputs(request, accepted) | self._options(request, accepted)
        seed = request.sampling.seed
        given["generator"] = torch.Generator("cpu").manual_seed(seed if seed is not None else torch.seed() % (1 << 63))
        if emit is not None and "callback_on_step_end" in accepted:
            given["callback_on_step_end"] = lambda _, step, __, values: (emit(f"step {step + 1}\n"), values)[1]
        try:
            with torch.inference_mode():
                images = self.pipeline(output_type="np", **given).images
        except (ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            raise InputError(
                f"the pipeline cannot run this request: {first_line(error)}", code="runtime.failed"
            ) from None
        return ImageOutput([_levels(image) for image in images])

    def _inputs(self, request: Request, accepted: dict[str, Any]) -> dict[str, Any]:
        prompt = str(request.inputs["prompt"])
        given: dict[str, Any] = {}
        if "prompt" in accepted:
            given["prompt"] = prompt
        elif "class_labels" in accepted:
            given["class_labels"] = [self._label(prompt)]
        elif prompt:
            raise InputError("this pipeline paints without a prompt", hints=["give an empty prompt"])
        if request.task == Task.IMAGE_TO_IMAGE:
            from PIL import Image

            given["image"] = Image.fromarray(read_image(request.inputs["image"]))
        return given

    def _label(self, prompt: str) -> int:
        known: dict[str, int] = getattr(self.pipeline, "labels", {})
        if prompt in known:
            return int(known[prompt])
        count = getattr(self.pipeline.transformer.config, "num_embeds_ada_norm", 0)  # one more stands for no class
        if prompt.strip().isdecimal() and int(prompt) < count:
            return int(prompt)
        some = ", ".join(list(known)[:8])
        raise InputError(
            f"there is no class `{prompt}`",
            hints=[f"classes: {some} ..." if some else f"give its number, 0 to {count - 1}"],
        )

    def _options(self, request: Request, accepted: dict[str, Any]) -> dict[str, Any]:
        takes = ", ".join(name for name, (target, _) in REQUEST_OPTIONS.items() if target in accepted)
        given: dict[str, Any] = {}
        for name, value in request.options.items():
            target, kind = REQUEST_OPTIONS.get(name, ("", str))
            if target not in accepted:
                raise InputError(f"this pipeline takes no `{name}`", hints=[f"it takes: {takes}"])
            try:
                given[target] = kind(value)
            except (TypeError, ValueError):
                raise InputError(f"`{name}` must be a number, got `{value}`") from None
        return given

    def close(self) -> None:
        """Drops the pipeline; may be called twice."""
        self.pipeline = None


def _levels(image: Any) -> Any:
    """Floats between 0 and 1 [height, width, channel] as uint8 [height, width, 3]."""
    import numpy as np

    levels = np.clip(np.asarray(image) * 255 + 0.5, 0, 255).astype(np.uint8)
    return np.repeat(levels, 3, axis=2) if levels.shape[2] == 1 else levels[:, :, :3]


def probe_request(session: DiffusionSession) -> Request:
    """The smallest request of the session's task: two steps, at most 64 pixels a side."""
    accepted = parameters(type(session.pipeline))
    options: dict[str, Any] = {"steps": 2} if "num_inference_steps" in accepted else {}
    side = min(_usual_side(session.pipeline), PROBE_SIDE)
    task = session.plan.case.task
    inputs: dict[str, Any] = {"prompt": "a dot" if "prompt" in accepted else "0" if "class_labels" in accepted else ""}
    if task == Task.IMAGE_TO_IMAGE:
        import numpy as np

        grey = np.linspace(0, 255, side * side * 3).reshape(side, side, 3)
        inputs["image"] = grey.astype(np.uint8)
    elif {"width", "height"} <= accepted.keys():
        options |= {"width": side, "height": side}
    return Request(task, inputs, Sampling(seed=0), options)


def _usual_side(pipeline: Any) -> int:
    """Side in pixels that the pipeline was made for, as far as it tells."""
    denoiser = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    size = getattr(getattr(denoiser, "config", None), "sample_size", None)
    scale = getattr(pipeline, "vae_scale_factor", 1)
    return size * scale if isinstance(size, int) and isinstance(scale, int) else PROBE_SIDE
