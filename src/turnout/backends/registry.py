"""Backends by name, imported only when used. Built-ins come in through the same door as plug-ins:
an entry point of the group ``turnout.backends`` whose value is ``module:Class``."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from turnout.backends.base import Backend
from turnout.errors import UsageError

GROUP = "turnout.backends"
BUILT_IN = {
    "transformers": "turnout.backends.transformers:TransformersBackend",
    "torch-native": "turnout.backends.torch_native:TorchNativeBackend",
    "llamacpp": "turnout.backends.llamacpp:LlamaCppBackend",
    "onnxruntime": "turnout.backends.onnxruntime:OnnxRuntimeBackend",
    "onnxruntime-genai": "turnout.backends.onnxruntime_genai:OnnxRuntimeGenAIBackend",
    "openvino": "turnout.backends.openvino:OpenVINOBackend",
    "openvino-genai": "turnout.backends.openvino_genai:OpenVINOGenAIBackend",
    "openvino-native": "turnout.backends.openvino_native:OpenVINONativeBackend",
    "sentence-transformers": "turnout.backends.sentence_transformers:SentenceTransformersBackend",
    "diffusers": "turnout.backends.diffusers:DiffusersBackend",
    "ctranslate2": "turnout.backends.ctranslate2:CTranslate2Backend",
    "tabular": "turnout.backends.tabular:TabularBackend",
}


@cache
def locations() -> dict[str, str]:
    """Backend name to ``module:Class``: the built-in ones, then those of installed plug-ins.

    A plug-in may not take a built-in's name.
    """
    found = dict(BUILT_IN)
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, point.value)
    return found


@cache
def get(name: str) -> Backend:
    """The backend of that name. Raises ``UsageError`` naming the known ones."""
    location = locations().get(name)
    if location is None:
        raise UsageError(f"unknown backend `{name}`", hints=["known backends: " + ", ".join(names())])
    module, _, attribute = location.partition(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend


def names() -> list[str]:
    """Names of all backends, in registry order."""
    return list(locations())
