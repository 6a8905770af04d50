"""Random JSON schemas, values of them, and ways to write a value."""

from __future__ import annotations

import json
import random
from typing import Any

# Keys of calls among them, keys that begin like those, and keys that look like structure.
KEYS = ("name", "names", "nam", "", "parameters", "arguments", 'na"me', "näme", "age", "{", "; ")
TEXTS = ("Rex", "look", "", 'a "b" {', "süß", "name")
# between two parts of JSON, as a grammar allows it
SPACES = ("", "", " ", "\n", "\n  ", "\n\t")


class Drawer:
    """Draws from one source. Schemas have bounds, so that answers at random end."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def schema(self, depth: int = 2) -> dict[str, Any]:
        """Any schema; some refer to a definition, `#/$defs/part`."""
        schema = self._any(depth)
        if self._source.random() < 0.3:
            part = self._any(0)
            schema = {
                "type": "object",
                "properties": {self._source.choice(KEYS): {"$ref": "#/$defs/part"}, "or": schema},
                "required": ["or"],
                "additionalProperties": False,
                "$defs": {"part": part},
            }
        return schema

    def arguments(self) -> dict[str, Any]:
        """A schema that has objects, and says so in one of many ways or not at all."""
        schema = self._object(2)
        open_kind = {key: value for key, value in schema.items() if key != "type"}
        match self._source.randrange(8):
            case 0:
                return schema
            case 1:
                return {**schema, "type": ["null", "object", "string"]}
            case 2:
                return {"$ref": "#/$defs/it", "$defs": {"it": open_kind}}
            case 3:
                draft = "http://json-schema.org/draft-07/schema#"
                return {"$schema": draft, "$ref": "#/definitions/it", "definitions": {"it": open_kind}}
            case 4:
                return {"allOf": [True, open_kind]}
            case 5:
                return {"anyOf": [{"type": "string", "maxLength": 3}, open_kind, {"const": 3}]}
            case 6:
                return {"enum": ["a", 7, self.value(schema), None]}
            case _:
                return open_kind

    def value(self, schema: dict[str, Any] | bool, root: dict[str, Any] | None = None) -> Any:
        """A value of a schema drawn here, with its properties in the schema's order; an object, if one may be."""
        if isinstance(schema, bool):
            return {}
        root = schema if root is None else root
        if "$ref" in schema:
            _, place, name = schema["$ref"].split("/")
            return self.value(root[place][name], root)
        if "allOf" in schema:
            return self.value(schema["allOf"][-1], root)
        if "anyOf" in schema:
            return self.value(self._source.choice(schema["anyOf"]), root)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._source.choice(schema["enum"])
        match schema.get("type", "object"):
            case "string":
                return self._source.choice(TEXTS)[: schema["maxLength"]]
            case "integer":
                return self._source.randint(schema["minimum"], schema["maximum"])
            case "number":
                # a constant 9.0 is written as 9
                return self._source.randint(0, 9) + self._source.choice([0, 0.25, 0.5])
            case "boolean":
                return self._source.random() < 0.5
            case "null":
                return None
            case "array":
                count = self._source.randint(0, schema["maxItems"])
                return [self.value(schema["items"], root) for _ in range(count)]
        return self._properties(schema, root)

    def written(self, value: Any) -> str:
        """JSON with white space between any two parts."""
        match value:
            case dict():
                parts = [
                    f"{json.dumps(key, ensure_ascii=False)}{self._space()}:{self._space()}"
                    + self.written(each)
                    for key, each in value.items()
                ]
                return "{" + self._joined(parts) + "}"
            case list():
                return "[" + self._joined([self.written(each) for each in value]) + "]"
        return json.dumps(value, ensure_ascii=False)

    def pieces(self, text: str) -> list[str]:
        """A text in some pieces."""
        cuts = sorted(self._source.randint(0, len(text)) for _ in range(4))
        return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _joined(self, parts: list[str]) -> str:
        if not parts:
            return self._space()
        return "".join(
            [
                self._space(),
                *(
                    part + self._space() + ("," + self._space() if at else "")
                    for at, part in zip(range(len(parts) - 1, -1, -1), parts, strict=True)
                ),
            ]
        )

    def _space(self) -> str:
        return self._source.choice(SPACES)

    def _properties(self, schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
        required = schema.get("required", ())
        chosen = {
            key: self.value(each, root)
            for key, each in schema.get("properties", {}).items()
            if key in required or self._source.random() < 0.5
        }
        if schema.get("additionalProperties", True) and self._source.random() < 0.5:
            more = [key for key in KEYS if key not in schema.get("properties", {})]
            return chosen | {key: self._source.choice(TEXTS) for key in self._source.sample(more, 2)}
        return chosen

    def _any(self, depth: int) -> dict[str, Any]:
        makers = [self._text, self._number, self._plain, self._choice]
        if depth:
            makers = [*makers, self._object, self._object, self._object, self._array, self._either]
        return self._source.choice(makers)(depth - 1)

    def _object(self, depth: int) -> dict[str, Any]:
        keys = self._source.sample(KEYS, self._source.randint(0, 4))
        closed = self._source.choice(
            [
                {},
                {"additionalProperties": False},
                {"additionalProperties": {"type": "string", "maxLength": 9}},
            ]
        )
        return {
            "type": "object",
            "properties": {key: self._any(depth) for key in keys},
            "required": keys[: self._source.randint(0, len(keys))],
            **closed,
        }

    def _array(self, depth: int) -> dict[str, Any]:
        return {"type": "array", "items": self._any(depth), "maxItems": 2}

    def _either(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(0), self._any(depth), {"type": "null"}]}

    def _text(self, depth: int) -> dict[str, Any]:
        return {"type": "string", "maxLength": self._source.randint(1, 9)}

    def _number(self, depth: int) -> dict[str, Any]:
        integer = {"type": "integer", "minimum": -3, "maximum": 120}
        return self._source.choice([integer, {"type": "number", "minimum": 0, "maximum": 10}])

    def _plain(self, depth: int) -> dict[str, Any]:
        return {"type": self._source.choice(["boolean", "null"])}

    def _choice(self, depth: int) -> dict[str, Any]:
        return self._source.choice(
            [{"enum": list(TEXTS[:3])}, {"const": "look"}, {"enum": [1, 12, None, "1"]}]
        )
