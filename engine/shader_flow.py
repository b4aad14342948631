# SPDX-License-Identifier: Apache-2.0
"""How long the loops of a shader can run, and which buffers it chooses: what a SPIR-V module says
before it is run.

Every value has a rank: CONSTANT (known when the shader is compiled), LAUNCH (known when it is
dispatched: push constants, uniform buffers, invocation numbers, and what is computed from those),
DATA (read from a buffer, shared memory or an image). The rank of a variable is the highest of all
that is stored to it, wherever that is, so the order of statements does not matter. A loop ends for
sure when one of its exits compares something that it counts with a limit; the loop's rank is then
the limit's, DATA when there is no such exit.

Reads what glslang writes: structured control flow, variables instead of phis. The numbers are those
of the SPIR-V specification, version 1.6, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kernels import spirv

CONSTANT, LAUNCH, DATA = 0, 1, 2

_LINE, _FUNCTION_PARAMETER, _FUNCTION_CALL, _VARIABLE = 8, 55, 57, 59
_LOAD, _STORE, _ACCESS_CHAIN, _IN_BOUNDS_CHAIN, _PHI = 61, 62, 65, 66, 245
_FUNCTION, _FUNCTION_END, _RETURN_VALUE = 54, 56, 254
_LOOP_MERGE, _LABEL, _BRANCH, _BRANCH_CONDITIONAL, _SWITCH = 246, 248, 249, 250, 251
_OR, _AND, _NOT = (164, 166), (165, 167), 168
# Instructions whose words from this index on are literals: shuffle, extract, insert.
_LITERALS, _SUBGROUPS, _ARRAY_LENGTH = {79: 4, 81: 3, 82: 4}, range(333, 367), 68
# What is no larger than an operand: a mask, a remainder; of GLSL.std.450 min and clamp.
_LEAST, _EXTENDED, _MINIMA, _CLAMPS = (137, 199), 12, (37, 38, 39), (43, 44, 45)
_POINTER, _ARRAYS = 32, (28, 29)
_CONSTANTS = range(41, 53)  # true, false, constants and specialisation constants
_ATOMICS = range(227, 243)
_IMAGES = range(87, 99)
# Storage class -> rank of what is read there: input, uniform, push constants; Function: by stores.
_CLASSES = {1: LAUNCH, 2: LAUNCH, 9: LAUNCH}
_FUNCTION_CLASS = 7
_DESCRIPTORS = (0, 2, 12)  # storage classes: images, uniform and storage buffers

# Comparison -> (which operand is the smaller while it holds: 0, 1 or -1 neither).
_SMALLER = {
    170: -1, 171: -1, 172: 1, 173: 1, 174: 1, 175: 1, 176: 0, 177: 0, 178: 0, 179: 0,
    180: -1, 181: -1, 182: -1, 183: -1, 184: 0, 185: 0, 186: 1, 187: 1, 188: 0, 189: 0,
    190: 1, 191: 1,
}  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """A loop: the line of the source (0 unknown), its rank, and whether another is inside it."""

    line: int
    rank: int
    innermost: bool


@dataclass(frozen=True)
class _Op:
    code: int
    args: tuple[int, ...]  # all words behind the first
    line: int
    block: int


@dataclass
class _Module:
    ops: list[_Op]
    made: dict[int, _Op] = field(default_factory=dict)  # result id -> instruction
    pointers: dict[int, int] = field(default_factory=dict)  # pointer type -> storage class
    pointees: dict[int, int] = field(default_factory=dict)  # pointer type -> type
    arrays: set[int] = field(default_factory=set)  # types
    stores: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # variable: (at, value)
    parameters: dict[int, list[int]] = field(default_factory=dict)  # parameter: arguments
    returns: dict[int, list[int]] = field(default_factory=dict)  # function: values


def read(data: bytes) -> tuple[list[Loop], list[int]]:
    """The loops of a module, in the order of the source, and the lines where it takes a descriptor
    out of an array by an index that is not known when it is compiled.

    Raises:
        ValueError: it is no SPIR-V.
    """
    module = _module(data)
    found = [(at, _end(module, at)) for at, op in enumerate(module.ops) if op.code == _LOOP_MERGE]
    loops = [
        Loop(
            module.ops[begin].line,
            _rank_of_loop(module, begin, end),
            not any(begin < other < end for other, _ in found),
        )
        for begin, end in found
    ]
    indexed = {op.line for op in module.ops if _picks_descriptor(module, op)}
    return loops, sorted(indexed)


def _picks_descriptor(module: _Module, op: _Op) -> bool:
    if op.code not in (_ACCESS_CHAIN, _IN_BOUNDS_CHAIN) or len(op.args) < 4:
        return False
    base = module.made.get(op.args[2])
    if base is None or base.code != _VARIABLE or base.args[2] not in _DESCRIPTORS:
        return False
    array = module.pointees.get(base.args[0]) in module.arrays
    index = module.made.get(op.args[3])
    return array and index is not None and index.code not in _CONSTANTS


def _module(data: bytes) -> _Module:
    module = _Module([])
    line, block, function = 0, 0, 0
    functions: dict[int, list[int]] = {}
    calls: list[tuple[int, tuple[int, ...]]] = []
    for code, args in spirv.instructions(data):
        if code == _LINE:
            line = args[1]
        elif code == _LABEL:
            block = args[0]
        op = _Op(code, args, line, block)
        module.ops.append(op)
        if code == _POINTER:
            module.pointers[args[0]], module.pointees[args[0]] = args[1:3]
        elif code in _ARRAYS:
            module.arrays.add(args[0])
        elif code == _FUNCTION:
            function = args[1]
            functions[function] = []
            module.made[function] = op
        elif code == _FUNCTION_PARAMETER:
            functions[function].append(args[1])
            module.made[args[1]] = op
        elif code == _STORE:
            base = _base(module, args[0])
            module.stores.setdefault(base, []).append((len(module.ops) - 1, args[1]))
        elif code == _RETURN_VALUE:
            module.returns.setdefault(function, []).append(args[0])
        elif code == _FUNCTION_CALL:
            calls.append((args[2], args[3:]))
            module.made[args[1]] = op
        elif len(args) >= 2 and _has_result(code):
            module.made[args[1]] = op
    for called, given in calls:
        for parameter, value in zip(functions.get(called, []), given, strict=False):
            module.parameters.setdefault(parameter, []).append(value)
    return module


def _has_result(code: int) -> bool:
    """Whether an instruction is (type, result, …): all that values are made of."""
    return (
        code in _CONSTANTS
        or code in _IMAGES
        or code in _ATOMICS
        or 59 <= code <= 61
        or 65 <= code <= 70
        or 77 <= code <= 86
        or code in (_EXTENDED, _PHI)
        or 100 <= code <= 223
        or code > 255
    )


def _base(module: _Module, pointer: int) -> int:
    """The variable (or parameter) that a pointer points into."""
    op = module.made.get(pointer)
    while op is not None and op.code in (_ACCESS_CHAIN, _IN_BOUNDS_CHAIN):
        pointer = op.args[2]
        op = module.made.get(pointer)
    return pointer


def _rank(module: _Module, value: int, seen: frozenset[int] = frozenset()) -> int:
    if value in seen:
        return CONSTANT  # a counter's own earlier value adds nothing
    seen |= {value}
    op = module.made.get(value)
    if op is None or op.code in _CONSTANTS:
        return CONSTANT
    if op.code in _ATOMICS or op.code in _IMAGES:
        return DATA
    if op.code == _LOAD:
        return _rank(module, op.args[2], seen)
    if op.code in (_VARIABLE, _FUNCTION_PARAMETER):
        values = [v for _, v in module.stores.get(value, [])] + module.parameters.get(value, [])
        storage = module.pointers.get(op.args[0], _FUNCTION_CLASS)
        least = CONSTANT
        if storage != _FUNCTION_CLASS:
            # Private variables (6) are like those of functions; shared memory and buffers are data.
            least = CONSTANT if storage == 6 else _CLASSES.get(storage, DATA)
        return _highest(module, values, seen, least)
    if op.code == _FUNCTION_CALL:
        # What the call changes through its arguments counts as stored by it.
        return _highest(module, [*module.returns.get(op.args[2], []), *op.args[3:]], seen)
    if op.code == _PHI:
        return _highest(module, op.args[2::2], seen)
    if op.code == _ARRAY_LENGTH:
        return LAUNCH
    given = _operands(op)
    if op.code in _LEAST or (op.code == _EXTENDED and op.args[3] in _MINIMA):
        return min(_rank(module, v, seen) for v in given)
    if op.code == _EXTENDED and op.args[3] in _CLAMPS:
        given = given[1:]
    return _highest(module, given, seen)


def _operands(op: _Op) -> tuple[int, ...]:
    """The values that an instruction computes from, without its literals and scopes."""
    if op.code == _EXTENDED:
        return op.args[4:]
    if op.code in _LITERALS:
        return op.args[2 : _LITERALS[op.code]]
    if op.code in _SUBGROUPS:
        return op.args[3:] if len(op.args) < 5 else op.args[4:]
    return op.args[2:]


def _highest(
    module: _Module, values: Iterable[int], seen: frozenset[int], least: int = CONSTANT
) -> int:
    for value in values:
        if least == DATA:
            break
        least = max(least, _rank(module, value, seen))
    return least


def _end(module: _Module, begin: int) -> int:
    """The index of the merge block's label: what lies between belongs to the loop."""
    merge = module.ops[begin].args[0]
    for at in range(begin, len(module.ops)):
        op = module.ops[at]
        if op.code == _LABEL and op.args[0] == merge:
            return at
        if op.code == _FUNCTION_END:
            break
    return at


