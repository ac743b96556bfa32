"""Documents in and out: strict YAML with line marks, dotted overrides, canonical dumps, atomic writes (L1: PyYAML)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from horovod_trainer.errors import Conflict, InvalidInput, NotFound, Problem, naming, shorten

MAX_BYTES = 2**20  # a configuration is a few kB; PyYAML needs seconds for a megabyte
MAX_DEPTH = 64  # PyYAML recurses once per level
MAX_DIGITS = 3000  # Python writes no number of more than 4,300
MAX_NODES = 100_000  # after aliases are expanded: a few lines of nested aliases can stand for billions

# YAML 1.2's core schema. PyYAML follows 1.1, where `no` is False, `22:22` is 1342 and `1e-3` is text.
_SCALARS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)$"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Document:
    """A tree of plain values and, for every dotted path in it, the place that wrote it (`file:line` or `-s ...`)."""

    data: dict[str, Any]
    lines: dict[str, str]

    def where(self, path: str) -> str | None:
        """Return the place of a dotted path or, where it is missing, of the nearest section that would hold it."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path.rpartition(".")[0]
        return None


class _Composer(yaml.SafeLoader):
    """PyYAML's reader and parser with the scalars above, no tags, and bounded nesting; values are built by _Builder."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {  # noqa: RUF012 - PyYAML's hook
        None: [(_TAG + name, pattern) for name, pattern in _SCALARS.items()]
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it out
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem="tags are not allowed here", problem_mark=event.start_mark)
        if self.depth >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


@dataclass
class _Builder:
    """Turns composed nodes into values, noting the line of every path and every mistake on the way."""

    source: str
    whole_source: bool = False  # an override has no lines: its text is the place
    lines: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0

    def place(self, node: yaml.Node) -> str:
        return self.source if self.whole_source else f"{self.source}:{node.start_mark.line + 1}"

    def refuse(self, path: str, message: str, got: object, node: yaml.Node) -> None:
        self.problems.append(Problem(path, message, got, self.place(node)))

    def build(self, node: yaml.Node, path: str, depth: int = 0) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:  # the second: an alias inside its own anchor
            limit = f"more than {MAX_NODES:,} values or {MAX_DEPTH} levels once its aliases are expanded"
            raise InvalidInput(Problem(path, limit, None, self.place(node)))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for number, item in enumerate(node.value):
                item_path = _join(path, str(number))
                self.lines[item_path] = self.place(item)
                items.append(self.build(item, item_path, depth + 1))
            return items
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                self.refuse(path, "a key must be text; put it in quotes", _text(key_node), key_node)
                continue
            key = self._scalar(key_node, path)
            key_path, line = _join(path, key), key_node.start_mark.line + 1
            if key in first:
                self.refuse(key_path, f"key given twice, on lines {first[key]} and {line}", None, key_node)
                continue
            first[key] = line
            self.lines[key_path] = self.place(key_node)
            values[key] = self.build(value_node, key_path, depth + 1)
        return values

    def _scalar(self, node: yaml.Node, path: str) -> Any:
        text: str = node.value
        try:
            match node.tag.removeprefix(_TAG):
                case "null":
                    return None
                case "bool":
                    return text.lower() == "true"
                case "int":
                    if len(text) > MAX_DIGITS:
                        raise ValueError
                    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
                case "float":
                    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
            return text.encode("utf-16", "surrogatepass").decode("utf-16")  # joins JSON's escaped surrogate pairs
        except ValueError:
            self.refuse(path, "not a value: half a character or a number of thousands of digits", text, node)
            return None


def load_yaml(path: Path) -> Document:
    """Return the mapping in a YAML (or JSON) file; raises NotFound, or InvalidInput with the file and line."""
    name = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(Problem(name, "no such file")) from None
    except OSError as failure:
        raise InvalidInput(Problem(name, f"cannot be read: {failure.strerror}")) from None
    if len(raw) > MAX_BYTES:
        raise InvalidInput(Problem(name, f"larger than {MAX_BYTES:,} bytes"))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        line = raw.count(b"\n", 0, failure.start) + 1
        raise InvalidInput(Problem("", "not UTF-8 text", None, f"{name}:{line}")) from None
    node = _compose(text, name)
    builder = _Builder(name)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.value == "" and node.tag == _TAG + "null"):
        return Document({}, {})
    if not isinstance(node, yaml.MappingNode):
        raise InvalidInput(Problem("", "the top level must be `key: value` lines", _text(node), builder.place(node)))
    data = builder.build(node, "")
    if builder.problems:
        raise InvalidInput(builder.problems)
    return Document(data, builder.lines)


def merge(a: Document, b: Document) -> Document:
    """Return a with b on top: sections are merged key by key, anything else is replaced; neither input changes."""
    lines = dict(a.lines)
    return Document(_merged(a.data, b.data, "", lines, b.lines), lines)


def apply_overrides(document: Document, overrides: Iterable[str]) -> Document:
    """Return the document with `section.key=value`s on top, values in YAML (nothing = null); raises InvalidInput."""
    problems: list[Problem] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        parts = path.split(".")
        if not equals or not all(parts):
            problems.append(Problem("-s", "an override is section.key=value", override))
            continue
        if len(parts) > MAX_DEPTH:
            problems.append(Problem("-s", f"nested deeper than {MAX_DEPTH} levels", override))
            continue
        builder = _Builder(f"-s {shorten(override) if len(override) > 80 else override}", whole_source=True)
        try:
            node = _compose(text, builder.source)
            value: Any = None if node is None else builder.build(node, path)
        except InvalidInput as failure:
            problems += [Problem(path, one.message, text, builder.source) for one in failure.problems]
            continue
        problems += builder.problems
        for depth in range(1, len(parts) + 1):
            builder.lines[".".join(parts[:depth])] = builder.source
        for part in reversed(parts):
            value = {part: value}
        document = merge(document, Document(value, builder.lines))
    if problems:
        raise InvalidInput(problems)
    return document


def dump_canonical(data: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal data, equal text; raises ValueError for NaN and infinity."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(data: Any) -> str:
    """Return the sha256 of the canonical dump, 64 hex digits."""
    return hashlib.sha256(dump_canonical(data).encode()).hexdigest()


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or 1.2 would read as something other than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        exotic = any(separator in data for separator in "\x85\u2028\u2029")  # PyYAML writes these unescaped
        return self.represent_scalar(_TAG + "str", data, style='"' if exotic else None)


_Dumper.add_representer(str, _Dumper.represent_str)
for _name, _pattern in _SCALARS.items():
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, None)


def dump_yaml(data: Any) -> str:
    """Return YAML in the order of the data, which load_yaml reads back equal."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file that appears whole or not at all, power cuts included; makes its folder; raises OSError."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with naming(path), temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C leaves no litter either
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, unless they are there; raises Conflict where a file is in the way, OSError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise Conflict(Problem(str(path), "cannot be made a folder: a file is in the way")) from None


