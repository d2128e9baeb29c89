"""Structural tags: free text in which certain beginnings open a tag whose content follows a structure.

Both of vLLM's spellings are read, the older with `structures` and `triggers` and the newer with a `format` of
type `triggered_tags`:

    {"type": "structural_tag", "triggers": ["<function="], "structures":
        [{"begin": "<function=add>", "schema": {"type": "object"}, "end": "</function>"}]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<function="], "tags":
        [{"begin": "<function=add>", "content": {"type": "any_text"}, "end": "</function>"}],
        "at_least_one": false, "stop_after_first": false}}

As soon as the text holds a trigger, it goes on as one of the tags that begin with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxinfer.core import RequestError
from jaxinfer.text.grammar_lark import OPTIONS, literal, regex_term
from jaxinfer.text.grammar_schema import checked_schema, parsed_json

MAX_TAGS = 128
MAX_AFFIX = 1024
"""Characters of one trigger, beginning or end."""

_TEXT = r"/(.|\n)*/"
CONTENTS = ("json_schema", "regex", "any_text")


class _Tag(NamedTuple):
    """`content` None is any text up to the end."""

    trigger: str
    rest: str  # of the beginning, after the trigger
    content: str | None
    end: str


def tags_grammar(value: Mapping[str, Any] | str, param: str) -> str:
    """The grammar of a structural tag, or of its JSON text.

    Raises RequestError naming `param` and the place.
    """
    spec = parsed_json(value, param) if isinstance(value, str) else value
    spec = _object(spec, param, "", required=("type",), allowed=("type", "structures", "triggers", "format"))
    if spec["type"] != "structural_tag":
        raise _wrong(param, "type", f'must be "structural_tag", got {spec["type"]!r:.80}')
    if "format" in spec:
        tags, options = _of_format(spec["format"], param)
    else:
        tags, options = _of_structures(spec, param), {}
    rules = ["start: " + _start(len(tags), **options), f"tag_text: {_TEXT}"]
    for number, tag in enumerate(tags):
        rules.append(f"open_{number}[lazy]: {_TEXT} {literal(tag.trigger)}")
        rest = literal(tag.rest) if tag.rest else ""
        end = literal(tag.end) if tag.end else ""
        if tag.content is None:
            rules.append(f"close_{number}[lazy]: {_TEXT} {end}")
            rules.append(f"tag_{number}: open_{number} {rest} close_{number}")
        else:
            rules.append(f"tag_{number}: open_{number} {rest} {tag.content} {end}")
    return "\n".join(rules) + OPTIONS


def _start(count: int, *, at_least_one: bool = False, stop_after_first: bool = False) -> str:
    tags = "(" + " | ".join(f"tag_{number}" for number in range(count)) + ")"
    if stop_after_first:
        return tags if at_least_one else f"{tags} | tag_text"
    return f"{tags}{'+' if at_least_one else '*'} tag_text"


def _of_structures(spec: Mapping[str, Any], param: str) -> list[_Tag]:
    if "structures" not in spec or "triggers" not in spec:
        raise _wrong(param, "", "needs structures and triggers, or a format")
    triggers = _triggers(spec["triggers"], param, "triggers")
    tags = []
    for number, item in enumerate(_list(spec["structures"], param, "structures")):
        place = f"structures[{number}]"
        item = _object(item, param, place, required=("begin", "schema", "end"))
        content = "%json " + checked_schema(item["schema"], f"{param}.{place}.schema")
        tags.append(_tag(item, content, triggers, param, place))
    return tags


def _of_format(spec: Any, param: str) -> tuple[list[_Tag], dict[str, bool]]:
    flags = ("at_least_one", "stop_after_first")
    spec = _object(
        spec, param, "format", required=("type",), allowed=("type", "triggers", "tags", "excludes", *flags)
    )
    if spec["type"] != "triggered_tags":
        raise _wrong(param, "format.type", f'must be "triggered_tags", got {spec["type"]!r:.80}')
    if spec.get("excludes"):
        raise _wrong(param, "format.excludes", "is not supported; leave it out")
    options = {}
    for name in flags:
        options[name] = spec.get(name, False)
        if not isinstance(options[name], bool):
            raise _wrong(param, f"format.{name}", f"must be true or false, got {options[name]!r:.80}")
    triggers = _triggers(spec.get("triggers"), param, "format.triggers")
    tags = []
    for number, item in enumerate(_list(spec.get("tags"), param, "format.tags")):
        place = f"format.tags[{number}]"
        item = _object(item, param, place, required=("begin", "content", "end"), allowed=("type",))
        if item.get("type", "tag") != "tag":
            raise _wrong(param, f"{place}.type", f'must be "tag", got {item["type"]!r:.80}')
        content = _content(item["content"], param, f"{place}.content")
        if content is None and not item["end"]:
            raise _wrong(param, f"{place}.end", "is empty; any_text needs an end to go up to")
        tags.append(_tag(item, content, triggers, param, place))
    return tags, options


def _content(spec: Any, param: str, place: str) -> str | None:
    spec = _object(spec, param, place, required=("type",), allowed=("type", "json_schema", "pattern"))
    kind, field = spec["type"], {"json_schema": "json_schema", "regex": "pattern"}.get(str(spec["type"]))
    if kind not in CONTENTS:
        raise _wrong(param, f"{place}.type", f"must be one of {', '.join(CONTENTS)}, got {kind!r:.80}")
    for name in ("json_schema", "pattern"):
        if (name in spec) != (name == field):
            verb = "needs" if name == field else "takes no"
            raise _wrong(param, place, f"of type {kind} {verb} {name}")
    if kind == "json_schema":
        return "%json " + checked_schema(spec["json_schema"], f"{param}.{place}.json_schema")
    if kind == "any_text":
        return None
    if not isinstance(spec["pattern"], str):
        raise _wrong(param, f"{place}.pattern", f"must be a pattern, got {spec['pattern']!r:.80}")
    return regex_term(spec["pattern"], f"{param}.{place}.pattern")


def _tag(item: Mapping[str, Any], content: str | None, triggers: list[str], param: str, place: str) -> _Tag:
    for name in ("begin", "end"):
        if not isinstance(item[name], str) or len(item[name]) > MAX_AFFIX:
            raise _wrong(param, f"{place}.{name}", f"must be a text of at most {MAX_AFFIX} characters")
    begin = item["begin"]
    trigger = next((t for t in triggers if begin.startswith(t)), None)
    if trigger is None:
        raise _wrong(param, f"{place}.begin", f"{begin!r:.80} begins with none of the triggers")
    return _Tag(trigger, begin[len(trigger) :], content, item["end"])


def _triggers(value: Any, param: str, place: str) -> list[str]:
    triggers = _list(value, param, place)
    for number, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not 0 < len(trigger) <= MAX_AFFIX:
            raise _wrong(param, f"{place}[{number}]", f"must be a text of 1 to {MAX_AFFIX} characters")
    for trigger in triggers:
        for other in triggers:
            if other is not trigger and trigger in other:
                # The shorter one would always be there first.
                raise _wrong(param, place, f"{trigger!r:.80} is within {other!r:.80}")
    return triggers


def _list(value: Any, param: str, place: str) -> list[Any]:
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MAX_TAGS:
        raise _wrong(param, place, f"must be a list of 1 to {MAX_TAGS} items")
    return list(value)


def _object(
    value: Any, param: str, place: str, *, required: tuple[str, ...], allowed: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(param, place, f"must be an object, got {value!r:.80}")
    for name in required:
        if name not in value:
            raise _wrong(param, place, f"needs {name}")
    for name in value:
        if name not in required + allowed:
            known = ", ".join(dict.fromkeys(required + allowed))
            raise _wrong(param, place, f"has the unknown member {name!r:.80}; known: {known}")
    return value


def _wrong(param: str, place: str, message: str) -> RequestError:
    return RequestError(f"{param}{'.' if place else ''}{place} {message}", param)
