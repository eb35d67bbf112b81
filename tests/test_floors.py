"""The house rules that a syntax tree can hold: who imports whom, who reads the environment, what nobody does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = ROOT / "attnlab", ROOT / "tests"

FLOORS = {
    "_boot": 0,
    "_triton": 0,
    "arguments": 0,
    "assets": 0,
    "batch": 0,
    "mask": 0,
    "checks": 0,
    "files": 0,
    "grad": 0,
    "registry": 0,
    "spec": 0,
    "units": 0,
    "memory": 1,
    "mods": 1,
    "plan": 2,
    "trace": 2,
    "kernels": 3,
    "eager": 3,
    "engines": 4,
    "backend": 5,
    "choice": 5,
    "inspect": 6,
    "graphs": 6,
    "distributed": 6,
    "speculative": 6,
    "compat": 6,
    "integrations": 6,
    "bench": 6,
    "plots": 7,
    "explore": 8,
    "bench_command": 9,
    "bench_host": 9,
    "bench_report": 9,
    "tune_command": 9,
    "tour": 9,
    "tour_page": 9,
    "tour_command": 9,
    "gallery": 9,
    "lab": 9,
    "doctor": 9,
    "doctor_probes": 9,
    "trace_command": 9,
    "cli": 9,
    "__main__": 9,
}
"""By the first word after `attnlab.`: a module imports from its own floor and from those below."""

SIDE_BY_SIDE = [{"memory", "mods"}, {"kernels", "eager"}]
"""Rooms of one floor that do not know each other."""

ENTERS_AT = {"matplotlib": 7, "ipywidgets": 8, "IPython": 8, "transformers": 6, "jupyterlab": 9, "rich": 6}
"""The lowest floor on which a heavy or optional library may be imported."""

INSIDE_FUNCTIONS: set[tuple[str, str]] = set()
"""Imports that may stand inside a function, as (file, module): optional extras alone."""

Finding = tuple[str, int, str]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "planted" not in path.parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room(module: str) -> str:
    """`plan` for attnlab.plan.splits; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(node: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every imported module; `from package import module` counts as that module where it is one."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from ((child, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                is_module = (ROOT / full.replace(".", "/")).is_dir() or (
                    ROOT / f"{full.replace('.', '/')}.py"
                ).is_file()
                yield child, full if is_module else str(child.module)


def find(check: str) -> list[Finding]:
    """Run one rule over the package."""
    return [finding for path in files(PACKAGE) for finding in RULES[check](path)]


def upward_imports(path: Path) -> Iterator[Finding]:
    """Imports of a higher floor. The package's own file names everything, lazily, and is on no floor."""
    mine = room(module_of(path))
    if not mine:
        return
    for node, module in imports(tree(path)):
        theirs = room(module) if module.split(".")[0] == "attnlab" else ""
        if not theirs:
            continue
        if FLOORS.get(theirs, 99) > FLOORS[mine]:
            yield name(path), node.lineno, f"{mine} (floor {FLOORS[mine]}) imports {module}"
        if any({mine, theirs} == pair for pair in SIDE_BY_SIDE):
            yield name(path), node.lineno, f"{mine} imports {module}, which stands beside it"


def libraries_too_low(path: Path) -> Iterator[Finding]:
    for node, module in imports(tree(path)):
        library = module.split(".")[0]
        if FLOORS.get(room(module_of(path)), 0) < ENTERS_AT.get(library, 0):
            yield name(path), node.lineno, f"imports {library}, which enters on floor {ENTERS_AT[library]}"


def both_twins(path: Path) -> Iterator[Finding]:
    """Only engines.py knows the kernels and their eager twins."""
    rooms = {room(module) for _, module in imports(tree(path)) if module.startswith("attnlab.")}
    if {"kernels", "eager"} <= rooms and name(path) != "attnlab/engines.py":
        yield name(path), 1, "imports kernels and eager"


def relative_imports(path: Path) -> Iterator[Finding]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield name(path), node.lineno, f"from {'.' * node.level}{node.module or ''} import"


