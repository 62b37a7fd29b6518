"""Messages as the verifier's own tokens, and which of them the verifier would have written."""

import bisect
import datetime
import functools
import hashlib
import itertools
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from eyrie.conversations import Reject
from eyrie.files import read_json
from eyrie.verifier import end_tokens

# This and what follows stand for control tokens in a message's text while it is rendered.
PRIVATE = 0xF0000
# What an answer itself holds, although templates write it, too.
THINKING = ("<think>", "</think>")
# A text to find again.
PROBE = "qzqz"
# A call to find again; ids of nine letters are what the strictest template takes.
PROBE_CALL = {"id": "qzqzqzqzq", "type": "function", "function": {"name": PROBE, "arguments": {}}}


@dataclass
class Rendered:
    """A conversation as text. `spans` are what the assistant wrote, end-of-turn token and what
    the template adds behind it included; `messages` are the numbers of the messages they are of.
    `lost` are the answers, counted from 0, that the template does not repeat as they were
    written."""

    text: str
    spans: list[tuple[int, int]]
    messages: list[int]
    lost: list[int]


@dataclass
class Row:
    """A row's tokens and loss mask.

    lost: answers, counted from 0, that are context only here. turns: of a prompt, the messages and
    tools of all that the verifier is to answer, where that is more than one user turn.
    """

    ids: list[int]
    mask: list[bool]
    lost: list[int] = field(default_factory=list)
    truncated: bool = False
    control: bool = False
    turns: dict | None = None


def load_tokenizer(folder: Path, trust_remote_code: bool):
    """The verifier's tokenizer.

    Raises:
        ValueError: there is none in the folder, or it has no chat template.
    """
    # transformers would take the name for one of the Hub.
    if not os.path.isdir(folder):
        raise ValueError(f"{folder}: no such folder; name the verifier's")
    # Texts come one at a time: handing each to another thread takes longer than it saves.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # of every kind, and few name the file
        raise ValueError(
            f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {error}). Look at "
            "tokenizer.json and tokenizer_config.json there, or fetch the verifier again"
        ) from error
    if not tokenizer.chat_template:
        raise ValueError(
            f"{folder}: the tokenizer has no chat template, so conversations cannot be rendered. "
            "Take the -Instruct or -Chat model, or name a Jinja file in verifier.chat_template"
        )
    return tokenizer


def stop_tokens(tokenizer) -> set[int]:
    """Tokens at which an answer ends where vLLM serves the verifier: the tokenizer's EOS and those
    of generation_config.json or, where there is none, of config.json."""
    folder = Path(tokenizer.name_or_path)
    files = [folder / name for name in ("generation_config.json", "config.json")]
    config = next((read_json(path) for path in files if path.is_file()), {})
    ends = end_tokens(config, config.get("text_config") or {})
    return {tokenizer.eos_token_id, *ends} - {None}


