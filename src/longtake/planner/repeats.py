"""Runs of equal blocks in a transformer, of which a trace has to run only a few.

Blocks that are built alike, are treated alike and get equal arguments take equal memory and time.
A trace runs the first few of such a run and the last, and copies the sections of the last of these
few for the others. What it cannot know beforehand it checks as it goes: two blocks in a row must
have taken exactly the same, and nothing may happen between the blocks that are left out.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from longtake.planner.tracker import MemoryTracker, StepSection

_LONGEST_PERIOD = 2  # of the named recompute policies, `alternate` repeats two blocks
_WARM_UP = 2  # units at the beginning of a run that may differ, as offloading begins with them
_NUM_RUN = _WARM_UP + 3  # units of a run that are traced: two that are compared, and the last
_MOST_NESTED = 6
_PLAIN = (bool, int, float, str, bytes, type, torch.dtype, torch.device)


class UnlikeError(Exception):
    """Raised within a trace if blocks that looked alike are not, so that it has to run all."""


@dataclass(frozen=True)
class Run:
    """Equal units of consecutive blocks; a unit has one block, or two that alternate."""

    units: Sequence[Sequence[str]]
    """Names of the blocks of each unit."""

    @property
    def first(self) -> Sequence[str]:
        """The unit before the two that are compared."""
        return self.units[_WARM_UP - 1]

    @property
    def second(self) -> Sequence[str]:
        """The unit whose memory is counted for those that are left out, too."""
        return self.units[_WARM_UP]

    @property
    def third(self) -> Sequence[str]:
        """The unit whose sections of the step stand for those that are left out."""
        return self.units[_WARM_UP + 1]

    @property
    def left_out(self) -> Sequence[Sequence[str]]:
        return self.units[_WARM_UP + 2 : -1]


def find_runs(names: Sequence[str], kinds: Sequence[Hashable]) -> list[Run]:
    """Find the runs of equal units of blocks that are long enough for some to be left out.

    Args:
        names: names of all blocks in running order.
        kinds: for each block, a value that is equal for equal blocks with equal treatment.
    """
    runs, begin = list[Run](), 0
    while begin < len(names):
        periods = range(1, _LONGEST_PERIOD + 1)
        counts = {period: _num_units(kinds, begin, period) for period in periods}
        period = max(periods, key=lambda each: (counts[each] * each, -each))
        count = counts[period]
        if count > _NUM_RUN:
            ends = range(begin, begin + count * period, period)
            runs.append(Run([names[end : end + period] for end in ends]))
            begin += count * period
        else:
            begin += 1
    return runs


def _num_units(kinds: Sequence[Hashable], begin: int, period: int) -> int:
    unit, count = kinds[begin : begin + period], 1
    while kinds[begin + count * period : begin + (count + 1) * period] == unit:
        count += 1
    return count


# --- Kinds of blocks --------------------------------------------------------------------------


def kinds_of(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Hashable]:
    """Return a value for each block that is equal for equal code, settings and weights' shapes.

    Weights' values do not count, nor does the name of the block in strings, which adapters keep. An
    attribute that cannot be compared makes a block unlike others, unless they share it; so does a
    weight that is used outside of the block, too.
    """
    inside = {each for block in blocks.values() for each in block.modules()}
    outside = [_held(each) for each in model.modules() if each not in inside]
    holders = [set().union(*map(_held, block.modules())) for block in blocks.values()]
    uses = Counter(each for held in (*outside, *holders) for each in held)
    return {
        name: tuple(_Kind(f"{name}.", block).facts())
        if all(uses[each] == 1 for each in held)
        else ("shares weights", name)
        for (name, block), held in zip(blocks.items(), holders, strict=True)
    }


def _held(module: nn.Module) -> set[int]:
    """Return the ids of a module's own parameters and buffers, without those of modules in it."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return {id(each) for each in tensors if each is not None}


