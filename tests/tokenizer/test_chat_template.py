# ruff: noqa: E501 - a template on one line is easier to read than one in pieces
from __future__ import annotations

import contextlib
import time

import pytest
from treadle_server.errors import ChatTemplateError, InvalidRequestError
from treadle_server.tokenizer import ChatTemplate
from treadle_server.tokenizer.limits import Limits

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " 猫 <b> & 'x' "}
MODEL = {"role": "assistant", "content": "Yes."}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' and not message.content %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}"""
HEADERS = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "[system]\\n" ~ ns.system }}
{%- for message in messages %}
    {%- if tools is not none %}{{ raise_exception('no tools') }}{% endif %}
    {{- "[" + message['role'] + "]\\n" + message.content | trim }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "[assistant]\\n" }}{% endif %}"""
TURNS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/...') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
INSTRUCTIONS = """\
{{ bos_token }}{% macro turn(text) %}[INST] {{ text.strip() }} [/INST]{% endmacro %}
{% for message in messages %}{% if message.role == 'user' %}{{ turn(message.content) }}
{%- elif message.role == 'assistant' %}
{% generation %}{{ ' ' ~ message.content ~ eos_token }}{% endgeneration %}
{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (
            CHATML,
            [USER],
            "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\n猫 <b> & 'x'<|im_end|>\n<|im_start|>assistant\n",
        ),
        (HEADERS, [SYSTEM, USER], "<s>[system]\nBe brief.[user]\n猫 <b> & 'x'[assistant]\n"),
        (
            TURNS,
            [USER, MODEL],
            "<s><start_of_turn>user\n猫 <b> & 'x'<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n<start_of_turn>model\n",
        ),
        (INSTRUCTIONS, [USER, MODEL, USER], "<s>[INST] 猫 <b> & 'x' [/INST] Yes.</s>[INST] 猫 <b> & 'x' [/INST]"),
    ],
    ids=["chatml", "headers", "turns", "instructions"],
)
def test_templates_as_in_the_wild(source: str, messages: list[dict[str, str]], expected: str) -> None:
    """Templates in the shapes of well-known models give their models' text; nothing is escaped for HTML."""
    assert ChatTemplate(source, TOKENS).render(messages) == expected


def render(source: str, *messages: dict[str, str]) -> str:
    """What a template makes of some messages, of one of the user's by default."""
    return ChatTemplate(source, TOKENS).render(list(messages) or [USER])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': ['猫', '<', none]} | tojson }}", '{"a": ["猫", "<", null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ messages | map(attribute='role') | join(', ') | upper }}", "USER"),
        ("{{ (messages | selectattr('role', 'equalto', 'user') | list | length) ~ messages[-1]['role'][::-1] }}", "1resu"),
        ("{{ 'a,b'.split(',')[-1] + '%s' % 1 + '{:>3}'.format(2) + '%02d' | format(3) }}", "b1  203"),
        ("{{ '<think>x</think>y'.split('</think>')[-1].lstrip('\\n').replace('y', 'z') }}", "z"),
        ("{{ 'user' in messages[0].values() and 'x' not in messages[0] and 1 < 2 <= 2 }}", "True"),
        ("{% for k, v in messages[0] | dictsort %}{{ loop.index }}{{ k }}{% endfor %}", "1content2role"),
        ("{{ [1, 2] + [3] }}{{ 2 * 3 }}{{ '-' * 3 }}{{ [3, 1] | sum }}{{ {'a': 1}.items() | list }}", "[1, 2, 3]6---4[('a', 1)]"),
        ("{{ messages[0].nothing is defined }}{{ nothing }}{{ tools is none }}", "FalseTrue"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
        ("{{ 'a\nb' | indent(2) }}{{ 'ab' | first }}{{ 2.55 | round(1) }}{{ '' | default('d', true) }}", "a\n  ba2.5d"),
        ("{% macro m(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call m(1) %}2{% endcall %}", "12"),
        ("{{ cycler('a', 'b').next() }}{{ dict(a=1).a }}", "a1"),
    ],
)  # fmt: skip
def test_helpers_that_templates_use(source: str, expected: str) -> None:
    """Filters, methods, operators, blocks and functions found in chat templates work as in transformers."""
    assert render(source) == expected


