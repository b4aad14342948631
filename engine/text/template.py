# SPDX-License-Identifier: Apache-2.0
"""Chat templates: messages to the text that a model was trained on, by the Jinja template from the
model file.

The template is a program from a stranger: it runs in Jinja's immutable sandbox with a short list of
filters, a limit for what it may make and a deadline. What users wrote never becomes a control
token: see `_Mask`.

A model without a template gets a plain form, a line a message and an open line for the answer:

    System: …
    User: …
    Assistant:
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

from engine.errors import BadModel, InvalidArgument

MAX_TEMPLATE = 64 << 10  # characters of a template: the longest that are in use have a third
MAX_OUTPUT = 4 << 20  # characters that a template may make, in sum and in each value on the way
MAX_RANGE = 10_000
SECONDS = 2.0
ROLES = ("system", "user", "assistant", "tool")
PLAIN_STOP = "\nUser:"

_FILTERS = (
    "abs batch capitalize count d default dictsort e escape first float groupby int items last"
    " length list lower map max min reject rejectattr reverse round safe select selectattr slice"
    " sort string sum title trim unique upper"
)
_STR_METHODS = (
    "capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper join"
    " lower lstrip replace rfind rsplit rstrip split splitlines startswith strip title upper"
    " removeprefix removesuffix"
)


class _TooMuch(Exception):
    """The template made too much or took too long."""


class _Refused(Exception):
    """The template called raise_exception."""


def check_messages(messages: Any) -> list[dict[str, str]]:
    """Messages of a request as a list of {role, content}.

    Raises:
        InvalidArgument
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("A chat needs at least one message.")
    checked = []
    for m in messages:
        if not isinstance(m, Mapping) or set(m) != {"role", "content"}:
            raise InvalidArgument("A message has a role and a content, and nothing else.")
        if m["role"] not in ROLES:
            raise InvalidArgument(f"A message's role is one of {', '.join(ROLES)}.")
        if not isinstance(m["content"], str):
            raise InvalidArgument("A message's content is a text.")
        checked.append({"role": str(m["role"]), "content": m["content"]})
    return checked


class ChatTemplate:
    """A model's template, or the plain form."""

    def __init__(self, source: str | None, bos: str, eos: str, specials: Sequence[str]) -> None:
        """`specials` are the texts of the control tokens."""
        self._source = source
        self._names = {"bos_token": bos, "eos_token": eos}
        self._marks = _Marks(specials)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings that the form needs: the plain one would go on with the user's next line."""
        return () if self._source else (PLAIN_STOP,)

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[tuple[str, bool]]:
        """The prompt in pieces (text, is a control token) whose texts follow each other.

        Raises:
            BadModel: the template is broken, makes too much or takes too long.
            InvalidArgument: the template refuses these messages.
        """
        if not self._source:
            lines = [f"{m['role'].capitalize()}: {m['content']}\n" for m in messages]
            return [("".join(lines) + "Assistant:", False)]
        mask = _Mask(self._marks, self._source, [m["content"] for m in messages])
        masked = [{"role": m["role"], "content": mask.hide(m["content"])} for m in messages]
        return mask.pieces(_render(self._source, {**self._names, "messages": masked}))


