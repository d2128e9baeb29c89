"""The jinja2 environment in which chat templates run.

A chat template comes with a model file, so it is a stranger's program. jinja2's immutable sandbox keeps it
away from Python's internals; this module adds a budget of time and produced text, because the sandbox alone
lets nested loops run for hours and a doubling string fill the memory.

The dialect is the one templates are written for (transformers): trim_blocks, lstrip_blocks, break and
continue, raise_exception, strftime_now, a tojson that escapes nothing, and {% generation %} blocks,
which only matter in training.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jaxinfer.text.errors import ChatTemplateError

MAX_SECONDS = 5.0
# A prompt of a million tokens has about 5 million characters; templates copy each a few times.
MAX_CHARACTERS = 64_000_000
MAX_NUMBER_BITS = 4096
# The longest templates of published models have some 30 000; compiling takes a second per 100 000.
MAX_SOURCE_CHARACTERS = 250_000
# An item of a list costs what so many characters do: a pointer's bytes, and a look at what it points to.
ITEM_COST = 16

# Filters that do not turn a list into text, so that the size of what they are given does not matter.
_CHEAP_NAMES = """
attr batch count d default dictsort first float groupby int items last length list map max min random
reject rejectattr reverse select selectattr slice sort sum unique
"""
_CHEAP_FILTERS = frozenset(_CHEAP_NAMES.split())
# A width of a million, or one taken from an argument, in "%...d" or "{:...}".
_WIDE_FORMAT = re.compile(r"[%{:][^a-zA-Z%{}]*(\d{6,}|\*)")


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + MAX_SECONDS  # of work: a busy machine is no template's fault
        self.characters = MAX_CHARACTERS
        self.charges = 0

    def charge(self, characters: int = 0) -> None:
        """Take from the budget; raises ChatTemplateError when it is used up."""
        self.characters -= characters
        if self.characters < 0:
            raise ChatTemplateError(f"the chat template produced more than {MAX_CHARACTERS} characters")
        self.charges += 1  # the clock of a thread costs more than most of what is charged
        if self.charges % 32 == 0 and time.thread_time() > self.deadline:
            raise ChatTemplateError(f"the chat template ran for more than {MAX_SECONDS:g} seconds")


_budget: ContextVar[Budget] = ContextVar("chat_template_budget")


def _charge(value: Any) -> Any:
    """Charge the text that `value` is, or would become when printed; returns it."""
    budget = _budget.get(None)
    if budget is None:  # a constant expression, folded while the template is compiled
        return value
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            budget.charge(len(item))
        elif isinstance(item, Mapping):
            budget.charge(2 * ITEM_COST * len(item))  # before anything is made of them
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set):
            budget.charge(ITEM_COST * len(item))
            pending.extend(item)
    return value


def _charge_made(result: Any) -> Any:
    """Charge what a call or a filter made: a text, or a container by its items alone, which cost nothing to
    look at but memory to hold; returns it."""
    budget = _budget.get(None)
    if isinstance(result, str):
        return _charge(result)
    if budget is not None and isinstance(result, list | tuple | set | Mapping):
        budget.charge(ITEM_COST * len(result))
    return result


def _tick() -> str:
    budget = _budget.get(None)
    if budget is not None:
        budget.charge()
    return ""


def _concatenate(*parts: Any) -> str:
    for part in parts:
        _charge(part)
    return "".join(map(str, parts))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks numbers, charges what it is given and what it returns."""

    # wraps also copies jinja's marks for filters that want the context or the environment first.
    @functools.wraps(function)
    def charged(*arguments: Any, **keywords: Any) -> Any:
        for argument in (*arguments, *keywords.values()):
            _refuse_large(argument)
            if name not in _CHEAP_FILTERS and isinstance(argument, str | list | tuple | Mapping):
                _charge(argument)
        if name == "format":
            _refuse_wide_format(arguments[0] if arguments else None)
        result = function(*arguments, **keywords)
        return _charge_made(result)

    return charged


def _refuse_large(argument: Any) -> None:
    if isinstance(argument, int) and abs(argument) > MAX_CHARACTERS:
        raise ChatTemplateError(f"the chat template uses a number that is too large ({str(argument)[:20]})")