def test_the_generation_prompt_is_optional() -> None:
    """add_generation_prompt reaches the template."""
    source = "{% if add_generation_prompt %}go{% endif %}"
    template = ChatTemplate(source)
    assert (template.render([USER]), template.render([USER], add_generation_prompt=False)) == ("go", "")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n\n{{ raise_exception('roles must alternate') }}", "line 3: roles must alternate"),
        ("a\n{% for %}", "line 2: Expected an expression"),
        ("a\n{{ messages[0].x.y }}", "line 2: .*has no attribute 'x'"),
        ("{% macro f() %}\n{{ 1 // 0 }}\n{% endmacro %}\n\n{{ f() }}", "line 2: integer division"),
        ("{{ 1 | nope }}", "line 1: No filter named 'nope'"),
        ("{% include 'other' %}", "no loader"),
        ("{{ [1].append(2) }}", "unsafe"),
    ],
)
def test_an_error_names_its_line(source: str, message: str) -> None:
    """Whatever a template raises becomes a ChatTemplateError with its message and line."""
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages: expected at least one"),
        ([USER, {"role": "user"}], r"messages\[1\]\.content: expected a string, got NoneType"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role: expected a string, got int"),
    ],
)
def test_messages_are_checked(messages: list[dict[str, str]], field: str) -> None:
    """A message that is not a role and a content is an error of the request that names the field."""
    with pytest.raises(InvalidRequestError, match=field):
        ChatTemplate("x").render(messages)


def test_messages_are_not_changed() -> None:
    """A template works on copies."""
    message = dict(USER)
    with pytest.raises(ChatTemplateError):
        render("{{ messages[0].update(a=1) }}", message)
    assert message == USER


# Twice the list before, sixty times: written out, hashed or compared, it would take for ever.
DOUBLED = (
    "{% set ns = namespace(x=[1], y=[1], t=(1,)) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
)
NESTED = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(5000) %}{% set ns.x = [ns.x] %}{% set ns.y = [ns.y] %}{% endfor %}"  # fmt: skip
LARGE = "{% set b = 'ab' * 500000 %}"
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}"
GREEDY_TEMPLATES = {
    "nested loops": FOREVER + "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) if a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "large range": "{% for a in range(10**9) %}{% endfor %}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching caller": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% macro g(n) %}{% call f() %}{% if n %}{{ g(n-1) }}{% endif %}{% endcall %}{% endmacro %}{{ g(60) }}",
    "endless block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "endless recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "long output": "{% for a in range(99999) %}" + "x" * 10000 + "{% endfor %}",
    "long macro": "{% macro f() %}{% for a in range(99999) %}" + "x" * 10000 + "{% endfor %}{% endmacro %}{% set q = f() %}",
    "long block": "{% set q %}" + FOREVER + "x" * 10000 + "{% endfor %}{% endfor %}{% endset %}",
    "product": "{{ 'a' * 10**9 }}",
    "list product": "{{ 10**9 * [1] }}",
    "constant condition": "{% if 'a' * 10**9 %}{% endif %}",
    "compile-time constant": "{% autoescape ('a' * 10**9) %}{% endautoescape %}",
    "power": "{{ 9 ** (10 ** 10) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled by ~": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled by +": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "many texts": "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + ['a' * 100000] %}{% endfor %}",
    "many slices": LARGE + "{% for i in range(99999) %}{% set c = b[1:] %}{% endfor %}",
    "written out": DOUBLED + "{{ ns.x }}",
    "as JSON": DOUBLED + "{{ ns.x | tojson }}",
    "compared": DOUBLED + "{{ ns.x == ns.y }}",
    "changed": DOUBLED + "{% for z in [ns.x, ns.y] %}{{ loop.changed(z) }}{% endfor %}",
    "hashed": DOUBLED + "{% set d = {ns.t: 1} %}",
    "looked up": DOUBLED + "{{ {}[ns.t] }}",
    "got": DOUBLED + "{{ {}.get(ns.t) }}",
    "searched": DOUBLED + "{{ [ns.x] | select('equalto', ns.y) | list }}",
    "joined": DOUBLED + "{{ [ns.x] | join }}",
    "formatted": DOUBLED + "{{ '%s' % [ns.x] }}",
    "raised": DOUBLED + "{{ raise_exception(ns.x) }}",
    "namespace written out": "{% set a = namespace() %}{% set a.x = a %}{{ a }}",
    "deep text": NESTED + "{{ ns.x }}",
    "deep comparison": NESTED + "{{ ns.x == ns.y }}",
    "deep JSON": NESTED + "{{ ns.x | tojson }}",
    "indented JSON": "{% set ns = namespace(x=[1] * 9999) %}{% for i in range(500) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=60) }}",
    "wide JSON": "{{ [1] | tojson(indent=10**9) }}",
    "wide method": "{{ 'a'.center(10**9) }}",
    "wide filter": "{{ 'a' | center(10**9) }}",
    "wide indent": "{{ 'a\n' | indent(10**9) }}",
    "wide %": "{{ '%1000000000d' % 1 }}",
    "wide named %": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "wide by argument": "{{ '%*d' % (10**9, 1) }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "wide nested format": "{{ '{:{}}'.format(1, 10**9) }}",
    "wide format filter": "{{ '%1000000000d' | format(1) }}",
    "wide time": "{{ strftime_now('%1000000000Y') }}",
    "replaced": LARGE + "{{ b.replace('a', b) }}",
    "replaced nothing": LARGE + "{{ b.replace('', b) }}",
    "replaced by filter": LARGE + "{{ b | replace('a', b) }}",
    "joined by text": LARGE + "{{ b.join(b) }}",
    "joined by filter": LARGE + "{{ range(9999) | join(b) }}",
    "mapped": LARGE + "{{ range(99999) | map('replace', '1', b) | join }}",
    "list sum": "{{ [[1]] * 9999 | sum(start=[]) }}",
    "integer bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "rounded": "{{ 1.5 | round(10**9, 'ceil') }}",
    "many comparisons": LARGE + "{% set c = b ~ '' %}" + "{{ b == c }}" * 4000 + FOREVER + "{% endfor %}{% endfor %}",
    "many sorts": "{% set b = 'ba' * 50000 %}{% for i in range(99999) %}{% set c = b | list | sort %}{% endfor %}",
    "parentheses": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "negations": "{{ " + "not " * 9000 + "1 }}",
    "conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "long source": "x" * 70000,
}  # fmt: skip