class _Marks:
    """The texts of a model's control tokens, ready to be looked for."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = [t for t in texts if t]
        self.longest = max(map(len, self.texts), default=0)
        self.heads = {t[:i] for t in self.texts for i in range(1, len(t))}
        self.tails = {t[i:] for t in self.texts for i in range(1, len(t))}
        ordered = sorted(self.texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None


class _Mask:
    """Keeps users' text apart from the template's own without changing what the template sees of
    ordinary text.

    Where a content holds the text of a control token, or a piece that could become one together
    with what the template writes beside it, its first character is swapped for an unused private
    one. Then the rendered text is cut at control tokens, all of them the template's, and the
    characters are swapped back in what lies between.
    """

    def __init__(self, marks: _Marks, source: str, contents: Sequence[str]) -> None:
        used = set(source).union(*contents, *marks.texts)
        self._free = (c for c in map(chr, range(0xE000, 0xF900)) if c not in used)
        self._hidden: dict[str, str] = {}
        self._marks = marks

    def hide(self, content: str) -> str:
        """The content as the template gets it: no control token in it nor at its edges."""
        pattern = self._marks.pattern
        if pattern is None:
            return content
        while True:
            # Again until none is left: hiding one may leave another that overlapped it.
            hidden = pattern.sub(lambda m: self._swap(m[0][0]) + m[0][1:], content)
            if hidden == content:
                break
            content = hidden
        # Templates often trim, so the edges are those of the text without white space, too.
        for trimmed in (False, True):
            text = content.strip() if trimmed else content
            if text and self._joins(text):
                at = content.index(text)
                content = self._hide_edges(content, at, at + len(text))
        return content

    def _joins(self, text: str) -> bool:
        """Whether text could end a control token that begins before it, begin one, or lie within
        one.
        """
        marks = self._marks
        lengths = range(1, min(marks.longest, len(text) + 1))
        return any(text[:n] in marks.tails or text[-n:] in marks.heads for n in lengths) or (
            len(text) < marks.longest and any(text in t for t in marks.texts)
        )

    def _hide_edges(self, text: str, begin: int, end: int) -> str:
        first, last = self._swap(text[begin]), self._swap(text[end - 1])
        middle = first + text[begin + 1 : end - 1] + last if end - begin > 1 else first
        return text[:begin] + middle + text[end:]

    def _swap(self, char: str) -> str:
        if char in self._hidden.values():
            return char
        if char not in self._hidden:
            try:
                self._hidden[char] = next(self._free)
            except StopIteration:
                raise InvalidArgument(
                    "The messages use every private character there is."
                ) from None
        return self._hidden[char]

    def pieces(self, rendered: str) -> list[tuple[str, bool]]:
        """The rendered text in pieces (text, is a control token), hidden characters put back."""
        back = {ord(v): k for k, v in self._hidden.items()}
        found: list[tuple[str, bool]] = []
        at = 0
        pattern = self._marks.pattern
        for match in pattern.finditer(rendered) if pattern else ():
            found.append((rendered[at : match.start()].translate(back), False))
            found.append((match.group(), True))
            at = match.end()
        found.append((rendered[at:].translate(back), False))
        return [piece for piece in found if piece[0]]


def _sized(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > MAX_OUTPUT:
        raise _TooMuch
    return value


def _concat(*values: Any) -> str:
    texts = [str(v) for v in values]
    if sum(map(len, texts)) > MAX_OUTPUT:
        raise _TooMuch
    return "".join(texts)


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    text, old, new = str(text), str(old), str(new)
    if (text.count(old)) * len(new) + len(text) > MAX_OUTPUT:
        raise _TooMuch
    return text.replace(old, new, count)


def _join(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    texts = [str(v[attribute] if attribute is not None else v) for v in values]
    return _concat(*(part for t in texts for part in (separator, t)))[len(separator) :]


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(max(width, 0), 64)
    lines = str(text).split("\n")
    if len(pad) * len(lines) + len(text) > MAX_OUTPUT:
        raise _TooMuch
    rest = [pad + line if line or blank else line for line in lines[1:]]
    return "\n".join([(pad if first else "") + lines[0], *rest])


def _batch(value: Any, linecount: int, fill_with: Any = None) -> Any:
    if not isinstance(linecount, int) or not 0 < linecount <= MAX_RANGE:
        raise _TooMuch
    return jinja2.filters.do_batch(value, linecount, fill_with)


def _slice(value: Any, slices: int, fill_with: Any = None) -> Any:
    if not isinstance(slices, int) or not 0 < slices <= MAX_RANGE:
        raise _TooMuch
    return [list(part) for part in jinja2.filters.sync_do_slice(value, slices, fill_with)]


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if not isinstance(precision, int) or abs(precision) > 64:  # a power of ten that is made first
        raise _TooMuch
    return jinja2.filters.do_round(value, precision, method)


def _joined(parts: Iterable[str]) -> str:
    return _concat(*parts)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    indent = None if indent is None else min(int(indent), 16)
    return str(_sized(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)))


class _Bound(jinja2.visitor.NodeTransformer):
    """Turns `a ~ b` into a call that looks at the length."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        name = jinja2.nodes.Name("concat__", "load", lineno=node.lineno)
        return jinja2.nodes.Call(name, node.nodes, [], None, None, lineno=node.lineno)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The immutable sandbox, with bounds on what one operation can make."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_joined)  # what a block or a macro made

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            cache_size=0,
            optimized=False,  # what is folded is computed outside of the deadline
        )
        filters = {name: self.filters[name] for name in _FILTERS.split()}
        bounded: dict[str, Callable[..., Any]] = {
            "replace": _replace, "join": _join, "indent": _indent, "tojson": _tojson,
            "batch": _batch, "slice": _slice, "round": _round,
        }  # fmt: skip
        self.filters = {**filters, **bounded}
        self.globals = {
            "range": _range,
            "namespace": self.globals["namespace"],
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "concat__": _concat,
        }

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bound().visit(source), *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operation, refused when its result would be large."""
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and len(left) + len(right) > MAX_OUTPUT:
                raise _TooMuch
        elif isinstance(left, str) and operator == "%":
            raise jinja2.exceptions.SecurityError("formatting is not allowed")
        else:
            for value in (left, right):
                if not isinstance(value, (int, float)) or abs(value) > 1 << 31:
                    raise _TooMuch
            if operator == "**" and abs(right) > 64:
                raise _TooMuch
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call; of the methods of texts those that cannot make much of little."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if name in ("format", "format_map"):
            raise jinja2.exceptions.SecurityError("formatting is not allowed")
        if isinstance(owner, str):
            # What Jinja passes on to functions that want a context.
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            if name not in _STR_METHODS.split():
                raise jinja2.exceptions.SecurityError(f"str.{name} is not allowed")
            if name == "replace":
                return _replace(owner, *args, **kwargs)
            if name == "join":
                return _join(args[0], owner)
        return super().call(context, function, *args, **kwargs)


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise _TooMuch
    return numbers


def _raise_exception(message: object) -> None:
    raise _Refused(str(message)[:300])


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(str(form)[:100])


def _render(source: str, names: Mapping[str, Any]) -> str:
    """The template's output, under a deadline that is looked at on each of its lines."""
    if len(source) > MAX_TEMPLATE:
        raise BadModel("The model's chat template is too long.")
    end = time.monotonic() + SECONDS

    def watch(frame: FrameType, event: str, arg: Any) -> Any:
        if time.monotonic() > end:
            raise _TooMuch
        return watch

    before = sys.gettrace()
    try:
        template = _Sandbox().from_string(source)
        parts, length = [], 0
        sys.settrace(watch)
        try:
            for part in template.generate(**names, add_generation_prompt=True, tools=None):
                length += len(part)
                if length > MAX_OUTPUT:
                    raise _TooMuch
                parts.append(part)
        finally:
            sys.settrace(before)
        return "".join(parts)
    except _Refused as e:
        raise InvalidArgument(f"The model's chat template refuses these messages: {e}") from None
    except (_TooMuch, MemoryError, RecursionError):
        raise BadModel("The model's chat template makes too much or takes too long.") from None
    except Exception as e:  # a template is a program: it can fail in any way
        reason = str(e).splitlines()[0][:200] if str(e) else type(e).__name__
        raise BadModel(f"The model's chat template is broken: {reason}.") from None