def _rank_of_loop(module: _Module, begin: int, end: int) -> int:
    stored = {
        base for base, stores in module.stores.items() if any(begin < at < end for at, _ in stores)
    }
    for op in module.ops[begin:end]:
        if op.code == _FUNCTION_CALL:
            stored |= {_base(module, a) for a in op.args[3:]}
    exits = [_rank_of_exit(module, c, on, stored, begin) for c, on in _exits(module, begin, end)]
    return min(exits, default=DATA)


def _exits(module: _Module, begin: int, end: int) -> Iterator[tuple[int, bool]]:
    """(condition, its value when the loop is left) of each way to the merge block."""
    merge = module.ops[begin].args[0]
    leaving = {merge}  # blocks that do nothing but leave
    for op in module.ops[begin:end]:
        if op.code == _BRANCH and op.args[0] == merge:
            leaving.add(op.block)
    for op in module.ops[begin:end]:
        if op.code == _BRANCH_CONDITIONAL:
            condition, yes, no = op.args[:3]
            if yes in leaving:
                yield condition, True
            if no in leaving:
                yield condition, False


def _rank_of_exit(module: _Module, condition: int, on: bool, stored: set[int], begin: int) -> int:
    """The rank of the limit that this condition holds a counter against; `on`: the loop is left
    when it is true.
    """
    op = module.made.get(condition)
    if op is None:
        return DATA
    if op.code == _NOT:
        return _rank_of_exit(module, op.args[2], not on, stored, begin)
    both = _both(module, op)
    if both is not None:
        left, right, is_and = both
        ranks = [_rank_of_exit(module, c, on, stored, begin) for c in (left, right)]
        # One of the two suffices where either leaves the loop: a false `and`, a true `or`.
        return min(ranks) if is_and != on else max(ranks)
    if op.code not in _SMALLER:
        return DATA
    smaller = _SMALLER[op.code]
    if on and smaller >= 0:
        smaller = 1 - smaller  # left when a > b: it goes on while a <= b
    best = DATA
    for i, (counter, limit) in enumerate((op.args[2:4], op.args[3:1:-1])):
        counted = _variables(module, counter) & stored
        if not counted:
            continue
        rank = max(_rank(module, limit), _steps(module, counted))
        if smaller != i:  # counting down, or until equal: where it began matters
            rank = max(rank, _starts(module, counted, begin))
        best = min(best, rank)
    return best


