"""Tree -> Config objects: every finding is collected, with the line of the key that it's about."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError

from tidemill.config.base import NOT_YET, Config, Resolver, not_there
from tidemill.config.schema import Shape, shapes
from tidemill.config.tree import Finding, Node, Origin, Path, did_you_mean, nearest, path_text, plain
from tidemill.errors import ConfigError

Messages = Mapping[str, Node]


class _Failed:
    """Stands for a value that couldn't be built; no field accepts it."""


class _Unknown(Config):
    """What stands for the config of a kind that isn't known: what it is called."""

    model_config = ConfigDict(extra="allow")


_FAILED = _Failed()
_NUMBERS = frozenset((int, float))


class Builder:
    """Builds one tree. `findings` grows; nothing is raised.

    `meant`: paths of fields that a misspelt one seems to mean, so that it isn't said of them too that they are missing.
    """

    def __init__(self, resolver: Resolver) -> None:
        self.resolver = resolver
        self.findings: list[Finding] = []
        self.meant: set[str] = set()
        self._stands_in = False

    def report(self, origin: Origin, path: Path, message: str) -> None:
        self.findings.append(Finding(origin, path_text(path), message))

    def warn(self, origin: Origin, path: Path, message: str) -> None:
        self.findings.append(Finding(origin, path_text(path), message, "warning"))

    def kind_config(self, cls: type[Config], kind: str) -> type[Config] | str:
        """The Config class of a kind, or what is wrong with it."""
        try:
            return self.resolver(cls.kind_family, kind)
        except ConfigError as error:
            return str(error)

    # -- before edits: repeated fields become lists --------------------------------------------------------------

    def normalise(self, cls: type[Config], node: Node, path: Path) -> None:
        """In place: repeated fields become lists, and a single field that was written twice is reported."""
        if node.value is None:
            node.value = {}
        if not isinstance(node.value, dict):
            return
        known = shapes(cls)
        for name, child in node.value.items():
            shape = known.get(name)
            here = (*path, name)
            if shape is not None and shape.mapping and not shape.repeated:
                _entries_to_map(child)
            elif shape is not None and shape.repeated:
                _to_list(child)
            elif child.occurrences and isinstance(child.value, list):
                lines = ", ".join(str(item.origin.line) for item in child.value)
                self.report(child.value[1].origin, here, f"given {len(child.value)} times, on lines {lines}")
                node.value[name] = child = child.value[-1]
            self._normalise_child(cls, shape, child, here)

    def _normalise_child(self, cls: type[Config], shape: Shape | None, child: Node, path: Path) -> None:
        message = shape.message if shape is not None else None
        if shape is None and cls.kind_family:
            found = self.kind_config(cls, str(path[-1]))
            message = None if isinstance(found, str) else found
        if message is None:
            return
        if isinstance(child.value, list):
            for index, item in enumerate(child.value):
                self.normalise(message, item, (*path, index))
        else:
            self.normalise(message, child, path)

    # -- after edits ---------------------------------------------------------------------------------------------

    def build(self, cls: type[Config], node: Node, path: Path = ()) -> Config | None:
        """The object, or None if a finding keeps it from being made (findings may exist anyway)."""
        self._stands_in = False
        built = self.build_anyway(cls, node, path)
        return None if self._stands_in else built

    def build_anyway(self, cls: type[Config], node: Node, path: Path = ()) -> Config:
        """The object; what is wrong in it is replaced by its default, or by the least value of its type, so that the rest can be
        checked all the same."""
        built = self._message(cls, node, path)
        return built if isinstance(built, Config) else self._stand_in(cls, {}, ())

    def _message(self, cls: type[Config], node: Node, path: Path) -> Config | _Failed:
        if node.value is None:
            node.value = {}
        if not isinstance(node.value, dict):
            self.report(node.origin, path, f"expected a section, got {_shown(node)}")
            return _FAILED
        values: dict[str, Any] = {}
        known = shapes(cls)
        for name, child in node.value.items():
            shape, here = known.get(name), (*path, name)
            if shape is None:
                if not cls.kind_family:
                    self._unknown_field(cls, name, node.keys.get(name, child.origin), path)
                    self._stand_for_meant(known, name, values)
            elif child.value is not None or shape.message is not None:
                values[name] = self._field(shape, child, here)
                self._warn_if_idle(cls, shape, values[name], node.keys.get(name, child.origin), here)
        self._check_oneofs(cls, node, path)
        if cls.kind_family:
            self._kind(cls, node, path, values)
        return self._validate(cls, node, path, values)

    def _unknown_field(self, cls: type[Config], name: str, origin: Origin, path: Path) -> None:
        near = nearest(name, shapes(cls))
        if near is not None:
            self.meant.add(path_text((*path, near)))
        self.report(origin, (*path, name), f"unknown field{did_you_mean(name, shapes(cls))}")

    def _stand_for_meant(self, known: Mapping[str, Shape], name: str, values: dict[str, Any]) -> None:
        """A misspelt list of sections has an item whose names aren't known, so that nobody misses a name."""
        near = known.get(nearest(name, known) or "")
        if near is not None and near.repeated and near.message is not None:
            values.setdefault(near.name, (self._stand_in(near.message, {}, ()),))

    def _warn_if_idle(self, cls: type[Config], shape: Shape, value: object, origin: Origin, path: Path) -> None:
        if not shape.effect or value == shape.default:
            return
        if shape.effect == NOT_YET:
            self.report(origin, path, not_there(shape.name, _siblings(cls, shape.name)))
        else:
            self.warn(origin, path, shape.effect)

    def _check_oneofs(self, cls: type[Config], node: Node, path: Path) -> None:
        assert isinstance(node.value, dict)
        for members in cls.oneofs.values():
            given = [name for name in node.value if name in members]
            for name in given[1:]:
                first = node.keys.get(given[0], node.value[given[0]].origin)
                where = f" on line {first.line}" if first.line else ""
                message = f"only one of {', '.join(members)} can be given; {given[0]!r} is{where}"
                self.report(node.keys.get(name, node.value[name].origin), (*path, name), message)

    def _kind(self, cls: type[Config], node: Node, path: Path, values: dict[str, Any]) -> None:
        """Finds the one key that is a kind, and builds its config."""
        assert isinstance(node.value, dict)
        values["kind"], values["config"] = "", _FAILED
        given: list[str] = []
        for name, child in node.value.items():
            if name in shapes(cls):
                continue
            origin, here = node.keys.get(name, child.origin), (*path, name)
            found = self.kind_config(cls, name)
            if isinstance(found, str):
                near = nearest(name, shapes(cls))
                if near is not None:
                    self._unknown_field(cls, name, origin, path)
                    continue
                self.report(origin, here, found)
                self._stands_in = True
                values["kind"], values["config"] = name, _name_of(child)
            elif given:
                first = node.keys.get(given[0], origin)
                where = f" on line {first.line}" if first.line else ""
                self.report(origin, here, f"only one {cls.kind_family} can be given; {given[0]!r} is{where}")
            else:
                values["kind"], values["config"] = name, self._message(found, child, here)
            given.append(name)
        if not given:
            self.report(node.origin, path, f"no {cls.kind_family} is given; write its kind and its fields here")

    def _field(self, shape: Shape, node: Node, path: Path) -> Any:
        if Any in shape.scalars:
            return plain(node)
        if shape.mapping:
            return self._map(shape, node, path)
        if not shape.repeated:
            return self._single(shape, node, path)
        if not isinstance(node.value, list):
            _to_list(node)
        assert isinstance(node.value, list)
        items = [self._single(shape, item, (*path, index)) for index, item in enumerate(node.value)]
        if shape.message is not None:
            return tuple(self._stand_in(shape.message, {}, ()) if item is _FAILED else item for item in items)
        return _FAILED if any(item is _FAILED for item in items) else tuple(items)

    def _map(self, shape: Shape, node: Node, path: Path) -> Any:
        if not isinstance(node.value, dict):
            self.report(node.origin, path, f"expected a section, got {_shown(node)}")
            return _FAILED
        items = {name: self._single(shape, item, (*path, name)) for name, item in node.value.items()}
        return _FAILED if any(item is _FAILED for item in items.values()) else items

    def _single(self, shape: Shape, node: Node, path: Path) -> Any:
        if shape.message is not None:
            return self._message(shape.message, node, path)
        problem = _misfit(shape, node)
        if problem:
            self.report(node.origin, path, problem)
            return _FAILED
        return node.value

    def _validate(self, cls: type[Config], node: Node, path: Path, values: dict[str, Any]) -> Config | _Failed:
        failed = {name for name, value in values.items() if value is _FAILED}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            for problem in problems:
                where = problem["loc"]
                if (not where or where[0] not in failed) and path_text((*path, *where)) not in self.meant:
                    self._report_problem(node, path, where, dict(problem))
            return self._stand_in(cls, values, [str(problem["loc"][0]) for problem in problems if problem["loc"]])

    def _stand_in(self, cls: type[Config], values: dict[str, Any], wrong: Collection[str]) -> Config:
        """The section with what is right in it."""
        self._stands_in = True
        kept = {name: value for name, value in values.items() if name not in wrong and value is not _FAILED}
        if cls.kind_family:
            kept = {"kind": "", "config": Config(), **kept}
        for shape in shapes(cls).values():
            if shape.required and shape.name not in kept:
                kept[shape.name] = self._least(shape)
        try:
            return cls.model_validate(kept)
        except ValidationError:
            return cls.model_construct(**kept)

    def _least(self, shape: Shape) -> Any:
        if shape.repeated or shape.mapping:
            return {} if shape.mapping else ()
        if shape.message is not None:
            return self._stand_in(shape.message, {}, ())
        return "" if shape.choices or str in shape.scalars else False if shape.scalars == {bool} else 1

    def _report_problem(self, node: Node, path: Path, where: tuple[int | str, ...], problem: dict[str, Any]) -> None:
        origin = node.origin
        for part in where:
            if isinstance(node.value, dict) and isinstance(part, str) and part in node.value:
                origin = node.keys.get(part, node.value[part].origin)
                node = node.value[part]
            elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                origin = node.origin
            elif problem["type"] != "missing":
                break
            path = (*path, part)
        self.report(origin, path, _message_of(problem))


