"""Chat templates that would run for ever, fill the memory or reach Python: refused, fast and small."""

from __future__ import annotations

import tracemalloc

import pytest
from cpu_time import cpu_time

from jaxinfer.text import ByteTokenizer, ChatTemplate, ChatTemplateError

BYTES = ByteTokenizer()
USER = [{"role": "user", "content": "x"}]
GROWING = "{% set n = namespace(x=(), d={}) %}{% for i in range(99999) %}"


def refused(template: str, seconds: float, megabytes: float) -> str:
    """Why it is refused; within this time and memory."""
    tracemalloc.start()
    try:
        with cpu_time() as spent, pytest.raises(ChatTemplateError) as caught:
            ChatTemplate(template).render(USER, BYTES)
        took, peak = spent(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    assert took < seconds, f"took {took:.1f} s"
    assert peak < megabytes * 1e6, f"took {peak / 1e6:.0f} MB"
    return message


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**12) %}x{% endfor %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(999999999, 0, -1) %}x{% endfor %}",
    ],
)
def test_a_loop_over_a_huge_range(template: str) -> None:
    assert "too large" in refused(template, 2, 8)


def test_loops_in_loops_end_with_the_time_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxinfer.text.chat_sandbox.MAX_SECONDS", 0.5)
    loop = "{% for i in range(99999) %}"
    assert "0.5 seconds" in refused(loop * 3 + "{% endfor %}" * 3, 3, 8)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses too deeply"),
        ("{% block a %}{{ self.a() }}{% endblock %}", "recurses too deeply"),
        ("{% macro f(x) %}{{ g(x) }}{% endmacro %}{% macro g(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", ""),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
        ("{{ " + "not " * 5000 + "1 }}", "nested too deeply"),
        ("{% if 1 %}" * 120 + "{% endif %}" * 120, "nested too deeply"),
        ("{% for i in [1] %}" * 25 + "{% endfor %}" * 25, "nested too deeply"),
    ],
)
def test_recursion(template: str, told: str) -> None:
    assert told in refused(template, 4, 32)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 'x' * 10**10 }}", "too large"),
        ("{{ 10**10 * 'x' }}", "too large"),
        ("{{ [0] * 10**10 }}", "too large"),
        ("{{ (range(99999) | list * 600) | length }}", "too large"),
        ("{{ 9 ** (9 ** 9) }}", "bits"),
        ("{{ " + "9" * 100000 + " }}", "cannot be compiled"),
        ("{{ 'x'.zfill(10**10) }}", "too large"),
        ("{{ '%999999999s' % 'x' }}", "width"),
    ],
)
def test_multiplication(template: str, told: str) -> None:
    assert told in refused(template, 2, 48)


@pytest.mark.parametrize(
    "template",
    [
        GROWING + "{% set n.d = dict(n.d, **{'a' ~ i: n.d}) %}{% endfor %}",
        GROWING + "{% set n.x = (n.x, range(i) | list) %}{% endfor %}",
        GROWING + "{% set n.x = n.x + n.x + (1,) %}{% endfor %}",
    ],
)
def test_containers_that_grow(template: str) -> None:
    assert "characters" in refused(template, 4, 200)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ messages.__init__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ (messages | list).__getattribute__ }}",
    ],
)
def test_an_attribute_that_leads_out(template: str) -> None:
    assert "unsafe" in refused(template, 2, 8)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ lipsum(10**7) }}", "'lipsum' is undefined"),
        ("{% include '/etc/passwd' %}", "failed"),
        ("{% import 'os' as os %}{{ os }}", "failed"),
        ("{{ 1 }}" * 100_000, "700000 characters; at most 250000"),
    ],
)
def test_what_templates_have_no_use_for(template: str, told: str) -> None:
    assert told in refused(template, 2, 8)


def test_a_chat_of_many_messages_is_no_bomb() -> None:
    template = (
        "{% set turns = messages | selectattr('role', 'ne', 'system') | list %}"
        "{% for m in turns %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}{{ turns[-1] | tojson }}"
    )
    chat = [{"role": "user", "content": "hello " * 50}] * 20_000
    assert ChatTemplate(template).render_text(chat).count("user: ") == 20_000
