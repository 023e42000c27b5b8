"""Check the source text of rules and read from it the unpacked names and the changed states."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types

from .literals import compiled


def parse_function(fn: types.FunctionType) -> ast.FunctionDef:
    """Return the syntax tree of a function, without decorators and annotations. Raise TypeError if it has no source."""
    try:
        text = textwrap.dedent(inspect.getsource(fn))
    except (OSError, TypeError) as error:
        raise TypeError(
            f"the source of {fn.__name__!r} cannot be found, and the GPU compiler reads it: "
            "define it in a file or in a notebook cell, not through exec or python -c"
        ) from error
    try:
        tree = ast.parse(text).body[0]
    except SyntaxError:  # `inspect` has found a fragment, such as a lambda within a call
        tree = ast.Pass()
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{fn.__name__!r} must be written with def")
    tree.decorator_list, tree.returns = [], None
    for argument in tree.args.args:
        argument.annotation = None
    return ast.increment_lineno(tree, fn.__code__.co_firstlineno - 1)


def check_is_loaded(fn: types.FunctionType, tree: ast.FunctionDef) -> None:
    """Raise TypeError if the text is not the one that Python has loaded, as far as names and numbers tell.

    The instructions do not: they depend on the module around the function.
    """
    loaded = fn.__code__
    if loaded.co_freevars:  # of an enclosing function, which is not there
        return
    now = compiled(tree, loaded.co_filename)
    parts = ("co_name", "co_names", "co_varnames", "co_consts")
    if any(getattr(now, part) != getattr(loaded, part) for part in parts):
        raise TypeError(
            f"the text of {fn.__name__!r} in {loaded.co_filename} is not the one that Python has loaded: it was changed "
            "meanwhile, and engines read it; start Python, or the notebook's kernel, again"
        )


# Syntax with the same meaning on all backends. `%` has another sign on a GPU, `x += y` changes the tensors of an eager step
# in place, `and` and `if` would need one truth value of a whole block, and so on.
_FORMS = (ast.Return, ast.Name, ast.Constant, ast.Tuple, ast.Attribute)
_OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub),
    *(ast.BitAnd, ast.BitOr, ast.Invert),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


def check_form(tree: ast.FunctionDef) -> None:
    """Raise TypeError for syntax that some backend does not support, or that backends understand differently."""
    plain = ast.arguments(posonlyargs=[], args=tree.args.args, kwonlyargs=[], kw_defaults=[], defaults=tree.args.defaults)
    if ast.dump(tree.args) != ast.dump(plain):
        raise TypeError(f"{tree.name!r} takes ({ast.unparse(tree.args)}): only plain arguments are possible")
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    if not tree.body or not isinstance(tree.body[-1], ast.Return) or tree.body[-1].value is None:
        raise TypeError(f"{tree.name!r} must end by returning something")
    for node in (node for statement in tree.body for node in ast.walk(statement)):
        if isinstance(node, ast.BinOp | ast.UnaryOp):
            allowed = isinstance(node.op, _OPERATORS)
        elif isinstance(node, ast.Compare):
            allowed = len(node.ops) == 1 and isinstance(node.ops[0], _OPERATORS)
        elif isinstance(node, ast.Assign):  # up to 3.6 Triton takes no tuple in the tuple of names
            target = node.targets[0]
            nested = isinstance(target, ast.Tuple) and any(isinstance(each, ast.Tuple) for each in target.elts)
            allowed = len(node.targets) == 1 and not nested
        elif isinstance(node, ast.Call):
            allowed = isinstance(node.func, ast.Name) or (isinstance(node.func, ast.Attribute) and not node.keywords)
        else:
            allowed = isinstance(node, _FORMS) or not isinstance(node, ast.stmt | ast.expr)
        if not allowed:
            raise TypeError(
                f"{tree.name!r} contains {ast.unparse(node).splitlines()[0]!r}, which not all engines understand alike: "
                "a rule is made of assignments and, last, one return; it may use + - * /, single comparisons, & | ~ on what "
                "these give, the functions of tl (tl.where for a choice), and functions marked with @jit"
            )
    if sum(isinstance(node, ast.Return) for node in tree.body) > 1:
        raise TypeError(f"{tree.name!r} returns more than once: its last line must be its only return")


def unpacked_names(tree: ast.FunctionDef, argument: str, may_return: bool = False) -> tuple[str, ...]:
    """Return the names into which an argument is unpacked; () if it is unused or, with `may_return`, only returned."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
            target = statement.targets[0]
            if statement.value.id == argument and isinstance(target, ast.Tuple):
                if all(isinstance(element, ast.Name) for element in target.elts):
                    return tuple(ast.unparse(element) for element in target.elts)
    used = any(isinstance(node, ast.Name) and node.id == argument for node in ast.walk(tree))
    if used and not (may_return and not _uses_beyond_return(tree, argument)):
        raise TypeError(
            f"{tree.name!r} must unpack {argument} into names on a line of its own, "
            f"such as `first, second = {argument}` or `(only,) = {argument}`"
        )
    return ()