def _siblings(cls: type[Config], name: str) -> list[str]:
    """The members of a field's oneof that have a function here."""
    known = shapes(cls)
    members = next((members for members in cls.oneofs.values() if name in members), ())
    return [member for member in members if member in known and not known[member].effect]


def _name_of(node: Node) -> Config:
    name = node.value.get("feature_name") if isinstance(node.value, dict) else None
    return _Unknown.model_validate({} if name is None or not isinstance(name.value, str) else {"feature_name": name.value})


def _to_list(node: Node) -> None:
    if node.value is None:
        node.value = []
    elif not isinstance(node.value, list):
        node.value = [Node(node.value, node.origin, node.bare, keys=node.keys)]
    elif node.occurrences:
        items: list[Node] = []
        for item in node.value:
            items.extend(item.value if isinstance(item.value, list) else [item])
        node.value = items
    node.occurrences = False


def _entries_to_map(node: Node) -> None:
    """Protobuf text writes a map as repeated `{key: ... value: ...}`."""
    if isinstance(node.value, dict) and node.bare and set(node.value) == {"key", "value"}:
        node.value = [Node(node.value, node.origin, keys=node.keys)]
    if not isinstance(node.value, list):
        return
    entries: dict[str, Node] = {}
    for item in node.value:
        if not isinstance(item.value, dict) or set(item.value) != {"key", "value"}:
            return
        entries[str(item.value["key"].value)] = item.value["value"]
    node.value, node.occurrences = entries, False


