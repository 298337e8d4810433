"""Who may import whom, and what importing lewm costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lewm

PACKAGE = Path(lewm.__file__).parent

VOCABULARY = {"types", "errors", "extras", "rng", "version", "starting"}
BASICS = VOCABULARY | {"checked", "config", "files", "retired", "machine", "user_modules"}
# What a run is made of, in the order in which it is built up.
TRAINED = BASICS | {"checkpoint", "presets", "model", "methods", "data", "train"}
EVALUATED = TRAINED | {"video", "frames", "envs", "plan", "evaluate"}

# What each part of lewm may import of the others. Nothing imports the command line.
MAY_IMPORT = {
    **{part: set() for part in VOCABULARY},
    "extras": {"errors"},
    "files": VOCABULARY,
    "machine": VOCABULARY,
    "user_modules": VOCABULARY,
    "checked": VOCABULARY,
    "config": VOCABULARY | {"checked"},
    "retired": VOCABULARY | {"checked", "config"},
    "video": VOCABULARY,
    "frames": VOCABULARY,
    "checkpoint": BASICS,
    "presets": BASICS,
    "envs": VOCABULARY | {"user_modules"},
    "data": BASICS | {"video", "frames"},
    "data.collect": BASICS | {"envs"},
    "data.generate": BASICS | {"envs"},
    "kernels": BASICS,
    "model": BASICS | {"kernels"},
    "methods": BASICS | {"checkpoint", "presets", "model"},
    "methods.registry": VOCABULARY | {"checked", "config", "user_modules"},
    "plan": BASICS | {"frames", "kernels"},
    "train": TRAINED,
    "evaluate": EVALUATED,
    "understand": EVALUATED,
    "export": EVALUATED,
    "cli": EVALUATED | {"export", "understand"},
}
# Single modules that a part may import beside those.
MAY_IMPORT_BESIDES = {"presets": {"methods.registry"}}
# And for annotations only.
MAY_NAME = {"config": {"methods.base"}}
# The package itself may import everything.
UNRESTRICTED = {"__init__", "__main__"}

PLOTTING_AND_LOGGING = {"matplotlib", "rich", "tensorboard", "logging", "tyro"}
MAY_NOT_IMPORT_FROM_OUTSIDE = {
    **{part: {"torch", "gymnasium", "h5py"} for part in (*BASICS, "presets", "methods.registry")},
    "envs": {"torch", "h5py"},
    "data": {"gymnasium"},
    "kernels": {"gymnasium", "h5py"} | PLOTTING_AND_LOGGING,
    "checkpoint": {"gymnasium", "h5py"} | PLOTTING_AND_LOGGING,
    "model": {"gymnasium", "h5py"} | PLOTTING_AND_LOGGING,
    "methods": {"gymnasium", "h5py"} | PLOTTING_AND_LOGGING,
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
    besides = MAY_IMPORT_BESIDES.get(part, set())
    tree = ast.parse(source)
    outside = MAY_NOT_IMPORT_FROM_OUTSIDE.get(module, MAY_NOT_IMPORT_FROM_OUTSIDE.get(part, set()))
    typing_only = modules_for_typing_only(tree)
    for name in imported_modules(tree):
        top, _, rest = name.partition(".")
        is_relative = top == ""
        named = besides | (MAY_NAME.get(part, set()) if name in typing_only else set())
        is_foreign_part = top == "lewm" and rest.split(".")[0] not in allowed and rest not in named
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
    assert broken("kernels.rollout", "if TYPE_CHECKING:\n    from lewm.model.world_model import LeWM")
    assert broken("kernels.search", "from lewm.plan import noise")
    assert broken("plan.cem", "def late():\n    import matplotlib.pyplot")
    assert broken("envs.base", "import torch")
    assert broken("envs.base", "from .. import model")
    assert broken("data.store", "import lewm.envs")
    assert broken("train.loop", "from lewm import cli")
    assert broken("types", "import torch")
    assert broken("novelty", "import numpy")
    assert broken("model.vit", "from lewm import checkpoint")
    assert broken("model.jepa", "from lewm.methods.base import Method")
    assert broken("methods.base", "from lewm.data.store import EpisodeStore")
    assert broken("methods.base", "from lewm.train.loop import train")
    assert broken("methods.registry", "import torch")
    assert broken("methods.registry", "from lewm.methods.base import Method\nfrom lewm import files")
    assert broken("presets", "from lewm.methods.lewm import LeWM")
    assert broken("config", "from lewm.methods.base import Method")
    assert broken("train.loop", "from lewm.evaluate.runner import evaluate")
    assert broken("export.writer", "from lewm import cli")
    assert broken("understand.probe", "from lewm.cli.frame import say")
    assert not broken("types", "if TYPE_CHECKING:\n    import torch")
    assert not broken("plan.cem", "from lewm.kernels import search")
    assert not broken("data.collect", "from lewm.envs.registry import make_env")
    assert not broken("config", "if TYPE_CHECKING:\n    from lewm.methods.base import Method")
    assert not broken("presets", "from lewm.methods.registry import method_config")
    assert not broken("methods.lewm", "from lewm.model.jepa import JEPA")
    assert not broken("cli.probe", "from lewm.understand import probe")


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


VERBS_WITHOUT_TORCH = """
import sys
from lewm import cli
for arguments in (["--help"], ["envs"], *([verb, "--help"] for verb in cli.VERBS), ["data", "check", "--help"]):
    try:
        cli.run(arguments)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, f"{arguments} has loaded torch"
"""


def test_asking_for_help_does_not_load_torch():
    """It takes seconds to load; only verbs that compute have to wait for it."""
    done = subprocess.run([sys.executable, "-c", VERBS_WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