def sync(path: Path) -> None:
    """Force a file or folder to disk, dirty pages of its mappings included; raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    except OSError as failure:
        if failure.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def _compose(text: str, source: str) -> yaml.Node | None:
    """Return the one document's node tree; raises InvalidInput with the line for anything PyYAML refuses."""
    try:
        return _Composer(text).get_single_node()
    except yaml.reader.ReaderError as failure:
        line = text.count("\n", 0, failure.position) + 1
        raise InvalidInput(
            Problem("", "a character YAML does not allow", failure.character, f"{source}:{line}")
        ) from None
    except yaml.MarkedYAMLError as failure:
        mark = failure.problem_mark or failure.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        message = ", ".join(part for part in (failure.context, failure.problem) if part)
        raise InvalidInput(Problem("", f"not valid YAML: {message}", None, place)) from None
    except (ValueError, OverflowError) as failure:  # escapes and versions, which PyYAML converts without a look
        raise InvalidInput(Problem("", f"not valid YAML: {failure}", None, source)) from None


def _merged(
    a: Mapping[str, Any], b: Mapping[str, Any], prefix: str, lines: dict[str, str], new_lines: Mapping[str, str]
) -> dict[str, Any]:
    """Return b merged over a; moves `lines` along, where a section in both keeps the place of its first mention."""
    merged = dict(a)
    for key, value in b.items():
        path = _join(prefix, key)
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(old, value, path, lines, new_lines)
            continue
        if key in merged:
            for stale in [line for line in lines if line == path or line.startswith(path + ".")]:
                del lines[stale]
        merged[key] = value
        lines.update({line: place for line, place in new_lines.items() if line == path or line.startswith(path + ".")})
    return merged


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _text(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or section"