def check_return(tree: ast.FunctionDef, argument: str, states: tuple[str, ...]) -> None:
    """Raise TypeError unless the rule returns a weight and a tuple of all states, as far as the text shows it."""
    returned = tree.body[-1].value  # type: ignore[attr-defined]
    if isinstance(returned, ast.Call):
        return
    fits = isinstance(returned, ast.Tuple) and len(returned.elts) == 2
    if fits and not isinstance(second := returned.elts[1], ast.Call):
        if isinstance(second, ast.Tuple):
            fits = len(second.elts) == len(states)
        else:
            fits = isinstance(second, ast.Name) and second.id == argument
    if not fits:
        example = "".join(f"new_{name}, " for name in states).strip()
        raise TypeError(
            f"rule {tree.name!r} returns {ast.unparse(returned)!r}: it must return the new weight and a tuple of the "
            f"{len(states)} new state{'s' * (len(states) != 1)}, as in `return w, {f'({example})' if states else argument}`"
        )


def check_states_returned(tree: ast.FunctionDef, argument: str, states: tuple[str, ...]) -> None:
    """Raise TypeError if a rule computes a new state, but returns `state`, which has the old one."""
    stored = _stored(tree)
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    only_old = all(
        isinstance(value, ast.Tuple) and len(value.elts) == 2 and ast.unparse(value.elts[1]) == argument
        for value in returned
    )
    lost = [name for name in states if stored.count(name) > 1]
    if lost and only_old and argument not in stored:
        raise TypeError(
            f"rule {tree.name!r} computes a new {lost[0]!r} and returns {argument!r}, which has the old one, so the state "
            f"would never change: return the new states, as in `return w, ({', '.join(states)}{',' * (len(states) == 1)})`"
        )


def check_names(tree: ast.FunctionDef, *names: str) -> None:
    """Raise TypeError if a function unpacks two values into one name, or one into that of its weight or gradient."""
    names = (*(argument.arg for argument in tree.args.args[:2]), *names)
    if twice := [name for name in names if names.count(name) > 1]:
        raise TypeError(
            f"{tree.name!r} has the name {twice[0]!r} twice among its weight, gradient, states, sums and hyper-parameters: "
            "each must have a name of its own"
        )


def _stored(tree: ast.FunctionDef) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def unchanged_states(tree: ast.FunctionDef, argument: str, states: tuple[str, ...]) -> set[str]:
    """Return the names of the states that a rule returns unchanged, as far as the text shows it."""
    stored, returned = _stored(tree), tree.body[-1].value  # type: ignore[attr-defined]
    if not isinstance(returned, ast.Tuple):
        return set()
    second = returned.elts[1]
    if isinstance(second, ast.Name) and second.id == argument and argument not in stored:
        return set(states)
    if not isinstance(second, ast.Tuple):
        return set()
    places = zip(states, second.elts, strict=True)
    return {name for name, new in places if isinstance(new, ast.Name) and new.id == name and stored.count(name) == 1}


def names_read(tree: ast.FunctionDef, states: tuple[str, ...]) -> set[str]:
    """Return the names that a rule reads, except where it returns a state unchanged."""
    returned = tree.body[-1].value  # type: ignore[attr-defined]
    second = returned.elts[1] if isinstance(returned, ast.Tuple) else None
    places = zip(states, second.elts, strict=True) if isinstance(second, ast.Tuple) else ()
    passed = {id(new) for name, new in places if isinstance(new, ast.Name) and new.id == name}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return {node.id for node in names if id(node) not in passed}


def _uses_beyond_return(tree: ast.FunctionDef, argument: str) -> bool:
    returned = {
        id(node.value.elts[1])
        for node in ast.walk(tree)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2
    }
    return any(isinstance(node, ast.Name) and node.id == argument and id(node) not in returned for node in ast.walk(tree))


def names_behind(tree: ast.FunctionDef) -> list[set[str]]:
    """Return for each element of the returned tuple all names that it is computed from, directly or through others."""
    behind: dict[str, set[str]] = {}

    def of(node: ast.AST) -> set[str]:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return names.union(*(behind.get(name, set()) for name in names))

    for statement in tree.body[:-1]:
        if isinstance(statement, ast.Assign):
            names = of(statement.value)
            for target in ast.walk(statement.targets[0]):
                if isinstance(target, ast.Name):
                    behind[target.id] = names
    returned = tree.body[-1].value  # type: ignore[attr-defined]
    return [of(element) for element in returned.elts]