class _Kind:
    """Describes the modules of a block so that descriptions of equal blocks are equal."""

    def __init__(self, prefix: str, block: nn.Module) -> None:
        self._prefix = prefix  # of the names of modules in the block
        self._modules = {module: name for name, module in block.named_modules()}

    def facts(self) -> Iterator[Hashable]:
        for module, name in self._modules.items():
            yield name, type(module), tuple(self._facts_of_module(module))

    def _facts_of_module(self, module: nn.Module) -> Iterator[Hashable]:
        for name, value in sorted(vars(module).items()):
            if name in ("_parameters", "_buffers"):
                yield name, tuple((key, _tensor_facts(each)) for key, each in value.items())
            elif name == "_modules":  # described on their own, but their order is that of running
                yield name, tuple(value)
            elif not (isinstance(value, Mapping | set) and not value):
                yield name, self._facts(value, _MOST_NESTED)

    def _facts(self, value: Any, depth: int) -> Hashable:
        """Return a comparable description of a module's attribute."""
        kind = type(value)
        if isinstance(value, str):
            return kind, value.removeprefix(self._prefix)
        if value is None or kind in _PLAIN:
            return kind, value
        if isinstance(value, nn.Module):
            return kind, self._modules.get(value, id(value))
        if isinstance(value, MethodType):
            return kind, value.__func__, self._modules.get(value.__self__, id(value.__self__))
        inner: Callable[[Any], Hashable] = partial(self._facts, depth=depth - 1)
        if depth and isinstance(value, Mapping):
            return kind, tuple((inner(key), inner(each)) for key, each in value.items())
        if depth and isinstance(value, list | tuple):
            return kind, tuple(map(inner, value))
        if depth and isinstance(value, set | frozenset):
            return kind, frozenset(map(inner, value))
        if depth and kind is partial:
            return kind, inner(value.func), inner(value.args), inner(value.keywords)
        # An object that has attributes and nothing else, such as an attention processor: a class
        # that is written in C, has slots or is derived from a number holds more.
        holds_more = kind.__basicsize__ != _Object.__basicsize__ or kind.__itemsize__
        if depth and hasattr(value, "__dict__") and not holds_more:
            return kind, inner(vars(value))
        return id(value)


class _Object: ...


