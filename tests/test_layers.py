"""A module imports only from the layers above its own; see CONTRIBUTING.md."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pl_grouprl

PACKAGE = Path(pl_grouprl.__file__).parent
LAYERS = [
    {"utilities"},
    {"types"},
    {"functional"},
    {"chat"},
    {"packing"},
    {"attention"},
    {"checks"},
    {"media"},
    {"models"},
    {"distributed"},
    {"rewards", "rollout", "data", "demo", "tasks"},
    {"episodes"},
    {"harnesses"},
    {"training"},
    {"loggers"},
    {"callbacks"},
    {"algorithms"},
    {"planning", "plots"},
    {"cli", "report"},
]
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported_parts(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("pl_grouprl.")}


def own_part(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def typing_only(path: Path) -> set[str]:
    """Parts imported under TYPE_CHECKING, which is no import when the program runs."""
    tree = ast.parse(path.read_text())
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    nodes = [n for block in blocks for n in ast.walk(block) if isinstance(n, ast.ImportFrom)]
    return {n.module.split(".")[1] for n in nodes if n.module and n.module.startswith("pl_grouprl.")}


def test_every_part_has_a_layer():
    parts = {own_part(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert parts == set(LAYER_OF)


def test_imports_point_to_layers_above():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        own = own_part(path)
        if own == "__init__":
            continue
        for other in imported_parts(path) - typing_only(path):
            if other != own and LAYER_OF[other] >= LAYER_OF[own]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {other}")
    assert wrong == []


def test_no_files_import_each_other_in_a_circle():
    """Neither for types nor inside functions; packages, which only re-export, are left out."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    graph = {}
    for name, path in files.items():
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        found = {
            full for node in imports for alias in node.names for full in (node.module, f"{node.module}.{alias.name}")
        }
        graph[name] = found & files.keys()
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_importing_the_package_loads_nothing_heavy():
    import subprocess
    import sys

    heavy = ("torch", "lightning", "transformers", "datasets")
    code = f"import sys, pl_grouprl; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