def _shown(node: Node) -> str:
    if isinstance(node.value, dict):
        return "a section"
    if isinstance(node.value, list):
        return "a list"
    return _literal(node.value)


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "nothing" if value is None else repr(value)


def _misfit(shape: Shape, node: Node) -> str:
    """What keeps this value from being the field's scalar, or ""; ranges and number syntax are left to pydantic."""
    value, kinds = node.value, shape.scalars
    if isinstance(value, dict | list):
        return f"expected {_wanted(shape)}, got {_shown(node)}"
    if shape.choices:
        if value not in shape.choices:
            known = ", ".join(shape.choices) if len(shape.choices) <= 8 else ""
            hint = did_you_mean(str(value), shape.choices) or (f"; known: {known}" if known else "")
            return f"unknown value {_literal(value)}{hint}"
    elif isinstance(value, bool) and bool not in kinds and kinds & (_NUMBERS | {str}):
        return f"expected {_wanted(shape)}, got {_literal(value)}"
    elif kinds == {str} and not isinstance(value, str):
        return f"expected a string, got {_literal(value)}; put it in quotes"
    elif kinds == {str} and node.bare:
        return f"expected a string, got the word {value}; put it in quotes"
    elif kinds == {bool} and not isinstance(value, bool):
        return f"expected true or false, got {_literal(value)}"
    return ""


def _wanted(shape: Shape) -> str:
    """With its article: `an integer`, `one of DEEP, WIDE`."""
    text = shape.type_text().removeprefix("repeated ")
    if shape.choices or shape.scalars == {bool}:
        return text
    return f"an {text}" if text[0] in "aeiou" else f"a {text}"


def _message_of(problem: dict[str, Any]) -> str:
    """Pydantic's finding in our words."""
    kind, given = problem["type"], _literal(problem.get("input"))
    context = problem.get("ctx", {})
    signs = {"greater_than": ("gt", ">"), "greater_than_equal": ("ge", ">="), "less_than": ("lt", "<")}
    signs["less_than_equal"] = ("le", "<=")
    if kind == "missing":
        return "required"
    if kind in signs:
        key, sign = signs[kind]
        return f"must be {sign} {context[key]:g}, got {given}"
    if kind.startswith("int_"):
        return f"expected an integer, got {given}"
    if kind.startswith("float_"):
        return f"expected a number, got {given}"
    if kind == "finite_number":
        return f"must be finite, got {given}"
    if kind == "value_error":
        return str(context.get("error", problem["msg"]))
    return f"{problem['msg'][:1].lower()}{problem['msg'][1:]}, got {given}"
