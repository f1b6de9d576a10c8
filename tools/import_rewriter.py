"""Gives a module's imports of our names the places that a copy has for them, and finds what would not survive it."""

# ruff: noqa: D102, D107, N802 - libcst names and describes what a visitor's methods do
from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

import libcst as cst
from libcst.metadata import PositionProvider
from workspace import normalise, parse_imports

# Functions that load a module, or a module's files, by its name.
LOADERS = ("import_module", "__import__", "find_spec", "importorskip", "run_module", "files", "reload")


class RewriteError(Exception):
    """A module cannot be copied as it is; the message is one line, `code` the exit code of the tool."""

    code = 1


def _literal(node: cst.BaseExpression | None) -> str | None:
    """Returns the value of a string literal; of an f-string, the text before its first field."""
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    if isinstance(node, cst.ConcatenatedString):
        return _literal(node.left)
    if isinstance(node, cst.FormattedString) and node.parts and isinstance(node.parts[0], cst.FormattedStringText):
        return node.parts[0].value
    return None


def _dotted(node: cst.BaseExpression | None) -> str:
    """Returns `a.b.c` of nested attributes, with "" for any part that is not a name."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return ""


def _name_node(dotted: str) -> cst.Name | cst.Attribute:
    parts = dotted.split(".")
    node: cst.Name | cst.Attribute = cst.Name(parts[0])
    for part in parts[1:]:
        node = cst.Attribute(node, cst.Name(part))
    return node


def _as_name(name: str) -> cst.AsName:
    return cst.AsName(cst.Name(name))


class ImportRewriter(cst.CSTTransformer):
    """Gives every import of the original names the place that the copy has for it.

    `place` maps an original dotted name to its path inside the copy, or None for what is not ours. With `here` None
    the imports become absolute below `absolute`, which is what tests want, else relative to the package `here`.
    """

    def __init__(
        self,
        place: Callable[[str], tuple[str, ...] | None],
        versions: Mapping[str, str],
        where: str,
        here: tuple[str, ...] | None,
        absolute: str,
        is_module: Callable[[str], bool],
    ) -> None:
        super().__init__()
        self._place = place
        self._versions = versions
        self._where = where
        self._here = here
        self._absolute = absolute
        self._is_module = is_module

    def _target(self, path: tuple[str, ...]) -> tuple[int, str]:
        """Returns the dots and the name with which a place of the copy is imported."""
        if self._here is None:
            return 0, ".".join([*self._absolute.split("."), *path])
        shared = 0
        while shared < min(len(path), len(self._here)) and path[shared] == self._here[shared]:
            shared += 1
        return 1 + len(self._here) - shared, ".".join(path[shared:])

    def _from(self, path: tuple[str, ...], names: Sequence[cst.ImportAlias]) -> cst.ImportFrom:
        dots, module = self._target(path)
        return cst.ImportFrom(module=_name_node(module) if module else None, names=names, relative=[cst.Dot()] * dots)

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        if original_node.relative:
            return updated_node
        path = self._place(_dotted(original_node.module))
        if path is None:
            return updated_node
        dots, module = self._target(path)
        return updated_node.with_changes(
            module=_name_node(module) if module else None,
            relative=[cst.Dot()] * dots,
            whitespace_after_from=cst.SimpleWhitespace(" "),
            whitespace_before_import=cst.SimpleWhitespace(" "),
        )

    def leave_Import(
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> cst.Import | cst.FlattenSentinel[cst.BaseSmallStatement]:
        if all(self._place(_dotted(alias.name)) is None for alias in original_node.names):
            return updated_node
        statements: list[cst.BaseSmallStatement] = []
        for alias in original_node.names:
            path = self._place(_dotted(alias.name))
            if path is None:
                statements.append(cst.Import([alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)]))
            else:
                statements.extend(self._plain(_dotted(alias.name), path, alias))
        return cst.FlattenSentinel(statements)

    def _plain(self, dotted: str, path: tuple[str, ...], alias: cst.ImportAlias) -> Iterator[cst.BaseSmallStatement]:
        """Yields what stands for `import a.b` or `import a.b as c` and binds the same name."""
        top = dotted.partition(".")[0]
        root = self._place(top) or ()
        bound = alias.evaluated_alias
        if bound is not None:
            yield self._member(path, bound, dotted)
            return
        yield self._member(root, top, dotted)
        if path != root:
            yield self._member(path, "_" + dotted.replace(".", "_"), dotted)

    def _member(self, path: tuple[str, ...], bound: str, dotted: str) -> cst.BaseSmallStatement:
        if path:
            parent, name = path[:-1], path[-1]
        elif self._here is None and "." in self._absolute:
            alias = cst.ImportAlias(cst.Name(self._absolute.rpartition(".")[2]))
            if bound != self._absolute.rpartition(".")[2]:
                alias = alias.with_changes(asname=_as_name(bound))
            return cst.ImportFrom(_name_node(self._absolute.rpartition(".")[0]), [alias])
        elif self._here is None:
            alias = cst.ImportAlias(cst.Name(self._absolute))
            return cst.Import([alias if bound == self._absolute else alias.with_changes(asname=_as_name(bound))])
        else:
            raise RewriteError(
                f"{self._where}: `import {dotted}` has no relative form; write `from {dotted} import ...` instead"
            )
        alias = cst.ImportAlias(cst.Name(name))
        return self._from(parent, [alias if bound == name else alias.with_changes(asname=_as_name(bound))])

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        # `import os, ours` became several statements: one a line reads better than semicolons.
        if len(original_node.body) != 1 or len(updated_node.body) == 1:
            return updated_node
        lines = [cst.SimpleStatementLine([statement]) for statement in updated_node.body]
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        # A copy is not installed, so its version is the one that was copied.
        if _dotted(original_node.func).rpartition(".")[2] == "version" and len(original_node.args) == 1:
            value = _literal(original_node.args[0].value)
            if value is not None and isinstance(original_node.args[0].value, cst.SimpleString):
                version = self._versions.get(normalise(value))
                if version is not None:
                    return cst.SimpleString(f'"{version}"')
        return updated_node


class StringRewriter(ImportRewriter):
    """Rewrites the strings of tests as well: dotted names that are patched, modules that are run, snippets of code."""

    def _renamed(self, dotted: str) -> str | None:
        """Returns the copy's name for `ours.module` or `ours.module.attribute`."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            prefix = ".".join(parts[:end])
            if self._is_module(prefix):
                path = self._place(prefix)
                if path is not None:
                    return ".".join([self._target(path)[1], *parts[end:]])
        return None

    def _string(self, node: cst.SimpleString, new: str) -> cst.SimpleString:
        if "\\" in node.raw_value or "\\" in new or (node.quote in new) or new.endswith(node.quote[0]):
            return cst.SimpleString(repr(new))
        return cst.SimpleString(f"{node.prefix}{node.quote}{new}{node.quote}")

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        value = original_node.evaluated_value
        if not isinstance(value, str):
            return updated_node
        if re.fullmatch(r"\w+(\.\w+)+", value):
            renamed = self._renamed(value)
            return updated_node if renamed in (None, value) else self._string(original_node, str(renamed))
        if "import" not in value:
            return updated_node
        code = textwrap.dedent(value)
        try:
            names = {found.module for found in parse_imports(code, "snippet")}
            if not any(self._place(name) is not None for name in names):
                return updated_node
            new = cst.parse_module(code).visit(self).code
        except (SyntaxError, ValueError, cst.ParserSyntaxError):
            return updated_node
        first = next((line for line in value.splitlines() if line.strip()), "")
        margin = first[: len(first) - len(first.lstrip())]
        return self._string(original_node, textwrap.indent(new, margin))

    def leave_FormattedStringText(
        self, original_node: cst.FormattedStringText, updated_node: cst.FormattedStringText
    ) -> cst.FormattedStringText:
        # The fields of an f-string keep it from being parsed as code, so only the plain forms of an import are seen.
        def from_import(match: re.Match[str]) -> str:
            renamed = self._renamed(match[2])
            return match[0] if renamed is None else f"{match[1]}{renamed}{match[3]}"

        def plain_import(match: re.Match[str]) -> str:
            path = self._place(match[1])
            if path is None or "." in match[1]:
                return match[0]
            return cst.Module([cst.SimpleStatementLine([self._member(path, match[1], match[1])])]).code.strip()

        text = re.sub(r"(\bfrom\s+)([\w.]+)(\s+import\b)", from_import, original_node.value)
        if text == original_node.value:
            text = re.sub(r"\bimport\s+([\w.]+)(?=\s*(?:[;\n]|$))", plain_import, text)
        return updated_node.with_changes(value=text)

    def leave_List(self, original_node: cst.List, updated_node: cst.List) -> cst.List:
        return updated_node.with_changes(elements=self._run_module(updated_node.elements))

    def leave_Tuple(self, original_node: cst.Tuple, updated_node: cst.Tuple) -> cst.Tuple:
        return updated_node.with_changes(elements=self._run_module(updated_node.elements))

    def _run_module(self, elements: Sequence[cst.BaseElement]) -> list[cst.BaseElement]:
        """Renames the element after `"-m"`."""
        changed = list(elements)
        for index, (flag, module) in enumerate(itertools.pairwise(elements), start=1):
            if _literal(flag.value) == "-m" and isinstance(module.value, cst.SimpleString):
                changed[index] = module.with_changes(value=self._bare(module.value))
        return changed

    def _bare(self, node: cst.SimpleString) -> cst.SimpleString:
        value = node.evaluated_value
        renamed = self._renamed(value) if isinstance(value, str) else None
        return node if renamed is None else self._string(node, renamed)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        if _dotted(original_node.func).rpartition(".")[2] in LOADERS and original_node.args:
            first = original_node.args[0].value
            if isinstance(first, cst.SimpleString):
                changed = updated_node.args[0].with_changes(value=self._bare(first))
                return updated_node.with_changes(args=[changed, *updated_node.args[1:]])
        return super().leave_Call(original_node, updated_node)


