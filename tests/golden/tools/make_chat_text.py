"""Makes tests/golden/chat/text.json: conversations as JSON text, and what transformers' chat templates write of them.

    python make_chat_text.py ../chat/text.json        (needs transformers >= 5.23 and jinja2 >= 3.1.6)

The templates write values as those of Qwen3, Llama 3, Mistral and gpt-oss do; `plain` writes every value as it is. Numbers are spelled
in ways that Python and JavaScript write differently.
"""
import json
import sys

from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = {
    "qwen3": """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n' + (m.reasoning_content if m.reasoning_content is string else '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' }}{{ call.function.name }}{{ '", "arguments": ' }}
        {%- if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "llama-3": """{{- bos_token }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
        {{- m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{ m.content | tojson }}{{ '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "mistral": """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and loop.first %}[AVAILABLE_TOOLS][{% for t in tools %}{{ t | tojson }}{{ ', ' if not loop.last }}{% endfor %}][/AVAILABLE_TOOLS]{% endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS][
        {%- for call in m.tool_calls %}{% set out = call.function | tojson %}{{ out[:-1] }}{{ ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}]
        {{- eos_token }}
    {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]{"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
    {%- else %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}""",
    "gpt-oss": """{%- for m in messages %}
    {%- if m.role == 'assistant' and 'tool_calls' in m %}
        {%- set later = namespace(final=false) %}
        {%- for n in messages[loop.index:] %}{% if n.role == 'assistant' and 'tool_calls' not in n %}{% set later.final = true %}{% endif %}{% endfor %}
        {%- if 'content' in m and '<|channel|>' in m.content %}{{ raise_exception('channels') }}{% endif %}
        {%- if m.thinking and not later.final %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
        {{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}
    {%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
        {%- if 'thinking' in m %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}{{ '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
    {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    "plain": """{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% if m.tool_calls %}{% for k, v in m.tool_calls[0].function.arguments | items %}{{ k }}={{ v }};{{ v ~ '|' ~ v | string }};{{ [v, v] | join('/') }}
{% endfor %}{{ m.tool_calls[0].function.arguments | tojson(sort_keys=true, separators=(',', ':')) }}{{ m.tool_calls[0].function.arguments | tojson(ensure_ascii=true, indent=2) }}
{% endif %}{% endfor %}""",
}

CALL = '{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": %s}}'
NUMBERS = (
    '{"i": 2, "f": 2.0, "e": 1e5, "E": 15E-1, "big": 12345678901234567890, "neg": -0.0, "zero": -0, "small": 1e-5, "less": 0.0001, '
    '"huge": 1e16, "most": 123456789012345680.0, "long": 0.1000000000000000055, "over": 1e400, "nan": NaN, '
    '"u": "Zürich — 東京 \\"q\\" \'p\' \\t\\u007f", "a\'b": "it\'s", "b": [true, false, null], "deep": {"l": [1.0, [2.50, {"k": -3.00e0}]], "o": {}, "e": []}}'
)
TOOLS = (
    '[{"type": "function", "function": {"name": "f", "description": "D — d.", "parameters": {"type": "object", "properties": '
    '{"i": {"type": "number", "default": 2.0, "maximum": 1e21, "enum": [1, 2.0]}}, "required": []}}}]'
)
ROUND = '{"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "{\\"rain\\": 2.0}"}, {"role": "assistant", "content": "It rains."%s}'
CONVERSATIONS = {
    "numbers": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [%s]}], "tools": %s}'
    % (CALL % NUMBERS, TOOLS),
    "text": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [%s]}, %s, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}'
    % (CALL % '"{\\"x\\": 2.0}"', ROUND % ""),
    "absent": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "thinking": "Call.", "tool_calls": [%s]}, %s]}'
    % (CALL % '{"x": 2.0}', ROUND % ', "thinking": "So."'),
    **{
        name: '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "four", "%s": "Two and two."}, '
        '{"role": "user", "content": "b"}, {"role": "assistant", "content": "five", "%s": "Four\\nand one."}]}' % (name, name)
        for name in ("reasoning_content", "thinking", "reasoning")
    },
}


def main(path):
    cases = []
    for template, text in TEMPLATES.items():
        for conversation, source in CONVERSATIONS.items():
            record = json.loads(source)
            try:
                (written,), _ = render_jinja_template(
                    [record["messages"]], tools=record.get("tools"), chat_template=text, bos_token="<s>", eos_token="</s>")
            except Exception as error:
                print(f"{template} refuses {conversation}: {error}")
                continue
            cases.append({"template": template, "conversation": conversation, "written": written})
    with open(path, "w") as file:
        json.dump({"templates": TEMPLATES, "conversations": CONVERSATIONS, "cases": cases}, file, ensure_ascii=False, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
