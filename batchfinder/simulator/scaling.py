"""From two recordings to every size: each allocation's bytes as a polynomial of batch size and sequence length.

A tensor's bytes are a product of its dimensions, so most allocations are one term, `c * batch**i * seq_len**j`; a few
are sums of two (a class token beside the sequence). Kernels also pad the sequence to a multiple of 8, 32 or 128, so the
padded lengths stand beside `seq_len` as variables of their own. A term has one unknown: two recordings at different
sizes fit it and check it at once, and a sum of two needs a third recording. Where nothing fits, or several polynomials
that would differ at a length asked for, that size is recorded itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import combinations, combinations_with_replacement
from typing import Any

from batchfinder.devices import Multiprocessors
from batchfinder.errors import RecordingFailed
from batchfinder.simulator.reductions import Reduction, Scratch
from batchfinder.simulator.trace import Trace, TraceStructure

_PADDINGS = (8, 32, 64, 128)
_BATCH_POWERS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Term:
    """`coefficient * batch**batch_power * (product of the sequence length rounded up to each of paddings)`.

    Attributes:
        paddings: one entry for each power of the sequence length: what it is rounded up to a multiple of.
    """

    coefficient: int
    batch_power: int
    paddings: tuple[int, ...]

    def __call__(self, batch_size: int, seq_len: int) -> int:
        product: int = self.coefficient * batch_size**self.batch_power
        for padding in self.paddings:
            product *= -(-seq_len // padding) * padding
        return product


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes that go straight from `first` to `second`, which are (batch size x length, bytes), and on, up to `most`.

    Compiled code splits some reductions by steps of its own: what it takes for them is near that line.
    """

    first: tuple[int, int]
    second: tuple[int, int]
    most: int | None = None

    def __call__(self, batch_size: int, seq_len: int) -> int:
        (start, low), (end, high) = self.first, self.second
        if start == end:
            return low
        found = max(0, low + (high - low) * (batch_size * seq_len - start) // (end - start))
        return found if self.most is None else min(found, self.most)


Polynomial = tuple["Term | Line | ScratchTerm", ...]


def _at(polynomial: Polynomial, batch_size: int, seq_len: int) -> int:
    return sum(term(batch_size, seq_len) for term in polynomial)


@dataclass(frozen=True, slots=True)
class ScaledReduction:
    """A reduction at every size: one polynomial for each dimension's size, each stride and the offset."""

    like: Reduction
    shape: tuple[Polynomial, ...]
    strides: tuple[Polynomial, ...]
    offset: Polynomial

    def at(self, batch_size: int, seq_len: int) -> Reduction:
        size = batch_size, seq_len
        shape, strides = (tuple([_at(each, *size) for each in all_]) for all_ in (self.shape, self.strides))
        return replace(self.like, shape=shape, strides=strides, offset=_at(self.offset, *size))


@dataclass(frozen=True, slots=True)
class ScratchTerm:
    """One of the blocks that a reduction allocates on a card, `number` among the fields of its `Scratch`."""

    reduction: ScaledReduction
    number: int
    card: Multiprocessors

    def __call__(self, batch_size: int, seq_len: int) -> int:
        return self.reduction.at(batch_size, seq_len).scratch(self.card)[self.number]


# The terms without their coefficients, simplest first: plain lengths before padded ones, low powers first.
_PADDED = [paddings for n in (1, 2) for paddings in combinations_with_replacement((1, *_PADDINGS), n)]
_SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = tuple(
    (power, paddings) for paddings in dict.fromkeys([(), (1,), (1, 1), *_PADDED]) for power in _BATCH_POWERS
)
_PLAIN = tuple((power, paddings) for power, paddings in _SHAPES if all(padding == 1 for padding in paddings))


@dataclass(frozen=True)
class ScaledTrace:
    """A trace for any batch size of at least 2 and any of the sequence lengths it was fitted for.

    The events are the same at every size; `index` says for each block which of the `polynomials` gives its bytes.

    Attributes:
        reductions: as of a `Trace`.
        replays: what was replayed of it on each kind of card, for `TraceSource.replays`.
        checked: the sizes at which a recording was the same, (batch size, tokens).
    """

    structure: TraceStructure
    polynomials: tuple[Polynomial, ...]
    index: tuple[int, ...]
    unmodelled: tuple[str, ...]
    compiled: bool = False
    reductions: tuple[tuple[int, ScaledReduction], ...] = ()
    replays: dict[Multiprocessors, dict[Any, Any]] = field(default_factory=dict, compare=False, repr=False)
    checked: list[tuple[int, int]] = field(default_factory=list, compare=False, repr=False)

    def at(self, batch_size: int, seq_len: int | None) -> Trace:
        length = seq_len or 1
        values = [_at(polynomial, batch_size, length) for polynomial in self.polynomials]
        kinds = {scaled: scaled.at(batch_size, length) for scaled in {scaled for _, scaled in self.reductions}}
        return Trace(
            batch_size,
            seq_len,
            self.structure,
            tuple([values[i] for i in self.index]),
            self.unmodelled,
            compiled=self.compiled,
            reductions=tuple([(block, kinds[scaled]) for block, scaled in self.reductions]),
        )

    def polynomials_on(self, card: Multiprocessors) -> dict[int, Polynomial]:
        """What gives the bytes of each block on a card."""
        bytes_of = dict(enumerate(self.polynomials[i] for i in self.index))
        for block, reduction in self.reductions:
            for number in range(len(Scratch._fields)):
                bytes_of[block + number] = (ScratchTerm(reduction, number, card),)
        return bytes_of


def fit(
    traces: Sequence[Trace], seq_lens: Iterable[int | None], batch_sizes: Sequence[int] = (2, 3, 5)
) -> ScaledTrace | None:
    """Fit one scaled trace to two or more recordings.

    Args:
        traces: recordings at different sizes; two suffice where every allocation is a single term.
        seq_lens: the lengths at which polynomials must agree.
        batch_sizes: the batch sizes at which they must. At most quadratic in the batch size, those that agree at three
            sizes agree at all.

    Returns:
        None where the recordings' events differ, or an allocation fits no polynomial or several different ones. Of a
        compiled step such an allocation is put on a line, as `TraceSource.confirm` records what is decided by it.
    """
    structure = traces[0].structure
    if any(trace.structure != structure for trace in traces[1:]):
        return None
    points = [(trace.batch_size, trace.seq_len or 1) for trace in traces]
    lengths = sorted({seq_len or 1 for seq_len in seq_lens})
    asked = [(size, length) for length in lengths for size in batch_sizes]

    def fitted(values: tuple[int, ...]) -> Polynomial | None:
        polynomial = _polynomial(values, points, asked)
        if polynomial is None and traces[0].compiled:
            (first, low), (second, high) = list(zip(points, values, strict=True))[:2]
            polynomial = (Line((first[0] * first[1], low), (second[0] * second[1], high)),)
        return polynomial

    polynomials: dict[tuple[int, ...], int] = {}
    found: list[Polynomial] = []
    index: list[int] = []
    for sizes in zip(*(trace.sizes for trace in traces), strict=True):
        if sizes not in polynomials:
            polynomial = fitted(sizes)
            if polynomial is None:
                return None
            polynomials[sizes] = len(found)
            found.append(polynomial)
        index.append(polynomials[sizes])
    reductions = _scaled_reductions([trace.reductions for trace in traces], fitted)
    if reductions is None:
        return None
    unmodelled = tuple(dict.fromkeys(text for trace in traces for text in trace.unmodelled))
    checked = [(batch_size, batch_size * length) for batch_size, length in points]
    compiled = traces[0].compiled
    return ScaledTrace(structure, tuple(found), tuple(index), unmodelled, compiled, reductions, checked=checked)


def _scaled_reductions(
    recorded: Sequence[tuple[tuple[int, Reduction], ...]], fitted: Callable[[tuple[int, ...]], Polynomial | None]
) -> tuple[tuple[int, ScaledReduction], ...] | None:
    """The reductions of several recordings as one; None where they are of other kinds, or a figure is not `fitted`."""
    if any([block for block, _ in each] != [block for block, _ in recorded[0]] for each in recorded):
        return None
    known: dict[tuple[Reduction, ...], ScaledReduction] = {}
    scaled = []
    for same in zip(*recorded, strict=True):
        kinds = tuple(reduction for _, reduction in same)
        if kinds not in known:
            alike = {(len(kind.shape), replace(kind, shape=(), strides=(), offset=0)) for kind in kinds}
            if len(alike) > 1:
                return None
            figures = zip(*((*kind.shape, *kind.strides, kind.offset) for kind in kinds), strict=True)
            found = [polynomial for values in figures if (polynomial := fitted(values)) is not None]
            dims = len(kinds[0].shape)
            if len(found) < 2 * dims + 1:
                return None
            known[kinds] = ScaledReduction(kinds[0], tuple(found[:dims]), tuple(found[dims:-1]), found[-1])
        scaled.append((same[0][0], known[kinds]))
    return tuple(scaled)


def _polynomial(
    sizes: tuple[int, ...], points: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> Polynomial | None:
    """The one polynomial through all points; None without one, or with several that differ at what is asked."""
    if not any(sizes):
        return ()
    found: list[Polynomial] = []
    for batch_power, paddings in _SHAPES:
        unit_term = Term(1, batch_power, paddings)
        units = [unit_term(*point) for point in points]
        coefficient, rest = divmod(sizes[0], units[0])
        if not rest and all(coefficient * unit == size for unit, size in zip(units, sizes, strict=True)):
            found.append((Term(coefficient, batch_power, paddings),))
    # Sums of two plain terms, solved from the first two points; only a third point makes that a finding.
    for one, other in combinations(_PLAIN, 2) if len(points) > 2 and not found else ():
        (a, b), (c, d) = ((Term(1, *one)(*point), Term(1, *other)(*point)) for point in points[:2])
        determinant = a * d - b * c
        if not determinant:
            continue
        first, rest = divmod(sizes[0] * d - b * sizes[1], determinant)
        second, other_rest = divmod(a * sizes[1] - c * sizes[0], determinant)
        terms = (Term(first, *one), Term(second, *other))
        if (
            not (rest or other_rest)
            and first
            and second
            and all(sum(term(*point) for term in terms) == size for point, size in zip(points, sizes, strict=True))
        ):
            found.append(terms)
    bytes_asked = {tuple(sum(term(*size) for term in terms) for size in asked) for terms in found}
    return found[0] if len(bytes_asked) == 1 else None


def between_gpus(fewest: tuple[int, Trace], most: tuple[int, Trace], gpus: int) -> Trace | None:
    """The step of one of `gpus` GPUs, from those of one of fewer and of one of more.

    What is sharded is a part of a whole that was filled up to a multiple of the number of GPUs, and multiples of
    `most` are multiples of `gpus` and these of `fewest`: where both ends have filled up the same, so has what is
    between them.

    Args:
        fewest, most: the number of GPUs, and the step recorded on one of them at the same size.
        gpus: a multiple of the fewest, of which the most are a multiple.

    Returns:
        None where the events differ, an allocation is neither the same on both nor goes with one over their number, or
        the numbers are no multiples of each other.
    """
    (few, first), (many, last) = fewest, most
    if gpus % few or many % gpus or (first.structure, first.reductions) != (last.structure, last.reductions):
        return None
    sizes = []
    for size, smaller in zip(first.sizes, last.sizes, strict=True):
        if size != smaller and size * few != smaller * many:
            return None
        sizes.append(size if size == smaller else size * few // gpus)
    return replace(first, sizes=tuple(sizes), shapes=(), alike={})


_fit_once = functools.lru_cache(maxsize=64)(fit)  # for compute capabilities that share their recordings


def _taken(trace: Trace) -> list[int]:
    """Bytes that are allocated, and ~number of the allocation that is freed, in order.

    Blocks of no bytes are left out: another compute capability's recording can have some that this one does without.
    """
    events: list[int] = []
    numbers: dict[int, int] = {}
    for event in trace.structure.order:
        block = event if event >= 0 else ~event
        if not trace.sizes[block]:
            continue
        if event >= 0:
            numbers[block] = len(numbers)
        events.append(trace.sizes[block] if event >= 0 else ~numbers[block])
    return events


def _not_here(batch_size: int, seq_len: int | None) -> Future[Trace]:
    raise RecordingFailed(f"batch size {batch_size} at length {seq_len} cannot be recorded in this process")


Submit = Callable[[int, int | None], "Future[Trace]"]

NO_SCRATCH = Multiprocessors(0, 0)

# Two primes that are unlikely as a model's own dimensions, and one more for sums of two terms. A batch of one is never
# fitted: dimensions of size one make some copies unnecessary, so its events differ.
_BATCH_SIZES = (7, 13, 11)
# Inductor takes other kernels for small tensors, of some thousand rows: compiled steps are fitted beyond that, where
# answers are looked for, and answers are recorded at their very size.
_COMPILED_BATCH_SIZES = (7, 13, 31, 61, 127, 257, 509, 1021, 2053, 4099, 8209, 16411)
_COMPILED_TOKENS = 16384
# Answers at several lengths have about as many tokens: a recording at one stands for an eighth more.
_ABOUT_AS_MANY = 1.125
# Kernels that want a mask's rows aligned pad it, which is one more event: lengths on either side are fitted apart.
_ALIGNMENT = 8


class TraceSource:
    """Answers with a trace at any size: scaled where the recordings allow it, recorded at that very size elsewhere.

    Sequence lengths of one alignment are fitted together from a recording at the shortest and one at the longest. If
    that fails, a third helps; if that fails too, each length is fitted alone; and if not even that works, each size is
    recorded when it is asked for.

    What torch.compile makes of a step changes with its size: such a trace is recorded where it matters, by `confirm`,
    and scaled elsewhere. Code of the model's own may do something else from some size on: `confirm` records an eager
    step at the largest answer.

    Args:
        submit: asks for a recording at (batch size, sequence length).
        seq_lens: the lengths that will be asked for; others are taken in as they come.
        compiled: whether the step is known to be compiled; its recordings say so too.
        scales: whether sizes may be scaled; else each is recorded itself.
        reduces_on: what reductions are divided among; `NO_SCRATCH` for a PyTorch in which they allocate nothing.

    Attributes:
        unscaled: the sizes that had to be recorded themselves.
    """

    def __init__(
        self,
        submit: Submit,
        seq_lens: Iterable[int | None],
        compiled: bool = False,
        scales: bool = True,
        reduces_on: Multiprocessors = NO_SCRATCH,
    ) -> None:
        self._submit = submit
        self.reduces_on = reduces_on
        self._compiled = compiled
        self._scales = scales
        self._recorded: dict[tuple[int, int | None], Future[Trace]] = {}
        self._scaled: dict[int | None, ScaledTrace | None] = {}
        self._ones: dict[int | None, ScaledTrace | None] = {}
        self._groups: dict[bool, list[int | None]] = {}  # by whether the length is aligned
        self.unscaled: list[tuple[int, int | None]] = []
        for seq_len in dict.fromkeys(seq_lens):
            self._groups.setdefault((seq_len or 0) % _ALIGNMENT == 0, []).append(seq_len)

    def __getstate__(self) -> dict[str, Any]:
        """For another process: what is scaled, without a way to record."""
        return {**self.__dict__, "_submit": _not_here, "_recorded": {}}

    @property
    def recordings(self) -> int:
        return len(self._recorded)

    def prefetch(self) -> None:
        """Ask for the recordings that will be needed first, without waiting for them."""
        for seq_lens in self._groups.values():
            for point in _recording_points(seq_lens, self._compiled)[:2]:
                self.ask(*point)

    def ask(self, batch_size: int, seq_len: int | None) -> Future[Trace]:
        """The recording at one size, which is on its way."""
        size = (batch_size, seq_len)
        if size not in self._recorded:
            self._recorded[size] = self._submit(batch_size, seq_len)
        return self._recorded[size]

    def at(self, batch_size: int, seq_len: int | None) -> Trace:
        """The step's trace at one size.

        Raises:
            RecordingFailed: a recording failed; `UserCodeFailed` if it was the user's code that did.
        """
        if self._compiled and (batch_size, seq_len) in self._recorded:
            return self.recorded(batch_size, seq_len)
        scaled = self._scaled_at(seq_len) if batch_size > 1 else None
        if scaled is not None:
            return scaled.at(batch_size, seq_len).on(self.reduces_on)
        if batch_size == 1 and (ones := self._ones_at(seq_len)) is not None:
            return ones.at(1, seq_len).on(self.reduces_on)
        if (batch_size, seq_len) not in self.unscaled:
            self.unscaled.append((batch_size, seq_len))
        self.ask(batch_size, seq_len)
        group = self._ones_group(seq_len) if batch_size == 1 else []
        if group and seq_len == min(group):  # where a single sample is in question, it is at longer lengths as well
            self.ask(1, max(group))
        return self.recorded(batch_size, seq_len)

    def _ones_group(self, seq_len: int | None) -> list[int]:
        """The lengths at which a batch of one is scaled together; empty where it is not."""
        group = [length for length in self._groups.get((seq_len or 0) % _ALIGNMENT == 0, ()) if length is not None]
        return [] if self._compiled or len(group) < 3 or seq_len not in group else group

    def _ones_at(self, seq_len: int | None) -> ScaledTrace | None:
        """For a batch of one, once another length has been recorded: scaled from the shortest length and the longest.

        Its events differ from those of larger batches, so it is never scaled from these.
        """
        group = self._ones_group(seq_len)
        if not group or (1, seq_len) in self._recorded:
            return None
        ends = min(group), max(group)
        if seq_len not in self._ones and any((1, length) in self._recorded for length in group):
            traces = [future.result() for future in [self.ask(1, length) for length in ends]]
            self._ones.update(dict.fromkeys(group, None if traces[0].compiled else fit(traces, group, (1,))))
        return self._ones.get(seq_len)

    def two_sizes(self, seq_len: int | None) -> tuple[int, int]:
        """Two batch sizes to draw a line through; of an unscaled step two that are recorded already."""
        if self.is_scaled(seq_len):
            return 2, 32
        (small, _), (large, _), _ = _recording_points([seq_len], self._compiled)
        return small, large

    def is_scaled(self, seq_len: int | None) -> bool:
        """Whether all batch sizes but one come from the same few recordings."""
        return self._scaled_at(seq_len) is not None

    def _scaled_at(self, seq_len: int | None) -> ScaledTrace | None:
        if not self._scales:
            return None
        if seq_len not in self._scaled:
            group = self._groups.setdefault((seq_len or 0) % _ALIGNMENT == 0, [])
            if seq_len not in group:
                group.append(seq_len)
            lengths = [length for length in group if length not in self._scaled]
            scaled = self._fit(lengths)
            if scaled is not None:
                self._scaled.update(dict.fromkeys(lengths, scaled))
            else:
                self._scaled[seq_len] = self._fit([seq_len]) if len(lengths) > 1 else None
        return self._scaled[seq_len]

    def replays(self, batch_size: int, seq_len: int | None) -> dict[Any, Any]:
        """Where replays at a size may be kept: with the scaled trace, for as long as that is; else for one use."""
        scaled = self._scaled_at(seq_len) if batch_size > 1 else None
        return {} if scaled is None or scaled.compiled else scaled.replays.setdefault(self.reduces_on, {})

    def polynomials_of(self, blocks: Iterable[int], seq_len: int | None) -> list[Polynomial]:
        """What gives the bytes of each of these blocks, where the step is scaled (RuntimeError where it is not)."""
        scaled = self._scaled_at(seq_len)
        if scaled is None:
            raise RuntimeError(f"the step at length {seq_len} is not scaled")
        bytes_of = scaled.polynomials_on(self.reduces_on)
        return [bytes_of[block] for block in blocks]

    def confirm(self, batch_sizes: Iterable[int], seq_len: int | None) -> bool:
        """Record the step at the sizes that decide an answer, where it was scaled to them; whether that changes it.

        Of a compiled step each of them is recorded. An eager step is recorded at the largest, unless one of as many
        samples and about as many tokens has been: where it is not what it was scaled to, as of a loss in chunks of
        which smaller sizes fill one, every size is recorded from then on.
        """
        if not self._compiled:
            return self._differs_at(max(batch_sizes), seq_len)
        new = [size for size in batch_sizes if (size, seq_len) not in self._recorded]
        traces = [future.result() for future in [self.ask(size, seq_len) for size in new]]
        self.unscaled += [(size, seq_len) for size in new]
        scaled = self._scaled.get(seq_len)
        if len(traces) > 1 and scaled is not None and scaled.structure != traces[0].structure:
            self._scaled[seq_len] = fit(traces, [seq_len]) or scaled
        return bool(new)

    def _differs_at(self, batch_size: int, seq_len: int | None) -> bool:
        scaled, tokens = self._scaled_at(seq_len), batch_size * (seq_len or 1)
        if scaled is None or batch_size == 1:
            return False
        if any(size >= batch_size and _ABOUT_AS_MANY * most >= tokens for size, most in scaled.checked):
            return False
        if _taken(self.recorded(batch_size, seq_len)) == _taken(scaled.at(batch_size, seq_len).on(self.reduces_on)):
            scaled.checked.append((batch_size, tokens))
            return False
        self._scaled = {length: None if each is scaled else each for length, each in self._scaled.items()}
        return True

    def recorded(self, batch_size: int, seq_len: int | None) -> Trace:
        """The step's trace at one size, recorded at that very size."""
        return self.ask(batch_size, seq_len).result().on(self.reduces_on)

    def for_lengths(self, step: int, longest: int) -> LengthTraces:
        """The same step at one batch size and many lengths."""
        return LengthTraces(self._submit, step, longest, self.reduces_on)

    def _fit(self, seq_lens: list[int | None]) -> ScaledTrace | None:
        points = _recording_points(seq_lens, self._compiled)
        for count in (2, 3):
            futures = [self.ask(*point) for point in points[:count]]
            traces = [future.result() for future in futures]
            scaled = _fit_once(tuple(traces), tuple(seq_lens))
            if scaled is None and traces[0].compiled and not self._compiled:
                self._compiled = True
                return self._fit(seq_lens)
            self._compiled = traces[0].compiled
            if scaled is not None:
                return scaled
            if any(trace.structure != traces[0].structure for trace in traces):
                break  # no other recording mends that
        return None


def _recording_points(seq_lens: list[int | None], compiled: bool) -> list[tuple[int, int | None]]:
    """Where to record: the shortest, the longest, and one between them."""
    ordered = sorted(seq_lens, key=lambda seq_len: seq_len or 0)
    sizes: tuple[int, ...] = _BATCH_SIZES
    if compiled:
        enough = sum(size * (ordered[0] or 1) < _COMPILED_TOKENS for size in _COMPILED_BATCH_SIZES[:-3])
        sizes = _COMPILED_BATCH_SIZES[enough : enough + 3]
    return list(zip(sizes, (ordered[0], ordered[-1], ordered[len(ordered) // 2]), strict=True))


# Lengths to record at, as multiples of the step in which lengths are tried.
_LENGTHS = (7, 13, 11)


class LengthTraces(TraceSource):
    """Traces at one batch size and at multiples of a length, from recordings at a few short ones.

    Each allocation is a polynomial of the length alone, so that a batch of one sample is served as well. Where none
    fits, or once `exact` is set, each length is recorded itself.

    Args:
        step: every length asked for is a multiple of this; of 128, kernels' paddings make no difference.
        longest: no longer one is recorded.
    """

    def __init__(self, submit: Submit, step: int, longest: int, reduces_on: Multiprocessors = NO_SCRATCH) -> None:
        super().__init__(submit, (), reduces_on=reduces_on)
        self._lengths = [step * times for times in _LENGTHS if step * times <= longest]
        self._steps = [step * times for times in (1, 2, 3, 5, 8)]
        self._fitted: ScaledTrace | None = None
        self.exact = len(self._lengths) < len(_LENGTHS)

    def at(self, batch_size: int, seq_len: int | None) -> Trace:
        """The step's trace at one length."""
        if self._fitted is None and not self.exact:
            futures = [self.ask(batch_size, length) for length in self._lengths]
            traces = [future.result() for future in futures]
            self._fitted = None if traces[0].compiled else fit(traces, self._steps, (batch_size,))
            self.exact = self._fitted is None
        if self.exact or self._fitted is None:
            return self.recorded(batch_size, seq_len)
        return self._fitted.at(batch_size, seq_len).on(self.reduces_on)
