"""Who may import whom, and what importing lewm costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lewm

PACKAGE = Path(lewm.__file__).parent

VOCABULARY = {"types", "errors", "rng", "version"}
BASICS = VOCABULARY | {"checked", "config", "files", "retired"}
SERVICES = {"checkpoint", "progress"}

# What each part of lewm may import of the others.
MAY_IMPORT = {
    **{part: set() for part in VOCABULARY},
    "files": VOCABULARY,
    "checked": VOCABULARY,
    "config": VOCABULARY | {"checked"},
    "retired": VOCABULARY | {"checked", "config"},
    "video": VOCABULARY,
    "frames": VOCABULARY,
    "progress": BASICS,
    "checkpoint": BASICS,
    "envs": VOCABULARY,
    "data": BASICS | {"video", "frames"},
    "data.collect": BASICS | {"envs"},
    "model": BASICS | {"checkpoint"},
    "plan": BASICS | {"frames"},
    "train": BASICS | SERVICES | {"model", "data"},
    "baselines": BASICS | SERVICES | {"model", "data", "train"},
    "evaluate": BASICS | SERVICES | {"video", "envs", "data", "model", "train", "plan", "baselines"},
    "understand": BASICS | SERVICES | {"video", "envs", "data", "model", "train", "plan", "baselines", "evaluate"},
}
# The package itself and the command line with its verbs may import everything; nothing above imports them.
UNRESTRICTED = {"__init__", "__main__", "cli", "demo", "describe", "export"}

PLOTTING_AND_LOGGING = {"matplotlib", "rich", "tensorboard", "logging", "tyro"}
MAY_NOT_IMPORT_FROM_OUTSIDE = {
    **{part: {"torch", "gymnasium", "h5py"} for part in BASICS},
    "envs": {"torch", "h5py"},
    "data": {"gymnasium"},
    "model": {"gymnasium", "h5py"} | PLOTTING_AND_LOGGING,
    "plan": {"gymnasium", "h5py"} | PLOTTING_AND_LOGGING,
    "train": {"gymnasium"},
}


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything that is imported anywhere in ``tree``; relative ones keep their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from lewm import types` names the module only in its list.
            yield from ((f"lewm.{a.name}" for a in node.names) if module == "lewm" else (module,))


def modules_for_typing_only(tree: ast.AST) -> set[str]:
    """What is imported under `if TYPE_CHECKING:`."""
    guards = (n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    return {name for guard in guards for statement in guard.body for name in imported_modules(statement)}


def violations(module: str, source: str) -> Iterator[str]:
    """Sentences about forbidden imports in a module's source; ``module`` is dotted, without "lewm."."""
    part = module.split(".")[0]
    if part in UNRESTRICTED:
        return
    if part not in MAY_IMPORT:
        yield f"{module}: no rule says what {part!r} may import"
        return
    allowed = MAY_IMPORT.get(module, MAY_IMPORT[part]) | {part}
    tree = ast.parse(source)
    outside = MAY_NOT_IMPORT_FROM_OUTSIDE.get(part, set())
    typing_only = modules_for_typing_only(tree)
    for name in imported_modules(tree):
        top, _, rest = name.partition(".")
        is_relative = top == ""
        is_foreign_part = top == "lewm" and rest.split(".")[0] not in allowed
        is_foreign_package = top in outside and name not in typing_only
        if is_relative or is_foreign_part or is_foreign_package:
            yield f"{module} imports {name}"


def test_parts_import_only_what_they_may():
    found = [
        sentence
        for path in sorted(PACKAGE.rglob("*.py"))
        for sentence in violations(
            ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path.read_text(encoding="utf-8")
        )
    ]
    assert found == []


def test_the_rules_catch_what_they_should():
    def broken(module: str, source: str) -> bool:
        return bool(list(violations(module, source)))

    assert broken("plan.cem", "from lewm.model.vit import ViT")
    assert broken("plan.cem", "from lewm import model")
    assert broken("plan.cem", "def late():\n    import matplotlib.pyplot")
    assert broken("envs.base", "import torch")
    assert broken("envs.base", "from .. import model")
    assert broken("data.store", "import lewm.envs")
    assert broken("train.loop", "from lewm import cli")
    assert broken("types", "import torch")
    assert broken("novelty", "import numpy")
    assert not broken("types", "if TYPE_CHECKING:\n    import torch")
    assert not broken("data.collect", "from lewm.envs.registry import make_env")
    assert not broken("cli", "from lewm.understand import probe")


def test_import_is_quick_and_loads_no_simulator():
    code = """
import sys, time
start = time.perf_counter()
import lewm, gymnasium
assert time.perf_counter() - start < 3, "import lewm took too long"
loaded = {"pymunk", "mujoco", "dm_control", "ogbench"} & set(sys.modules)
assert not loaded, f"import lewm loaded {loaded}"
gymnasium.make("lewm/TwoRoom-v0")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