class Chat:
    """A chat template and its tokenizer.

    date: what a template that writes today's date is told, so that data do not differ from day
    to day. system: what becomes of system turns where the template takes none: `merge` puts them
    before the first user turn, `drop` leaves them out, `reject` rejects the row. options: more
    variables for the template.
    """

    def __init__(
        self,
        tokenizer,
        date: str = "2026-01-01",
        system: str = "merge",
        options: dict | None = None,
    ):
        self.tokenizer, self.date, self.system = tokenizer, date, system
        self.extra = options or {}
        day = datetime.date.fromisoformat(date)
        self.options = {
            "strftime_now": day.strftime,
            "date_string": day.strftime("%d %b %Y"),
            **self.extra,
        }
        # No text of n tokens has more characters than n of these.
        self.longest = max(map(len, tokenizer.get_vocab()))
        self.encoded: tuple = ("", [], np.zeros(0, np.int64))
        self.widths = None
        if tokenizer.is_fast:
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
            self.widths = byte_widths(tokenizer)
        self.stops = stop_tokens(tokenizer)
        template = tokenizer.get_chat_template()
        self.tags = bool(re.search(r"\{%-?\s*generation\b", template))
        self.control = self.stand_in = re.compile("(?!)")
        self.stand_ins: dict[str, str] = {}
        self._find_control_tokens()
        self.takes_system = self._takes_system()

    def _find_control_tokens(self) -> None:
        """Tokens that no message may write: those marked special, whether or not the tokenizer
        names a use for them, and those that the template puts around a turn, special or not."""
        added = {token.content: token for token in self.tokenizer.added_tokens_decoder.values()}
        probe = [("user", "hi"), ("assistant", PROBE), ("user", "hi")]
        try:
            turns = self.render([{"role": r, "content": t} for r, t in probe], prompt=False)
        except Reject:
            turns = ""
        words = {*self.tokenizer.all_special_tokens, *(t for t in added if added[t].special)}
        words |= {t for t in added if t in turns and t not in THINKING}
        # Some tokenizers list blanks.
        words = sorted((w for w in words if len(w.strip()) > 1), key=lambda w: (-len(w), w))
        self.special = {*self.tokenizer.all_special_ids}
        self.special |= {*self.tokenizer.convert_tokens_to_ids(words)}
        self.control = re.compile("|".join(map(re.escape, words)) or "(?!)")
        end = self.control.search(turns.partition(PROBE)[2])
        self.end_word = end[0] if end else None
        self.turn_end = self.tokenizer.convert_tokens_to_ids(end[0]) if end else None
        # Written by the template some take the blanks beside them along.
        strips = {t: (added[t].lstrip * r"\s*", added[t].rstrip * r"\s*") for t in added}
        forms = [strips[w][0] + re.escape(w) + strips[w][1] for w in words if w in strips]
        self.written = re.compile("|".join(forms) or "(?!)")
        self.stand_ins = {word: chr(PRIVATE + 1 + i) for i, word in enumerate(words)}
        self.stood_for = {char: word for word, char in self.stand_ins.items()}
        self.stand_in = re.compile(f"[{chr(PRIVATE)}-{chr(PRIVATE + len(words))}]")
        # Some tokenizers put a blank before a text. Where one that is encoded in pieces gets none,
        # behind a control token or within plain text, this goes before the piece.
        self.lead_behind_control = self.lead_within_text = ""
        alone = self.ids("hi")
        if words and self.ids(words[0] + "hi")[1:] != alone:
            self.lead_behind_control = chr(PRIVATE)
        if self.ids(chr(PRIVATE) + "hi")[len(self.ids(chr(PRIVATE))) :] != alone:
            self.lead_within_text = chr(PRIVATE)

    def ids(self, text: str, **options) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **options).input_ids

    def identity(self) -> str:
        """A hash of all that turns messages into ids: tokenizer, template and its options."""
        tokens = sorted(self.tokenizer.get_vocab().items())
        if self.tokenizer.is_fast:  # merges and normalizer, too
            tokens = self.tokenizer.backend_tokenizer.to_str()
        text = json.dumps([tokens, self.tokenizer.chat_template, self.settings()])
        return hashlib.sha256(text.encode()).hexdigest()

    def settings(self) -> dict:
        """The arguments beside the tokenizer, from which another process makes the same Chat."""
        return {"date": self.date, "system": self.system, "options": self.extra}

    def _takes_system(self) -> bool:
        """Whether a system turn is rendered, in a prompt and in the conversation it becomes."""
        system, user = {"role": "system", "content": PROBE}, {"role": "user", "content": "hi"}
        answer = {"role": "assistant", "content": "hi"}
        try:
            prompt, talk = (
                self.render([system, user]),
                self.render([system, user, answer], None, False),
            )
        except Reject:
            return False
        return PROBE in prompt and PROBE in talk

    def render(self, messages: list[dict], tools=None, prompt: bool = True) -> str:
        """Raises Reject with the template's own words where it refuses the conversation."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self.options
            )
        except Exception as error:  # templates raise whatever Jinja and Python do
            words = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise Reject(f"the chat template refuses it: {words}") from error

    def prepared(self, messages: list[dict], tools) -> tuple[list[dict], list | None, bool]:
        """Messages and tools fit for the template: control tokens in their text replaced by
        stand-ins, system turns moved where it takes none. Also whether there were any control
        tokens."""
        found = False

        def safe(value):
            nonlocal found
            if isinstance(value, str):
                if self.stand_in.search(value):
                    raise Reject("private-use characters in the text")
                text = self.control.sub(lambda match: self.stand_ins[match[0]], value)
                found |= text != value
                return text
            if isinstance(value, list):
                return [safe(item) for item in value]
            if isinstance(value, dict):
                return {safe(key): safe(item) for key, item in value.items()}
            return value

        messages, tools = [safe(message) for message in messages], safe(tools)
        if not self.takes_system and any(m["role"] == "system" for m in messages):
            if self.system == "reject":
                raise Reject("the chat template takes no system turn")
            said = [m["content"] for m in messages if m["role"] == "system"]
            messages = [m for m in messages if m["role"] != "system"]
            first = next((m for m in messages if m["role"] == "user"), None)
            if self.system == "merge" and first:
                first["content"] = "\n\n".join([*said, first["content"]])
        return messages, tools, found

    def rendered(self, messages: list[dict], tools, beginning, wanted=None) -> Rendered:
        """A whole conversation and what the assistant wrote in it, or of that the answers `wanted`.

        beginning(n, prompt) renders its first n messages, and with `prompt` what precedes an
        answer to them.

        A turn is what rendering it adds to the prompt for it, if the whole rendering repeats
        that to its end. A template that drops the thinking of earlier turns loses them: they are
        context.

        Raises:
            Reject: the template refuses or leaves out a turn, or repeats no answer that is wanted.
        """
        text = beginning(len(messages))
        self.check_present(messages, tools, text, False)
        self.check_calls(messages, tools, beginning)
        if messages[-1].get("reasoning_content", "").strip() not in text:
            raise Reject("the chat template leaves out the reasoning")
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        tagged = self.tagged(messages, tools) if self.tags else [(0, 0)] * len(answers)
        if len(tagged) != len(answers):
            raise Reject("the chat template tags more or fewer answers than there are")
        spans, repeated, lost = [], [], []
        for number, (i, (start, end)) in enumerate(zip(answers, tagged, strict=True)):
            if wanted is not None and number not in wanted:
                continue
            after = beginning(i + 1)
            same = len(after)
            if not text.startswith(after):
                same = len(os.path.commonprefix([after, text]))  # noqa: RUF071, of text it is right
            if self.tags:
                # An end-of-turn token may stand right behind the tag.
                ended = self.control.match(after, end)
                end = ended.end() if ended else end
                is_whole = end <= same
            else:
                before = beginning(i, prompt=True)
                # Templates trim an answer, so it need not begin where it does in the message.
                start, end = len(before), same
                span = text[start:end]
                ended = same >= len(after.rstrip()) or (self.end_word and self.end_word in span)
                calls = [call["function"]["name"] for call in messages[i].get("tool_calls", [])]
                is_whole = ended and all(w in span for w in (wrote(messages[i]), *calls))
                is_whole = is_whole and text.startswith(before)
            if is_whole:
                spans.append((start, end))
                repeated.append(i)
            else:
                lost.append(number)
        if not spans:
            raise Reject("the chat template rewrites earlier turns")
        return Rendered(text, spans, repeated, lost)

    def check_present(self, messages: list[dict], tools, text: str, prompt: bool) -> None:
        """Raise Reject where a turn, a call or a tool is not in the rendering."""
        for message in messages:
            said = wrote(message)
            escaped = said.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            if said not in text and escaped not in text:
                raise Reject("the chat template leaves out a turn")
            for call in message.get("tool_calls", []):
                if call["function"]["name"] not in text:
                    raise Reject("the chat template leaves out a tool call")
        # A name may stand in another message, too.
        if tools and (
            not all(name_of(tool) in text for tool in tools)
            or self.render(messages, tools[:-1] or None, prompt) == text
        ):
            raise Reject("the chat template leaves out the tools")

    def check_calls(self, messages: list[dict], tools, beginning) -> None:
        """Raise Reject where the rendering is the same with another call or result in its place:
        the words of each may stand in another message, too."""
        for i, message in enumerate(messages):
            calls = message.get("tool_calls", [])
            others = [
                message | {"tool_calls": [*calls[:n], PROBE_CALL, *calls[n + 1 :]]}
                for n in range(len(calls))
            ]
            if message["role"] == "tool":
                others = [message | {"content": PROBE}]
            if any(
                self.render([*messages[:i], other], tools, False) == beginning(i + 1)
                for other in others
            ):
                raise Reject(f"the chat template leaves out a tool {'call' if calls else 'result'}")

    def tagged(self, messages: list[dict], tools) -> list[tuple[int, int]]:
        """What stands between {% generation %} tags."""
        from transformers.utils.chat_template_utils import render_jinja_template

        _, (spans,) = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
            **self.options,
        )
        return spans

    def encode(self, text: str, edges: list[int] = ()) -> tuple[list[int], np.ndarray]:
        """Tokens of a rendered text, and where each begins in it (int64 [n]).

        The template writes its own BOS, so the tokenizer must not add another. Stand-ins become
        what they stand for, as plain text. A text with stand-ins, one of which a token lies across
        an edge, and all texts where the tokenizer tells no offsets, are encoded piece by piece
        between `edges` and control tokens.
        """
        if self.tokenizer.is_fast and not self.stand_in.search(text):
            ids, starts = self.encode_whole(text)
            if {*edges} <= {len(text), *starts[np.searchsorted(starts[:-1], edges)].tolist()}:
                return ids, starts
        cuts = {0, len(text), *edges}
        for match in self.written.finditer(text):
            cuts |= set(match.span())
            # A turn's end is found where renderings differ, and control tokens may begin alike.
            cuts -= set(range(match.start() + 1, match.end()))
        cuts = sorted(cuts)
        ids, starts, lead = [], [], ""
        for start, end in itertools.pairwise(cuts):
            piece = text[start:end]
            if self.control.fullmatch(piece.strip()):
                found = [self.tokenizer.convert_tokens_to_ids(piece.strip())]
                lead = self.lead_behind_control
            else:
                piece = self.stand_in.sub(lambda match: self.stood_for[match[0]], piece)
                found = self.plain(piece, lead)
                lead = self.lead_within_text
            ids += found
            starts += [start] * len(found)
        return ids, np.array(starts, np.int64)

    def encode_whole(self, text: str) -> tuple[list[int], np.ndarray]:
        """As `encode`, of a text that the tokenizer itself can take."""
        # A row is asked for twice: how much of it fits, and for the mask of that. Text before a
        # control token is tokenised by itself, so the first answer holds the second.
        known, ids, starts = self.encoded
        if known == text:
            return ids, starts
        if known.startswith(text):
            end = int(np.searchsorted(starts, len(text)))
            if end < len(ids) and starts[end] == len(text) and ids[end] in self.special:
                return ids[:end], starts[:end]
        # The tokenizer beneath transformers' own, in two thirds of the time.
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = False
        if self.widths is not None:
            (found,) = backend.encode_batch_fast([text], add_special_tokens=False)
            starts = self.starts_by_width(text, found.ids)
        if self.widths is None or starts is None:
            found = backend.encode(text, add_special_tokens=False)
            starts = np.array([start for start, _ in found.offsets], np.int64)
        self.encoded = text, found.ids, starts
        return self.encoded[1:]

    def starts_by_width(self, text: str, ids: list[int]) -> np.ndarray | None:
        """Where each token begins in the text, by the bytes that the tokens before it stand for;
        None where they are not the text's bytes."""
        data = np.frombuffer(text.encode(), np.uint8)
        ends = self.widths[ids].cumsum()
        if len(ids) and ends[-1] != len(data):
            return None
        # A byte 10xxxxxx goes on with a character.
        character = ((data & 0xC0) != 0x80).cumsum() - 1
        return character[ends - self.widths[ids]]

    def plain(self, text: str, lead: str) -> list[int]:
        """Tokens of text in which nothing is a control token, as they are behind `lead`."""
        ids = self.ids(lead + text, split_special_tokens=True)
        ids = ids[len(self.ids(lead)) :] if lead else ids
        if self.special.isdisjoint(ids) or not self.control.search(text):
            return ids
        # Not every tokenizer splits them: one of custom code, or a token not marked special.
        halves = self.control.sub(lambda m: m[0][0] + chr(PRIVATE) + m[0][1:], text)
        first, *others = halves.split(chr(PRIVATE))
        found = [self.plain(part, self.lead_within_text) for part in others]
        return list(itertools.chain(self.plain(first, lead), *found))

    def prompt(self, messages: list[dict], tools=None) -> Row:
        """The tokens that a server would send to the verifier to answer `messages`."""
        messages, tools, control = self.prepared(messages, tools)
        text = self.render(messages, tools)
        self.check_present(messages, tools, text, True)
        ids, _ = self.encode(text)
        return Row(ids, [False] * len(ids), control=control)

    def rows(self, messages: list[dict], tools=None, max_length: int = 2**40) -> list[Row]:
        """A conversation's row as `answers` has it, and for answers that are lost in it, as the
        template renders them otherwise once others follow, rows that end with them.

        An answer is supervised in one row at most; the first row's `lost` are those in none.

        Raises:
            Reject: as `answers`.
        """
        ends = [i + 1 for i, m in enumerate(messages) if m["role"] == "assistant"]
        whole = self.answers(messages, tools, max_length)
        rows, left, whole.lost = [whole], whole.lost, []
        while left:
            try:
                row = self.answers(messages[: ends[left[-1]]], tools, max_length, left)
            except Reject:
                row = None
            if row is None or row.truncated or left[-1] in row.lost:
                whole.lost.insert(0, left.pop())
            else:
                rows.append(row)
                left = row.lost
        return rows

    def answers(
        self,
        messages: list[dict],
        tools=None,
        max_length: int = 2**40,
        wanted: list[int] | None = None,
    ) -> Row:
        """A conversation's tokens, the assistant's marked, cut to `max_length`. wanted: the
        answers to mark, counted from 0; all of them if not given.

        Whole turns are kept from the front; where not even the first answer fits, it is cut.

        Raises:
            Reject: as `rendered`; or no answer, or none that begins within `max_length`.
        """
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        if last < 0:
            raise Reject("no answer")
        # What cannot fit need not be tokenised: a message may have megabytes.
        room = max_length * self.longest
        messages = [
            {k: v[:room] if isinstance(v, str) else v for k, v in message.items()}
            for message in messages[: last + 1]
        ]
        messages, tools, control = self.prepared(messages, tools)
        ends = [i + 1 for i, m in enumerate(messages) if m["role"] == "assistant"]

        @functools.cache
        def beginning(end: int, prompt: bool = False) -> str:
            return self.render(messages[:end], tools, prompt)

        fit = self.answers_that_fit(beginning, ends, max_length)
        kept = messages[: ends[max(fit, 1) - 1]]
        row = self.masked(self.rendered(kept, tools, beginning, wanted), kept)
        row.truncated, row.control = fit < len(ends), control
        row.ids, row.mask = row.ids[:max_length], row.mask[:max_length]
        return row

    def answers_that_fit(self, beginning, ends: list[int], max_length: int) -> int:
        """How many answers, whose messages end at `ends`, fit into `max_length` from the front.

        beginning(n) renders the first n messages. The text is tokenised once, and no more of it
        than is likely to be needed.
        """
        whole = beginning(ends[-1])
        likely = 5 * max_length
        # The last token may be cut, and then be many.
        head = whole[: likely + self.longest]
        starts = self.encode(head)[1]
        if np.searchsorted(starts, likely) <= max_length and len(head) < len(whole):
            head, starts = whole, self.encode(whole)[1]
        if len(starts) <= max_length:
            return len(ends)

        def length(end: int) -> int:
            # The blanks that a template writes behind the last answer may be cut.
            text = beginning(end).rstrip()
            if not whole.startswith(text):
                return len(self.encode(text)[0])
            return int(np.searchsorted(starts, len(text)))

        return bisect.bisect_right(ends, max_length, key=length)

    def masked(self, rendered: Rendered, messages: list[dict]) -> Row:
        """Tokens and mask of a rendered conversation: each answer to its end-of-turn token, which
        was not written where a limit cut the answer. What the template adds after that is not
        generated. Where answers have no such token of their own, it is the next turn's first, if
        the verifier stops at that."""
        ids, starts = self.encode(rendered.text, [edge for span in rendered.spans for edge in span])
        mask = [False] * len(ids)
        bounds = [*starts.tolist(), len(rendered.text)]

        def blank(token: int) -> bool:
            return not rendered.text[bounds[token] : bounds[token + 1]].strip()

        for (start, end), number in zip(rendered.spans, rendered.messages, strict=True):
            first, last = np.searchsorted(starts, [start, end]).tolist()
            # Byte-level tokenizers split a character into tokens of one offset; none straddles.
            while last > first and ids[last - 1] not in self.special and blank(last - 1):
                last -= 1
            # A template may end the whole conversation, too.
            end = last
            while end > first and (ids[end - 1] in self.special or blank(end - 1)):
                end -= 1
            if self.turn_end in ids[end:last]:
                last = ids.index(self.turn_end, end) + 1
            if messages[number].get("cut"):
                while last > first and ids[last - 1] in self.special:
                    last -= 1
            elif ids[last - 1] not in self.special and self.stops.intersection(
                ids[last : last + 1]
            ):
                last += 1
            mask[first:last] = [True] * (last - first)
        return Row(ids, mask, rendered.lost)

    def show(self, ids: list[int], mask: list[bool]) -> str:
        """The row as text, its supervised tokens between » and «."""
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        parts = []
        for start, end in itertools.pairwise(edges):
            text = self.tokenizer.decode(ids[start:end])
            parts.append(f"»{text}«" if mask[start] else text)
        return "".join(parts)


def byte_widths(tokenizer) -> np.ndarray | None:
    """How many bytes of text each token stands for, int64 [ids], of a byte-level tokenizer that
    changes no text; else None. Offsets follow from them in less time than the tokenizer takes."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    if (parts["decoder"] or {}).get("type") != "ByteLevel" or parts["normalizer"]:
        return None
    vocabulary = tokenizer.get_vocab()
    widths = np.zeros(max(vocabulary.values()) + 1, np.int64)
    # Each byte is written as one character.
    widths[[*vocabulary.values()]] = [len(token) for token in vocabulary]
    for number, token in tokenizer.added_tokens_decoder.items():
        widths[number] = len(token.content.encode())
    return widths


def wrote(message: dict) -> str:
    """What must be found of a message where it is rendered: its text, without the thinking that
    many templates move or drop."""
    return message["content"].rsplit("</think>", 1)[-1].strip()


def name_of(tool) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else tool
    return str(function.get("name", "")) if isinstance(function, dict) else str(function)
