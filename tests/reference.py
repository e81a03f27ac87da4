"""The page of the public calls: ``python -m tests.reference`` prints ``docs/api.md`` from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

import budgetopt

GROUPS = ("Functions", "Classes", "Errors and warnings")
HEAD = """# API reference

Every public name of `budgetopt`, from its signature and docstring; made by `python -m tests.reference`. Sizes are bytes
and times nanoseconds, as integers, where nothing else is said.
"""
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes):$|^(Args|Returns|Raises|Attributes): ", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_LITERAL = re.compile(r"``(.+?)``")


def page() -> str:
    """The Markdown of the page."""
    lines = [HEAD]
    for group in GROUPS:
        names = [name for name in budgetopt.__all__ if _group(getattr(budgetopt, name)) == group]
        lines += [f"## {group}", ""]
        for name in names:
            lines += [f"### {name}", "", *_entry(name, getattr(budgetopt, name))]
    return "\n".join(lines).rstrip() + "\n"


def _group(found: Any) -> str:
    if not inspect.isclass(found):
        return GROUPS[0]
    return GROUPS[2] if issubclass(found, (Exception, Warning)) else GROUPS[1]


def _entry(name: str, found: Any) -> Iterator[str]:
    """Signature, docstring, fields and methods of one name."""
    if not inspect.isclass(found):
        yield from _code(name, found)
    elif _group(found) == GROUPS[2]:
        bases = ", ".join(f"`{base.__name__}`" for base in found.__bases__)
        yield from (f"Derived from {bases}.", "")
    yield from _prose(found)
    if inspect.isclass(found):
        if issubclass(found, BaseModel):
            yield from _fields(found)
        yield from _methods(name, found)


def _code(name: str, found: Any) -> Iterator[str]:
    """The signature, one argument a line where it is long."""
    signature = inspect.signature(found)
    given = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in given:
            given.append("*")
        if parameter.name != "self":
            given.append(_argument(parameter))
    back = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    short = f"{name}({', '.join(given)}){back}"
    long = "\n".join([f"{name}(", *(f"    {one}," for one in given), f"){back}"])
    yield from ("```text", short if len(short) <= 100 else long, "```", "")


def _argument(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {parameter.annotation}{default}"


def _prose(found: Any) -> Iterator[str]:
    """The docstring as Markdown: sections in bold, one bullet an argument, literals in single backquotes."""
    text = _ROLE.sub(r"`\1`", _LITERAL.sub(r"`\1`", inspect.getdoc(found) or ""))
    for block in re.split(r"\n\n", text):
        section = _SECTION.match(block)
        if section is None:
            yield from (block, "")
            continue
        title = section[1] or section[2]
        entries = _entries(inspect.cleandoc(block[section.end() :]))
        if title in ("Args", "Attributes"):
            yield from (f"**{title}**", "", *(f"- {entry}" for entry in entries), "")
        else:
            yield from (f"**{title}:** {' '.join(entries)}", "")


def _entries(text: str) -> list[str]:
    """Lines that are indented go on with the entry before them."""
    entries: list[str] = []
    for line in text.splitlines():
        if entries and line.startswith(" "):
            entries[-1] += " " + line.strip()
        else:
            entries.append(line.strip())
    return entries


def _fields(found: type[BaseModel]) -> Iterator[str]:
    """A table of what the model holds."""
    yield from ("| field | type | default |", "| --- | --- | --- |")
    for name, field in found.model_fields.items():
        if not field.exclude:
            default = "" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
            yield f"| `{name}` | `{_type(field.annotation)}` | {default} |"
    yield ""


def _type(annotation: Any) -> str:
    text = (
        annotation.__name__ if inspect.isclass(annotation) and not hasattr(annotation, "__args__") else str(annotation)
    )
    return re.sub(r"(budgetopt|typing)\.(\w+\.)*", "", text).replace("|", "\\|")


def _methods(name: str, found: type) -> Iterator[str]:
    """Public methods and properties, those of our own base classes included."""
    ours = [base for base in reversed(found.__mro__) if base.__module__.startswith("budgetopt")]
    for method, raw in {key: value for base in ours for key, value in vars(base).items()}.items():
        if method.startswith("_") or not (isinstance(raw, (property, classmethod)) or inspect.isfunction(raw)):
            continue
        yield from (f"#### {name}.{method}", "")
        if isinstance(raw, property):
            yield from _prose(raw)
        else:
            yield from _code(f"{name}.{method}", getattr(found, method))
            yield from _prose(raw.__func__ if isinstance(raw, classmethod) else raw)


if __name__ == "__main__":
    print(page(), end="")