def _tensor_facts(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad, tensor.grad_dtype


# --- Arguments and outputs --------------------------------------------------------------------


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield the values in nested lists, tuples and dictionaries, in order."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from leaves_of(each)
    else:
        yield value


class _Flow:
    """What the blocks of a run pass on to each other, and what all of them get alike.

    Tensors are known by weak references, as a trace counts memory until it is released.
    """

    def __init__(self) -> None:
        self._places: dict[int, list[int]] = {}
        """For each place in a unit, the arguments that are outputs of the block before."""
        self._args: dict[int, list[Any]] = {}
        self._modes: object = None
        self._form: Any = None
        self._outputs: list[Any] = []
        self._older: list[Any] = []  # outputs before these, from the last block that ran

    def returned(self, outputs: Any) -> None:
        """Remember the outputs of a block that has run."""
        self._form = type(outputs)
        self._outputs = list(map(_remembered, leaves_of(outputs)))

    def got(self, place: int, args: Sequence[Any]) -> None:
        """Find the outputs of the block before among the arguments of the block at this place."""
        values = list(leaves_of(args))
        found = [
            next((i for i, value in enumerate(values) if _is(output, value)), None)
            for output in self._outputs
        ]
        places = [each for each in found if each is not None]
        if len(places) < len(found) or self._places.setdefault(place, places) != places:
            raise UnlikeError
        self._args[place] = list(map(_remembered, values))
        self._modes = _modes()

    def passed_on(self, place: int, args: Sequence[Any]) -> Any:
        """Return the arguments of a block that is left out in the form of its outputs."""
        values, flowing = list(leaves_of(args)), self._places[place]
        known = self._args[place]
        if len(values) != len(known) or _modes() != self._modes:
            raise UnlikeError
        for index, (value, before) in enumerate(zip(values, known, strict=True)):
            if index not in flowing and not _is(before, value):
                raise UnlikeError
        passed = [values[index] for index in flowing]
        if not all(map(_is, self._outputs, passed)):
            raise UnlikeError
        self.refuse_kept()
        outputs = [_pass_on(each) if isinstance(each, Tensor) else each for each in passed]
        self._older += self._outputs
        self._outputs = list(map(_remembered, outputs))
        if isinstance(self._form, type) and issubclass(self._form, Tensor):
            return outputs[0]
        if self._form not in (tuple, list):
            raise UnlikeError
        return self._form(outputs)

    def refuse_kept(self) -> None:
        """Raise UnlikeError if the model has kept what an earlier block returned.

        A later use of it would add to the gradient of another block than in the whole step.
        """
        if any(not isinstance(each, _Plain) and each() is not None for each in self._older):
            raise UnlikeError


class _PassedOn(torch.autograd.Function):
    """The output of a block that is left out: another tensor with the storage of its argument."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _pass_on(tensor: Tensor) -> Tensor:
    passed: Tensor = _PassedOn.apply(tensor)  # type: ignore[no-untyped-call]
    return passed


def _modes() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


class _Plain:
    """A remembered value that is no tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _remembered(value: Any) -> Any:
    return weakref.ref(value) if isinstance(value, Tensor) else _Plain(value)


def _is(remembered: Any, value: Any) -> bool:
    """Return whether a value is the remembered tensor, or equal to the remembered plain value."""
    if not isinstance(remembered, _Plain):
        return remembered() is value
    known = remembered.value
    return known is value or (
        type(known) is type(value) and type(value) in _PLAIN and bool(known == value)
    )


# --- Composition ------------------------------------------------------------------------------


class _State:
    """A run in one trace: where its blocks are, and what was counted for those left out."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.flow = _Flow()
        self.num_called = 0  # blocks, which have to be called once each, in their order
        self.idle_bytes: int | None = None  # allocated when the blocks were left out; None: not yet
        self.saved: int | None = None  # of the second unit, when its gradient arrived


class Composition:
    """Lets a traced step leave out equal blocks, and adds their sections to its marks.

    Args:
        runs: runs of equal blocks, in running order.
        tracker: tracker of the step.
    """

    def __init__(self, runs: Sequence[Run], tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._states = [_State(run) for run in runs]
        self._places = {
            name: (state, unit, place)
            for state in self._states
            for unit, names in enumerate(state.run.units)
            for place, name in enumerate(names)
        }

    def equal_to(self, name: str) -> str:
        """Return the block whose sections stand for this block's: itself, unless it is left out."""
        if not self._is_left_out(name):
            return name
        state, _, place = self._places[name]
        return state.run.third[place]

    def _is_left_out(self, name: str) -> bool:
        if name not in self._places:
            return False
        state, unit, _ = self._places[name]
        return _WARM_UP + 2 <= unit < len(state.run.units) - 1

    def leave_out(self, name: str, args: Sequence[Any]) -> tuple[Any] | None:
        """Return what a block that is left out returns, in a tuple; None if the block has to run.

        Raises:
            UnlikeError: the block is not like those before it.
        """
        if not self._is_left_out(name):
            return None
        state, _, place = self._called(name)
        if state.idle_bytes is None:
            self._tracker.mark(f"before {name}")
            self._add_forward(state)
            state.idle_bytes = self._tracker.current_bytes
        elif not self._tracker.is_idle_at(state.idle_bytes):
            raise UnlikeError
        return (state.flow.passed_on(place, args),)

    def _called(self, name: str) -> tuple["_State", int, int]:
        state, unit, place = self._places[name]
        if state.num_called != unit * len(state.run.third) + place:
            raise UnlikeError
        state.num_called += 1
        return state, unit, place

    def begins(self, name: str, args: Sequence[Any]) -> None:
        """Note the arguments of a block that runs, before it allocates anything."""
        self._tracker.owner = None
        if name in self._places:
            state, unit, place = self._called(name)
            if unit == _WARM_UP:
                self._tracker.owner = state
            if state.idle_bytes is not None:
                state.flow.refuse_kept()
            if unit in (_WARM_UP, _WARM_UP + 1):
                state.flow.got(place, args)

    def ends(self, name: str, outputs: Any) -> None:
        """Note the outputs of a block that has run."""
        self._tracker.owner = None
        if name in self._places:
            state, unit, _ = self._places[name]
            if unit <= _WARM_UP + 1:
                state.flow.returned(outputs)
            # A block's outputs are the next one's inputs, which may save them.
            if name in (state.run.first[-1], state.run.second[-1]):
                tensors = [each for each in leaves_of(outputs) if isinstance(each, Tensor)]
                self._tracker.give(tensors, state if unit < _WARM_UP else None)

    def backward_begins(self, name: str) -> None:
        """Note that the gradient of a block's output is there, after its mark."""
        self._tracker.owner = None
        if name not in self._places:
            return
        state, unit, _ = self._places[name]
        self._tracker.owner = state if unit == _WARM_UP else None
        if name == state.run.third[-1] and state.saved is None and state.idle_bytes is not None:
            state.saved = self._tracker.owned_bytes(state)
            self._tracker.repeat(state, 0)
            self._tracker.begin()

    def _add_forward(self, state: _State) -> None:
        """Add the marks of the forward passes that are left out, after that of the third unit."""
        run, tracker = state.run, self._tracker
        length = 2 * len(run.third)
        cycle, before = tracker.marks[-length:], tracker.marks[-2 * length : -length]
        # Between two units, memory is only freed.
        between = cycle[-1].span
        is_quiet = between.seconds == 0 and between.peak_bytes == between.begin_bytes
        if not (is_quiet and all(map(StepSection.is_like, cycle, before))):
            raise UnlikeError
        growth = cycle[-1].span.end_bytes - before[-1].span.end_bytes
        if tracker.owned_bytes(state) != growth:
            raise UnlikeError
        following = [*run.left_out, run.units[-1]]
        for number, names in enumerate(run.left_out):
            known = dict(zip(run.third, names, strict=True))
            known[run.left_out[0][0]] = following[number + 1][0]
            tracker.marks += [
                mark.moved((number + 1) * growth, _renamed(mark.name, known)) for mark in cycle
            ]
        del tracker.marks[-1:]  # what is before the last unit is marked when that is reached
        tracker.repeat(state, len(run.left_out))
        tracker.continue_from(tracker.marks[-1].span.end_bytes)

    def finish(self) -> list[StepSection]:
        """Return the marks of the whole step, after its end.

        Raises:
            UnlikeError: a block was not called, or the second and the third unit of a run took
                different memory or time in the backward pass.
        """
        marks = self._tracker.marks
        if any(
            state.num_called < len(state.run.units) * len(state.run.third) for state in self._states
        ):
            raise UnlikeError
        for state in reversed(self._states):  # later blocks run backward first
            if state.saved is not None:
                marks = self._with_backward(marks, state, state.saved)
        return marks

    def _with_backward(
        self, marks: list[StepSection], state: _State, saved: int
    ) -> list[StepSection]:
        """Add the marks of the backward passes that are left out, before that of the third unit."""
        run, remaining = state.run, self._tracker.owned_bytes(state)
        names = [mark.name for mark in marks]
        try:
            begin, middle, end = (
                names.index(f"backward {unit[-1]}") for unit in (run.third, run.second, run.first)
            )
        except ValueError as error:
            raise UnlikeError from error
        third, second = marks[begin + 1 : middle + 1], marks[middle + 1 : end + 1]
        growth = third[-1].span.end_bytes - third[0].span.begin_bytes
        if (
            len(third) != len(second)
            or growth != remaining - saved
            or not all(map(StepSection.is_like, third, second))
        ):
            raise UnlikeError
        count, added = len(run.left_out), list[StepSection]()
        for number in range(count, 0, -1):
            before = run.left_out[number - 2] if number > 1 else run.third
            known = dict(zip(run.third, run.left_out[number - 1], strict=True))
            known[run.second[-1]] = before[-1]
            more = number * saved + (count - number) * remaining
            added += [mark.moved(more, _renamed(mark.name, known)) for mark in third]
        first = marks[begin].moved(0, f"backward {run.left_out[-1][-1]}")
        rest = [mark.moved(count * remaining) for mark in marks[begin + 1 :]]
        return [*marks[:begin], first, *added, *rest]


def _renamed(name: str, known: Mapping[str, str]) -> str:
    """Return the name of a mark, `WORD BLOCK`, with another block."""
    word, _, block = name.partition(" ")
    return f"{word} {known.get(block, block)}"
