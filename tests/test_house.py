"""The rules of the house, checked on the sources themselves (docs/architecture.md)."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "turnout"

# Longest matching prefix decides. Imports point to the same level or down.
LEVELS = {
    "turnout": 5,
    "turnout.errors": 0,
    "turnout.types": 0,
    "turnout.config": 0,
    "turnout.package": 1,
    "turnout.tasks": 1,
    "turnout.backends.base": 2,
    "turnout.backends.registry": 2,
    "turnout.backends.resolve": 2,
    "turnout.backends.requirements": 2,
    "turnout.backends.admission": 2,
    "turnout.evidence": 2,
    "turnout.backends": 3,
    "turnout.engine": 3,
    "turnout.quantize": 3,
    "turnout.qualify": 4,
    "turnout.worker": 4,
    "turnout.api": 4,
    "turnout.cli": 5,
}
# Library to the modules that may import it; nothing else may, not even inside a function.
ROOMS = {
    "torch": {
        "turnout.backends.transformers",
        "turnout.backends.torch_native",
        "turnout.backends.sentence_transformers",
        "turnout.backends.diffusers",
        "turnout.backends.openvino_executor",  # the exporter works on a torch model
        "turnout.quantize",
    },
    "transformers": {
        "turnout.backends.transformers",
        "turnout.backends.torch_native",
        "turnout.backends.openvino_executor",
        "turnout.backends.sentence_transformers",
        "turnout.backends.diffusers",
    },
    "peft": {"turnout.backends.transformers"},
    "accelerate": {"turnout.backends.transformers", "turnout.backends.diffusers", "turnout.backends.torch_native"},
    "gguf": {"turnout.backends.transformers", "turnout.backends.torch_native", "turnout.quantize"},
    "safetensors": {
        "turnout.backends.torch_native",
        "turnout.quantize",
        "turnout.backends.transformers",
        "turnout.backends.sentence_transformers",
        "turnout.backends.diffusers",
    },
    "sentence_transformers": {"turnout.backends.sentence_transformers"},
    "diffusers": {"turnout.backends.diffusers"},
    "xllamacpp": {"turnout.backends.llamacpp"},
    "llama_cpp": {"turnout.backends.llamacpp"},
    "onnxruntime": {"turnout.backends.onnxruntime"},
    "onnx": {"turnout.backends.onnxruntime"},
    "onnxruntime_genai": {"turnout.backends.onnxruntime_genai"},
    "openvino": {"turnout.backends.openvino", "turnout.backends.openvino_genai"},
    "openvino_genai": {"turnout.backends.openvino"},
    "openvino_tokenizers": {"turnout.backends.openvino", "turnout.backends.openvino_genai"},
    "ctranslate2": {"turnout.backends.ctranslate2"},
    "xgboost": {"turnout.backends.tabular"},
    "lightgbm": {"turnout.backends.tabular"},
    "sklearn": {"turnout.backends.tabular"},
    "skops": {"turnout.backends.tabular"},
}
# A backend that outgrew one file is a family of modules with one first name:
# `turnout.backends.openvino` covers `turnout.backends.openvino_graph` and the like.
# Backends whose library is built on another's.
BUILDS_ON = {
    "sentence_transformers": {"transformers"},
    "diffusers": {"transformers"},
    "torch_native": {"transformers"},
    "openvino_native": {"openvino"},
    "openvino_genai": {"openvino"},
}
MAX_FILE, MAX_FUNCTION = 500, 80
# Tables rather than procedures.
LONG_FUNCTIONS = {"turnout.tasks.contract._contracts"}
MACHINE = re.compile(r"/(?:home|root|Users|work|opt|srv)/[a-z]|/tmp/inst\b")
HEAVY = {*ROOMS, "scipy", "pandas", "PIL"}


@cache
def modules() -> dict[str, Path]:
    """Dotted name of every source module."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        parts = path.relative_to(SOURCES.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def level_of(module: str) -> int:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        level = LEVELS.get(".".join(parts[:end]))
        if level is not None:
            return level
    raise AssertionError(f"no level for {module}")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module with its line, imports inside functions included, also those that only
    a type checker reads; names handed to ``import_module`` or kept as ``module:attribute`` are data."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, *filter(None, [base])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in modules() else base), node.lineno


def test_imports_point_down() -> None:
    upward = [
        f"{module}:{line} (level {level_of(module)}) imports {target} (level {level_of(target)})"
        for module, path in modules().items()
        for target, line in imports(module, path)
        if target.split(".")[0] == "turnout" and target != "turnout" and level_of(target) > level_of(module)
    ]
    # The package's own name is its public face; only the command line may use it.
    upward += [
        f"{module}:{line} imports the public API from below"
        for module, path in modules().items()
        for target, line in imports(module, path)
        if target == "turnout" and level_of(module) < 5
    ]
    assert not upward, "\n".join(upward)