def _both(module: _Module, op: _Op) -> tuple[int, int, bool] | None:
    """(left, right, whether it is `and`) of a condition made of two, also of a short-circuited
    one: a phi of the left value and of what the block between computed.
    """
    if op.code in (*_AND, *_OR):
        return op.args[2], op.args[3], op.code in _AND
    if op.code != _PHI or len(op.args) != 6:
        return None
    left, first, right, second = op.args[2:]
    for branch in module.ops:
        if branch.code == _BRANCH_CONDITIONAL and branch.block == first:
            # `a && b` goes on to b when a holds; `a || b` when it does not, or when !a holds.
            return left, right, branch.args[0] == left and branch.args[1] == second
    return None


def _variables(module: _Module, value: int, depth: int = 0) -> set[int]:
    """The variables that a value is computed from, without looking into what was stored there."""
    op = module.made.get(value)
    if op is None or op.code in _CONSTANTS or depth > 8:
        return set()
    if op.code == _LOAD:
        return {_base(module, op.args[2])}
    out: set[int] = set()
    for argument in _operands(op):
        out |= _variables(module, argument, depth + 1)
    return out


def _steps(module: _Module, counted: set[int]) -> int:
    """DATA when what is counted jumps about by what it reads."""
    return DATA if any(_rank(module, variable) == DATA for variable in counted) else CONSTANT


def _starts(module: _Module, counted: set[int], begin: int) -> int:
    """The rank of what the counters were set to before the loop."""
    values = [value for base in counted for at, value in module.stores.get(base, []) if at < begin]
    return _highest(module, values, frozenset())
