"""Small changes of a module's source, as slips of a hand make them: one at a time, each anywhere it can be made."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

Edit = Callable[[ast.AST], ast.AST | None]
"""A changed copy of a node; None where the change does not apply."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module, in the class (or function) `owner`; `place`: the node's among those of `ast.walk`."""

    module: str
    line: int
    owner: str
    kind: str
    before: str
    after: str
    place: int = -1

    def of(self, source: str) -> str:
        """The whole module with this change, from its source without it."""
        tree = ast.parse(source)
        node = list(ast.walk(tree))[self.place]
        changed = EDITS[self.kind](node)
        if changed is None:
            raise ValueError(f"{self.module}:{self.line}: no place for {self.kind}")
        return ast.unparse(ast.fix_missing_locations(_Swap(node, changed).visit(tree)))


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every change there is, in the order of the source. Defaults, annotations and docstrings are left alone."""
    tree = ast.parse(source)
    places = {id(node): place for place, node in enumerate(ast.walk(tree))}
    for owner, nodes in _owners(tree):
        for node in nodes:
            for kind, edit in EDITS.items():
                changed = edit(node)
                if changed is not None:
                    before, after = _short(ast.unparse(node)), _short(ast.unparse(changed))
                    yield Mutant(module, getattr(node, "lineno", 0), owner, kind, before, after, places[id(node)])


def _short(code: str) -> str:
    line = " ".join(code.split())
    return line if len(line) <= 90 else line[:87] + "..."


def _owners(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """Top-level classes and functions, with all nodes of those of their functions that decide (not check options)."""
    for top in tree.body:
        if isinstance(top, ast.ClassDef):
            functions = [part for part in top.body if isinstance(part, ast.FunctionDef)]
        elif isinstance(top, ast.FunctionDef):
            functions = [top]
        else:
            continue
        deciding = [one for one in functions if one.name != "__post_init__" and not one.name.startswith("_check")]
        nodes = [node for function in deciding for part in function.body for node in ast.walk(part)]
        yield top.name, [node for node in nodes if not _is_text(node)]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


# --- changes

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COUNTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
CALLED = {"min": "max", "max": "min", "sorted": "list", "any": "all", "all": "any", "reversed": "list"}


def _comparison(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Compare):
        return None
    changed = deepcopy(node)
    changed.ops[0] = COMPARED[type(node.ops[0])]()
    return changed


def _arithmetic(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BinOp) or type(node.op) not in COUNTED:
        return None
    changed = deepcopy(node)
    changed.op = COUNTED[type(node.op)]()
    return changed


def _connective(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BoolOp):
        return None
    changed = deepcopy(node)
    changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return changed


def _sign(node: ast.AST) -> ast.AST | None:
    return deepcopy(node.operand) if isinstance(node, ast.UnaryOp) else None


def _number(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return None
    return ast.Constant(node.value + 1)


def _call(node: ast.AST) -> ast.AST | None:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLED):
        return None
    changed = deepcopy(node)
    changed.func = ast.Name(CALLED[node.func.id])
    if changed.func.id == "list":
        changed.keywords = []
    return changed


def _statement(node: ast.AST) -> ast.AST | None:
    """What keeps something or does something is left out."""
    kept = isinstance(node, ast.Assign) and not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    done = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return ast.Pass() if isinstance(node, ast.AugAssign) or kept or done else None


def _condition(node: ast.AST) -> ast.AST | None:
    """The branch is always taken."""
    if not isinstance(node, ast.If):
        return None
    changed = deepcopy(node)
    changed.test = ast.Constant(True)
    return changed


def _leave(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Break):
        return ast.Continue()
    return ast.Break() if isinstance(node, ast.Continue) else None


EDITS: dict[str, Edit] = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "and/or": _connective,
    "sign dropped": _sign,
    "number + 1": _number,
    "other function": _call,
    "left out": _statement,
    "always": _condition,
    "break/continue": _leave,
}