class _GenerationBlocks(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: the body as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guard(NodeTransformer):
    """Puts a check of the budget into every loop and macro, and charges texts where they grow."""

    def __init__(self, tick: str, concatenate: str) -> None:
        self._tick = tick
        self._concatenate = concatenate

    def _with_tick(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(self._tick, [])))
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_tick

    def visit_Concat(self, node: nodes.Concat) -> Any:
        self.generic_visit(node)
        return _call(self._concatenate, node.nodes)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> Any:
        self.generic_visit(node)
        inner: Any = node.filter
        node.filter = nodes.Filter(inner, "charge", [], [], None, None)
        return node


def _call(name: str, arguments: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates within a budget; may be used by many threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlocks],
            finalize=_charge,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _charged(name, function) for name, function in self.filters.items()}
        self.filters["charge"] = _charge
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        # Sample text by the million paragraphs, in one call that no budget can look into.
        del self.globals["lipsum"]
        # Unguessable names: a template cannot set a variable of the same name to escape the checks.
        self._tick_name = f"tick_{secrets.token_hex(8)}"
        self._concatenate_name = f"concatenate_{secrets.token_hex(8)}"
        self.globals[self._tick_name] = _tick
        self.globals[self._concatenate_name] = _concatenate

    def prepare(self, source: str) -> jinja2.Template:
        """Compile a template. Raises ChatTemplateError with the line of a syntax error, and for a template
        that is too long, or nested deeper than Python compiles."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are allowed"
            )
        try:
            tree = _Guard(self._tick_name, self._concatenate_name).visit(self.parse(source))
            for node in tree.find_all(nodes.Node):
                node.set_environment(self)
            _set_line_numbers(tree, 1)
            code = self.compile(tree)
            return jinja2.Template.from_code(self, code, self.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            where = f"{error.message} (line {error.lineno})"
            raise ChatTemplateError(f"the chat template is not valid jinja: {where}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # of Python's compiler, not of jinja's
            raise ChatTemplateError("the chat template is nested too deeply") from error
        except (ValueError, OverflowError) as error:  # a constant that Python cannot write down
            raise ChatTemplateError(f"the chat template cannot be compiled: {_line(error)}") from error

    def run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render. Raises ChatTemplateError, in one line, for whatever goes wrong inside the template."""
        token = _budget.set(Budget())
        try:
            return template.render(variables)
        except ChatTemplateError:
            raise
        except SecurityError as error:
            raise ChatTemplateError(f"the chat template tried something unsafe: {_line(error)}") from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template recurses too deeply") from error
        except jinja2.UndefinedError as error:
            raise ChatTemplateError(
                f"the chat template uses what the messages lack: {_line(error)}"
            ) from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {_line(error)}") from error
        except Exception as error:  # a template can raise anything Python can
            reason = f"{type(error).__name__}: {_line(error)}"
            raise ChatTemplateError(f"the chat template failed: {reason}") from error
        finally:
            _budget.reset(token)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once; jinja2 would print nothing and go on until the value is used."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r}")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Named as jinja2 names them, so that a template's own keyword "obj" cannot clash.
        for argument in (*args, *kwargs.values()):
            _refuse_large(argument)
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        if getattr(method, "__name__", "") in ("format", "format_map"):
            _refuse_wide_format(getattr(method, "__self__", None))
        return _charge_made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _refuse_large_operation(operator, left, right)
        return _charge_made(super().call_binop(context, operator, left, right))


def _refuse_large_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse operators whose result would be huge before it is made."""
    if operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(count, int):
                _refuse_large(len(value) * count * (1 if isinstance(value, str) else ITEM_COST))
        if isinstance(left, int) and isinstance(right, int):
            _refuse_many_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _refuse_many_bits(left.bit_length() * abs(right))
    elif operator == "%":
        _refuse_wide_format(left)


def _refuse_many_bits(bits: int) -> None:
    if bits > MAX_NUMBER_BITS:
        raise ChatTemplateError(f"the chat template computes a number of more than {MAX_NUMBER_BITS} bits")


def _refuse_wide_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE_FORMAT.search(text):
        raise ChatTemplateError("the chat template formats with a width that is too large")


def _set_line_numbers(node: nodes.Node, line: int) -> None:
    """Give the inserted nodes the line of the node around them."""
    if getattr(node, "lineno", None) is None:
        node.lineno = line
    for child in node.iter_child_nodes():
        _set_line_numbers(child, node.lineno)


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