def test_one_backend_does_not_know_another() -> None:
    def family(module: str) -> str:
        name = module.split(".")[2]
        return max((n for n in backend_names() if name.startswith(n)), key=len, default="")

    crossing = [
        f"{module}:{line} imports {target}"
        for module, path in modules().items()
        if module.startswith("turnout.backends.") and level_of(module) == 3
        for target, line in imports(module, path)
        if target.startswith("turnout.backends.")
        and level_of(target) == 3
        and family(target)
        and family(target) not in {family(module), *BUILDS_ON.get(family(module), ())}
    ]
    assert not crossing, "\n".join(crossing)


def backend_names() -> set[str]:
    from turnout.backends.registry import BUILT_IN

    return {location.partition(":")[0].rpartition(".")[2] for location in BUILT_IN.values()}


def test_a_library_is_imported_in_its_room_only() -> None:
    outside = [
        f"{module}:{line} imports {target}"
        for module, path in modules().items()
        for target, line in imports(module, path)
        if (rooms := ROOMS.get(target.split(".")[0])) is not None
        and not any(module == room or module.startswith((room + "_", room + ".")) for room in rooms)
    ]
    assert not outside, "\n".join(outside)


def test_a_library_is_imported_inside_a_function() -> None:
    eager = []
    for module, path in modules().items():
        for node in tree(path).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                eager += [f"{module}:{node.lineno} {n}" for n in names if n.split(".")[0] in ROOMS]
    assert not eager, "\n".join(eager)


def public(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_")


def undocumented(path: Path) -> Iterator[str]:
    module = tree(path)
    if ast.get_docstring(module) is None and module.body:
        yield "the module"
    for node in module.body:
        if not public(node):
            continue
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if ast.get_docstring(node) is None:
            yield node.name
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if public(inner) and ast.get_docstring(inner) is None:  # type: ignore[arg-type]
                    yield f"{node.name}.{inner.name}"  # type: ignore[attr-defined]


# A backend's methods are explained once, by the protocols they fill.
PROTOCOLS = {"Backend", "Session", "Adapter"}


@cache
def protocol_methods() -> set[str]:
    return {
        inner.name
        for path in modules().values()
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and node.name in PROTOCOLS
        for inner in node.body
        if isinstance(inner, ast.FunctionDef)
    }


def test_every_public_name_has_a_docstring() -> None:
    bare = []
    for module, path in modules().items():
        fills_protocol = level_of(module) == 3 or module.startswith("turnout.tasks.")
        for name in undocumented(path):
            method = name.partition(".")[2]
            if fills_protocol and method in protocol_methods():
                continue
            bare.append(f"{module}: {name}")
    assert not bare, "\n".join(bare)


def test_rooms_stay_small() -> None:
    large = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for path in modules().values()
        if (count := path.read_text(encoding="utf-8").count("\n")) > MAX_FILE
    ]
    for module, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION and f"{module}.{node.name}" not in LONG_FUNCTIONS:
                    large.append(f"{module}.{node.name}: {length} lines")
    assert not large, "\n".join(large)


def test_no_junk_drawers() -> None:
    drawers = [m for m in modules() if m.rpartition(".")[2] in {"utils", "util", "helpers", "common", "misc"}]
    assert not drawers


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine() -> None:
    named = []
    for path in tracked():
        if path == Path(__file__).resolve():
            continue
        text = path.read_bytes()
        if b"\0" in text[:8192]:
            continue
        named += [f"{path.relative_to(ROOT)}: {hit[0]}" for hit in MACHINE.finditer(text.decode("utf-8", "replace"))]
    assert not named, "\n".join(named)


def test_all_says_what_is_exported() -> None:
    wrong = []
    for module in modules():
        if module == "turnout.__main__":
            continue
        loaded = (
            importlib.import_module(module) if level_of(module) < 3 or module in ("turnout", "turnout.cli") else None
        )
        for name in getattr(loaded, "__all__", ()):
            if not hasattr(loaded, name):
                wrong.append(f"{module}.{name} is in __all__ and does not exist")
    import turnout

    homes = set(turnout._HOMES)
    assert homes == set(turnout.__all__) - {"__version__"}
    assert list(turnout.__all__) == sorted(turnout.__all__)
    assert not wrong, "\n".join(wrong)


def imported_by(*arguments: str) -> set[str]:
    """Top-level modules in ``sys.modules`` after one call of the command line."""
    code = (
        "import sys\nfrom turnout.cli import call\nstatus = call(sys.argv[1:])\n"
        "print('\\n' + ' '.join({m.partition('.')[0] for m in sys.modules}), file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("--version",), ("list",)])
def test_light_commands_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert not imported_by(*arguments) & (HEAVY | {"numpy", "huggingface_hub", "rich", "turnout.worker"})


def test_backends_are_listed_without_importing_one() -> None:
    assert not imported_by("backends") & HEAVY


def test_inspection_imports_no_backend(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert not imported_by("inspect", str(tmp_path)) & (HEAVY | {"numpy"})


def cpu_seconds(*command: str) -> float:
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_quick() -> None:
    command = (sys.executable, "-m", "turnout", "--help")
    assert min(cpu_seconds(*command) for _ in range(5)) < 0.2
