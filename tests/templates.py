"""Chat templates of six families, written for the tests: what each does to its messages is what
its model's own does."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Trims, and writes the date.
LLAMA3 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Today: {{ strftime_now('%d %b %Y') }}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Drops the thinking of answers before the last user turn; renders tools, calls and results.
QWEN3 = """\
{%- if tools %}<|im_start|>system
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}
{%- set thinking = m.reasoning_content or '' %}
{%- if not thinking and '</think>' in content %}
{%- set thinking = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and thinking %}
{{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
# No newline anywhere; what precedes </think> is dropped from every answer that is not the last.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% else %}<｜Assistant｜>"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
# Raises unless user and assistant take turns; a system turn goes into the first user turn.
MISTRAL = """\
{{- bos_token }}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if system else messages) %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
{%- elif m.role == 'user' %}
{{- '[INST] ' + (system if loop.first else '') + m.content + '[/INST]' }}
{%- else %}{{- ' ' + m.content + eos_token }}
{%- endif %}
{%- endfor %}"""
# Takes no system turn, trims, and ends turns with a token that is not the tokenizer's eos.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# As templates are written for training: what the assistant wrote stands between tags.
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Ends the conversation with a token beside the turn's own that begins like a header.
PHI3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
)
# Headers of plain text, whose last blank is a part of the answer's first token.
VICUNA = (
    "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
# Renders the system turn only where the user's turn is the last.
MISTRAL_V3 = """\
{{- bos_token }}
{%- set talk = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in talk %}
{%- set system = messages[0].content + '\n\n' if loop.last and talk != messages else '' %}
{%- if m.role == 'user' %}{{- '[INST] ' + system + m.content + '[/INST]' }}
{%- else %}{{- ' ' + m.content + eos_token }}
{%- endif %}
{%- endfor %}"""

# Ends no turn: the verifier stops by writing the header of the next.
GLM4 = (
    "[gMASK]<sop>{% for m in messages %}"
    "<|{{ 'observation' if m['role'] == 'tool' else m['role'] }}|>\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function']['name'] }}\n"
    "{{ c['function']['arguments'] | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM4_WORDS = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|endoftext|>",
)  # fmt: skip
# Writes thinking, empty or not, into the last answer only; with and without tags.
QWEN3_TAGGED = """\
{%- for m in messages %}
{%- set content = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set thinking = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set thinking = thinking if '</think>' in m.content else '' %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}
{%- if loop.last %}{{- '<think>\n' + thinking + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- endgeneration %}
{%- else %}{{- content }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
QWEN3_EMPTY = QWEN3_TAGGED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
# Ends the last answer with a token of its own, as that of gpt-oss does.
HARMONY = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}"
    "{{ '<|return|>' if m['role'] == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)
# Writes a call's id, which holds the function's name, in its place.
KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% set role = 'system' if m['role'] == 'tool' else m['role'] %}"
    "<|im_{{ role }}|>{{ m['role'] }}<|im_middle|>"
    "{% if m['role'] == 'tool' %}## Return of {{ m['tool_call_id'] }}\n{% endif %}"
    "{{ m['content'] }}{% if m['tool_calls'] %}<|calls_begin|>"
    "{% for c in m['tool_calls'] %}<|call_begin|>{{ c['id'] }}"
    "<|argument_begin|>{{ c['function']['arguments'] | tojson }}<|call_end|>"
    "{% endfor %}<|calls_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
KIMI_K2_WORDS = (
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|calls_begin|>",
    "<|call_begin|>", "<|argument_begin|>", "<|call_end|>", "<|calls_end|>", "<|im_end|>",
)  # fmt: skip

IM = ("<|im_start|>", "<|im_end|>")
# name: (template, control tokens, bos, eos, end of turn, does it trim)
FAMILIES = {
    "chatml": (CHATML, IM, "<|im_start|>", "<|im_end|>", "<|im_end|>", False),
    "llama3": (
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|eot_id|>",
        True,
    ),
    "qwen3": (QWEN3, IM, "<|im_start|>", "<|im_end|>", "<|im_end|>", False),
    "deepseek": (
        DEEPSEEK,
        ("<bos>", "<｜User｜>", "<｜Assistant｜>", "<｜end｜>"),
        "<bos>",
        "<｜end｜>",
        "<｜end｜>",
        False,
    ),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>", "</s>", False),
    "gemma": (
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<bos>",
        "<eos>",
        "<end_of_turn>",
        True,
    ),
}