def imports_inside_functions(path: Path) -> Iterator[Finding]:
    for function in ast.walk(tree(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node, module in imports(function):
                if (name(path), module) not in INSIDE_FUNCTIONS:
                    yield name(path), node.lineno, f"imports {module} inside a function"


def triton_imports(path: Path) -> Iterator[Finding]:
    for node, module in imports(tree(path)):
        if module.split(".")[0] == "triton" and name(path) != "attnlab/_triton.py":
            yield name(path), node.lineno, f"imports {module}; _triton.py alone does"


def environment(path: Path) -> Iterator[Finding]:
    if name(path) == "attnlab/_boot.py":
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb"):
            yield name(path), node.lineno, f"reads {ast.unparse(node)}; _boot.py alone does"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield name(path), node.lineno, "takes names out of os; write os.x, so that this rule can see it"


def probing(path: Path) -> Iterator[Finding]:
    if name(path) == "attnlab/compat/sglang/adapt.py":
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            probes = node.func.id == "hasattr" or (
                node.func.id == "getattr" and len(node.args) + len(node.keywords) > 2
            )
            if probes:
                yield name(path), node.lineno, ast.unparse(node)


def asserts(path: Path) -> Iterator[Finding]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assert):
            yield name(path), node.lineno, ast.unparse(node)


def unpickling(path: Path) -> Iterator[Finding]:
    for node, module in imports(tree(path)):
        if module.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "marshal"):
            yield name(path), node.lineno, f"imports {module}"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
            yield name(path), node.lineno, ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield name(path), node.value.lineno, "allow_pickle"


RULES = {
    rule.__name__: rule
    for rule in (
        upward_imports,
        libraries_too_low,
        both_twins,
        relative_imports,
        imports_inside_functions,
        triton_imports,
        environment,
        probing,
        asserts,
        unpickling,
    )
}


@pytest.mark.parametrize("rule", RULES)
def test_the_package_has_no(rule: str) -> None:
    assert find(rule) == []


def test_every_room_has_a_floor() -> None:
    assert {room(module_of(path)) for path in files(PACKAGE)} - {""} <= FLOORS.keys()


def test_constants_of_plans_and_kernels_have_one_home_and_kernels_ask_no_policy() -> None:
    homes: dict[str, list[str]] = {}
    for path in files(PACKAGE):
        if room(module_of(path)) in ("plan", "kernels"):
            assigned = [to for node in tree(path).body if isinstance(node, ast.Assign) for to in node.targets]
            for constant in filter(str.isupper, (to.id for to in assigned if isinstance(to, ast.Name))):
                homes.setdefault(constant, []).append(name(path))
        if room(module_of(path)) == "kernels":
            asked = [module for _, module in imports(tree(path)) if module.startswith("attnlab.plan.policies")]
            assert asked == [], name(path)
    assert homes["HEAD_TILE"] == ["attnlab/plan/tiles.py"]
    assert {constant: found for constant, found in homes.items() if len(found) > 1} == {}


def test_tolerances_are_numbers_in_one_table_alone() -> None:
    found = [
        (name(path), node.value.lineno)
        for path in files(TESTS)
        if path.name != "tolerances.py"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.keyword) and node.arg in ("atol", "rtol") and _is_number(node.value)
    ]
    assert found == []


def _is_number(node: ast.expr) -> bool:
    """Whether an expression is made of numbers: 1e-5, -1, 2 * 1e-3."""
    return all(
        isinstance(part, ast.Constant | ast.UnaryOp | ast.BinOp | ast.operator | ast.unaryop) for part in ast.walk(node)
    )


PLANTED = {
    "upward_imports": ("plan/x.py", "from attnlab import backend"),
    "libraries_too_low": ("inspect/x.py", "import matplotlib.pyplot as plt"),
    "both_twins": ("bench/x.py", "from attnlab.eager import decode\nfrom attnlab.kernels import decode as d"),
    "relative_imports": ("plan/x.py", "from . import splits"),
    "imports_inside_functions": ("plan/x.py", "def f():\n    if True:\n        import json"),
    "triton_imports": ("kernels/x.py", "import triton.language as tl"),
    "environment": ("plan/x.py", "import os\nX = os.environ.get('X')"),
    "probing": ("memory/x.py", "def f(p):\n    return getattr(p, 'x', None)"),
    "asserts": ("plan/x.py", "assert True"),
    "unpickling": ("inspect/x.py", "import numpy as np\nnp.load('x', allow_pickle=True)"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_planted_breach_is_found_by(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule that cannot fail."""
    place, text = PLANTED[rule]
    planted = tmp_path / "attnlab" / place
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    (tmp_path / "attnlab" / "backend.py").touch()
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert list(RULES[rule](planted))


def test_kernels_and_eager_do_not_know_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "attnlab" / "eager" / "x.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("from attnlab.kernels.core import score_pipeline")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert [what for _, _, what in upward_imports(planted)] == [
        "eager imports attnlab.kernels.core, which stands beside it"
    ]


def test_sizes_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Files of more than 300 lines and host functions of more than 60 are printed, and allowed."""
    with capsys.disabled():
        for path in files(PACKAGE):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > 300:
                print(f"\n{name(path)}: {lines} lines", end="")
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.FunctionDef) and not _is_kernel(node):
                    length = (node.end_lineno or 0) - node.lineno + 1
                    if length > 60:
                        print(f"\n{name(path)}: {node.name} has {length} lines", end="")


def _is_kernel(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "jit" for decorator in node.decorator_list)
