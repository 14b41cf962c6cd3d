"""A hash over the code that a stage can reach inside this package: told with every result, part of no key."""

import ast
import hashlib
import importlib.util
from functools import cache
from pathlib import Path

PACKAGE = "rlhf_core"


@cache
def fingerprint(module: str) -> str:
    """sha256 over the syntax trees of `module` and of all it imports from this package, however deep.

    Comments, blank lines and docstrings do not count: they change no result.
    """
    digest = hashlib.sha256()
    for name in sorted(reachable(module)):
        digest.update(f"{name}\0{_meaning(_source(name))}\n".encode())
    return digest.hexdigest()


def reachable(module: str) -> set[str]:
    """`module` and every module of this package that it imports, directly or through others."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        tree = ast.parse(_source(name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names if _ours(alias.name)]
            elif isinstance(node, ast.ImportFrom) and node.module and _ours(node.module):
                waiting.append(node.module)
                candidates = [f"{node.module}.{alias.name}" for alias in node.names]
                waiting += [c for c in candidates if importlib.util.find_spec(node.module) and _is_module(c)]
    return found


def _ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def _is_module(name: str) -> bool:
    parent = _source(name.rpartition(".")[0])
    stem = name.rpartition(".")[2]
    return parent.name == "__init__.py" and (
        (parent.parent / f"{stem}.py").exists() or (parent.parent / stem / "__init__.py").exists()
    )


def _source(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"module {name!r} has no source file: its code cannot be told with the result")
    return Path(spec.origin)


def _meaning(path: Path) -> str:
    """The file's syntax tree without docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [
                one
                for one in body
                if not (
                    isinstance(one, ast.Expr)
                    and isinstance(one.value, ast.Constant)
                    and isinstance(one.value.value, str)
                )
            ]
            node.body = kept  # type: ignore[attr-defined]
    return _spelled(tree)


def _spelled(node: object) -> str:
    """A tree as text; without what is empty, which differs between versions of Python (`ast.dump` has it)."""
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={_spelled(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])
        ]
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_spelled, node))}]"
    return repr(node)