class Inspector(cst.CSTVisitor):
    """Finds what would make a copy depend on, or collide with, an installed original."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, tops: Sequence[str], distributions: Sequence[str], where: str) -> None:
        super().__init__()
        self._tops = set(tops)
        self._owned = re.compile(rf"(?:{'|'.join(map(re.escape, sorted({*tops, *distributions})))})(?:::|$)")
        self._key = re.compile(rf"(?:{'|'.join(map(re.escape, sorted(tops)))})(?:[_.:/-]|$)")
        self._where = where

    def _refuse(self, node: cst.CSTNode, what: str) -> None:
        position = self.get_metadata(PositionProvider, node)
        raise RewriteError(f"{self._where}:{position.start.line}: {what}")

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        self._operator(node)

    def visit_FormattedString(self, node: cst.FormattedString) -> None:
        self._operator(node)

    def _operator(self, node: cst.SimpleString | cst.FormattedString) -> None:
        text = _literal(node)
        if text is not None and "::" in text and self._owned.match(text):
            self._refuse(
                node,
                f"the operator name {text!r} is written out and would collide with the original's; "
                "derive it from __name__",
            )

    def visit_Attribute(self, node: cst.Attribute) -> None:
        parts = _dotted(node).split(".")
        if parts[:2] == ["torch", "ops"] and len(parts) == 3 and parts[2] in self._tops:
            self._refuse(
                node, f"`{'.'.join(parts)}` names the original's operators; look them up by a name from __name__"
            )

    def visit_Call(self, node: cst.Call) -> None:
        function = _dotted(node.func).rpartition(".")[2]
        text = _literal(node.args[0].value) if node.args else None
        if text is None:
            return
        if function == "Library" and self._owned.match(text):
            self._refuse(node, f"the operator library {text!r} is written out; derive its name from __name__")
        if function == "register" and self._key.match(text):
            self._refuse(node, f"the registry key {text!r} is written out; derive it from __name__")
        if function in LOADERS and text.partition(".")[0] in self._tops:
            self._refuse(node, f"{function}({text!r}) loads the original by name; use an import statement or __name__")