@pytest.mark.parametrize("source", GREEDY_TEMPLATES.values(), ids=GREEDY_TEMPLATES.keys())
def test_a_greedy_template_ends_soon(source: str) -> None:
    """A template that would run for ever or fill the memory fails little later than its time is over."""
    start_s = time.thread_time()
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, limits=Limits(cpu_s=0.1)).render([USER])
    assert time.thread_time() - start_s < 2


def test_the_limits_hold_by_default() -> None:
    """Without limits of its own a template gets those of the server: a second of CPU time."""
    start_s = time.thread_time()
    with pytest.raises(ChatTemplateError, match="more than 1 s"):
        render(GREEDY_TEMPLATES["nested loops"])
    assert time.thread_time() - start_s < 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ [].__class__.mro() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ namespace.__init__.__globals__.x }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ self._TemplateReference__context.environment }}",
        "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ [''] | map(attribute='__class__.__mro__') | list }}",
        "{{ '' | attr('__class__') }}",
        "{% for x in [1] %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
        "{{ dict.fromkeys.__self__.x }}",
        "{% import 'os' as os %}",
    ],
)
def test_the_sandbox_has_no_way_out(source: str) -> None:
    """No template reaches Python's internals: it fails, or what it asks for is undefined and writes nothing."""
    with contextlib.suppress(ChatTemplateError):
        assert render(source) == ""


def test_a_long_chat_is_no_attack() -> None:
    """A thousand messages through a template that looks at all of them in every turn stay within the limits."""
    messages = [{"role": role, "content": "word " * 100} for role in ("user", "assistant")] * 500
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index0 == messages | length - 1 %}last{% endif %}"
        "{% set ns.n = ns.n + 1 %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + '\\n' }}{% endfor %}{{ ns.n }}"
    )
    assert render(source, *messages).endswith("1000")


def test_a_long_message_is_no_attack() -> None:
    """A message of a million characters passes through what templates do with messages."""
    source = (
        "{% set c = messages[0].content %}{{ c | length }}{{ (c | default('')) == c }}{{ 'x' in c }}{{ c[:2] }}"
        "{{ c.split('x') | length }}{{ (c | trim).strip() | upper | first }}{{ '<|user|>' + c + '\\n' }}"
    )
    message = {"role": "user", "content": "word " * 200_000}
    assert render(source, message).startswith("1000000TrueFalsewo1W<|user|>word")
