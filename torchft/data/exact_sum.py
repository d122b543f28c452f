"""Sums of gradients whose bits do not depend on the order of the additions or on the ranks that compute the
parts.

A float sum depends on the order of its terms; a sum of integers does not. :class:`ExactSum` turns the
gradients of each unit into integers with a scale per tensor, adds them up in int64 buffers, and turns the sum
over all units of all ranks and groups back into gradients. It uses no process groups: the caller reduces
:attr:`ExactSum.in_group` and :attr:`ExactSum.buffers`.

One attempt at a step::

    total.begin()
    for unit in units:                      # of this rank
        loss.backward()
        total.add(counted=unit.weight != 0)
    for buffer in total.in_group:
        ...                                 # SUM over the ranks of the group
    for buffer in total.buffers:
        ...                                 # SUM over the groups
    if not total.read():                    # equal on all ranks
        ...                                 # repeat from begin(): the next attempt has scales that fit
    assert total.units == units_of_the_batch
    optimizer.step()
    total.commit()                          # after the vote; abandon() if the step is not committed

Scales
    The scale of a tensor is an exponent ``c``, a multiple of 8: a gradient below ``2**c`` fits, and its last
    bit is ``2**(c - bits)``. Each unit asks for the exponent that leaves 8 to 15 bits above its largest
    gradient.
    The buffers also count how many units asked for each exponent, so every rank learns the largest one
    from the sum:

    - a step is repeated if the largest exponent is more than 8 above the scale (a unit may not have fit), or
      more than 16 below it (too few bits of the gradients are left); the repetition uses the largest exponent
      as its scale;
    - a committed step sets the next scale to the largest exponent, or to the last scale minus 8 if that is
      larger.

    Both depend only on the units of the batch and on the committed scales. So the scales equal those of a run
    in one process, even if attempts failed. The first step starts with the finest scale and is repeated once,
    which finds the scales without a guess and without another kind of reduction. With deterministic backward
    passes no step is repeated more than once, and none is if the largest gradients change by a factor of at
    most 2**8 from step to step.

Bits
    ``bits`` is 63 minus the number of bits of ``max_units``: a unit is at most ``2**bits`` in magnitude, and
    ``max_units`` of them at most ``2**63 - 2**bits``. That is 55 bits for up to 255 units, and 42 for up to
    2**20, the largest number allowed.

Error
    With n units, each element differs from the exact sum by at most ``n * 2**(c - bits - 1)``, before it is
    rounded to the type of the parameter. Let m be the largest magnitude in the tensor's gradients of the
    units of this step, or 2**-136 if all are below. Then the error is at most ``n * m * 2**(31 - bits)``, and
    ``n * m * 2**(15 - bits)`` if the step has the scale that its units ask for, as in a repetition. With up
    to 255 units, these are 2**-24 and 2**-40 of m per unit. A plain sum in float32 may lose 2**-24 of the
    partial sum in each addition. Float32, bfloat16 and float16 keep their precision in elements near m.
    Float64 does not: about 40 of its 53 bits are left. Elements far below m lose more: a value below half of
    the last bit counts as zero. A sum of more than 53 bits is rounded to 53 bits before it is rounded to the
    type of the parameter.

Special values
    A tensor with NaN or infinity in any unit is NaN in all its elements on all ranks. Nothing is repeated for
    it, and its scale follows the other units, if any. If no unit of any rank has a gradient for a tensor, the
    tensor has none after the sum. If only some units lack one, they count as zero.

Requirement: the gradients of a unit must have the same bits on every rank that may compute them. This needs
deterministic kernels, the same kind of device, versions and number of threads, random numbers (dropout) that
depend on the unit and not on the rank, no buffers that units change (BatchNorm), and the same
``torch.set_flush_denormal``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Optional

import torch

_FORMAT = 1  # version of the saved state
_MOST_UNITS = 2**20
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Scales are numbered: scale k is the exponent FINEST + k * _GRID. There are _GRID bits of headroom, so a unit
# that asks for scale k + 1 still fits at scale k.
FINEST = -128
_GRID = 8
_ABOVE = 1
_BELOW = 2

# Columns of the counts of a tensor. Each unit adds its scale and the square of it, so that the sum shows
# whether all had the same; a unit with a gradient adds 1 to NOT_FINITE, to ZERO, or to the column of the
# scale that it asks for.
_SCALE, _SQUARE, _NOT_FINITE, _ZERO, _ASKED = range(5)

# Elements converted at once. On a CPU the temporaries stay in the cache: seven times as fast.
_PIECE = 2**17
_PIECE_ON_DEVICE = 2**24
# Elements that are scattered at once, of all ranks: 32 MiB.
_SCATTERED = 2**22


class ScalesDiffer(RuntimeError):
    """Units of a reduction became integers at different scales: the step must not be committed."""


class ExactSum:
    """The sum of the gradients of one model over the units of a batch. The module's docstring has its
    guarantees.

    It takes eight bytes for each element of a parameter, or of this rank's shard. Not thread-safe.

    Args:
        parameters: ``model.named_parameters()``; those that require a gradient are summed. The saved state
            contains their names, which must be equal in all groups.
        max_units: number of units of the largest batch, over all ranks and groups.
        ranks: number of ranks among which each parameter that is a DTensor is sharded in one dimension.
            :meth:`add_sharded` gets its gradients.

    Raises:
        ValueError: ``max_units`` is out of range, or no parameter requires a gradient.
        TypeError: a parameter has a type other than float16, bfloat16, float32 and float64.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], max_units: int, ranks: int = 1
    ) -> None:
        if not isinstance(max_units, int) or isinstance(max_units, bool) or not 1 <= max_units <= _MOST_UNITS:
            raise ValueError(f"max_units is {max_units!r}: allowed are whole numbers from 1 to 2**20")
        self._all = list(parameters)
        summed = [(name, parameter) for name, parameter in self._all if parameter.requires_grad]
        if not summed:
            raise ValueError("parameters has none that requires a gradient")
        for name, parameter in summed:
            if parameter.dtype not in _DTYPES:
                allowed = ", ".join(str(dtype) for dtype in _DTYPES)
                raise TypeError(f"parameter {name} is of {parameter.dtype}: allowed are {allowed}")
        self._names = {name for name, _ in summed}
        bits = 63 - max_units.bit_length()
        largest = max(_exponent(torch.finfo(parameter.dtype).max) for _, parameter in summed)
        self._num_scales = _asked(largest) + 1
        of_part: dict[tuple[bool, torch.device], list[tuple[str, torch.nn.Parameter]]] = {}
        for name, parameter in summed:
            key = hasattr(parameter, "placements"), parameter.device
            of_part.setdefault(key, []).append((name, parameter))
        self._sharded = [
            _ShardedPart(named, bits, self._num_scales, ranks)
            for (sharded, _), named in of_part.items()
            if sharded
        ]
        self._whole = [
            _Part(named, bits, self._num_scales) for (sharded, _), named in of_part.items() if not sharded
        ]
        self._parts: list[_Part] = [*self._whole, *self._sharded]
        self._committed = dict.fromkeys(self._names, 0)
        self._attempt = dict(self._committed)
        self._next: Optional[dict[str, int]] = None
        self._adding = False
        self.units = 0  # in the sum that was read last; to be compared with the batch before the commit

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Flat int64 tensors, at most two a device; to be reduced over the groups in place, with SUM."""
        return [part.buffer for part in self._parts]

    @property
    def in_group(self) -> list[torch.Tensor]:
        """The parts of :attr:`buffers` to be reduced first over the ranks of the group: all but shards."""
        return [*(part.buffer for part in self._whole), *(part.head for part in self._sharded)]

    def begin(self) -> None:
        """Starts an attempt: clears the sum and the gradients of all parameters.

        Raises:
            RuntimeError: the parameters that require a gradient are not those at construction.
        """
        now = {name for name, parameter in self._all if parameter.requires_grad}
        if now != self._names:
            raise RuntimeError(
                f"requires_grad has changed of {', '.join(sorted(now ^ self._names))} since this sum was "
                "made: freeze and unfreeze parameters before"
            )
        for part in self._parts:
            part.begin(self._attempt)
        self._next = None
        self._adding = True

    def add(self, counted: bool = True) -> None:
        """Adds the gradients of one unit, and clears them. Does not wait for the device.

        Args:
            counted: False for a unit of weight 0, which another rank counts: its gradients are only cleared.

        Raises:
            RuntimeError: there was no ``begin()`` since the last ``read()``.
            TypeError: a gradient is sparse.
            ValueError: a sharded parameter has a gradient that ``add_sharded()`` did not get.
        """
        if not self._adding:
            raise RuntimeError("add() after read(): begin() comes first")
        for part in self._parts:
            if counted:
                part.add()
            part.clear()

    def add_sharded(
        self,
        parameters: Sequence[torch.nn.Parameter],
        gradients: torch.Tensor,
        scatter: Callable[[torch.Tensor], torch.Tensor],
        counted: bool = True,
    ) -> None:
        """Adds the gradients of one unit for parameters that are sharded over the ranks of the group, before
        the ``add()`` of the unit. All ranks call it alike, each with a unit of its own.

        Args:
            parameters: on one device, which have not got a gradient in this unit.
            gradients: of shape (ranks, elements): row r has the complete gradients' elements that belong to
                rank r, those of each parameter padded with zeros to the largest shard.
            scatter: returns this rank's row of an int64 tensor of shape (ranks, some elements), summed over
                the ranks. It is called for a block of elements after the other.
            counted: as for ``add()``.

        Raises:
            RuntimeError: a parameter got a gradient in this unit before, or is no sharded one of this sum.
            ValueError: ``gradients`` has another number of elements than the parameters.
        """
        for part in self._sharded:
            if part.has(parameters[0]):
                part.take(parameters, gradients, scatter, counted)
                return
        raise RuntimeError("add_sharded() got a parameter that is not in the sum")

    def read(self) -> bool:
        """Turns the reduced buffers into gradients.

        The buffers contain all that is needed, so a healing rank, which adds nothing, gets the same
        gradients.

        Returns:
            Whether the gradients are set. If not, the step has to be repeated from ``begin()``, with other
            scales. All ranks that read the same sum get the same value.

        Raises:
            ScalesDiffer: ranks had different scales. The step must not be committed.
        """
        self._adding = False
        found = [part.find() for part in self._parts]
        self.units = min(each.units for each in found)
        asked = {name: scale for each in found for name, scale in each.asked.items()}
        if not all(each.fits for each in found):
            self._attempt = asked
            return False
        for part, each in zip(self._parts, found):
            part.read(each)
        used = {name: scale for each in found for name, scale in each.used.items()}
        self._next = {name: max(asked[name], used[name] - 1) for name in used}
        return True

    def commit(self) -> None:
        """Commits the step: sets the scales of the next one.

        Raises:
            RuntimeError: no ``read()`` has set the gradients.
        """
        if self._next is None:
            raise RuntimeError("commit() without gradients: a read() that returns True comes first")
        self._committed, self._next = self._next, None
        self._attempt = dict(self._committed)

    def abandon(self) -> None:
        """Makes the next attempt count as a first one: the step was not committed, because of an error or a
        vote.

        Every rank must call it, even if it saw no failure; otherwise the scales of the ranks may differ.
        """
        self._attempt = dict(self._committed)
        self._next = None

    def state_dict(self) -> dict[str, Any]:
        """The committed scales, for a heal or a checkpoint. They belong to the weights."""
        return {
            "format": _FORMAT,
            "exponents": {name: FINEST + _GRID * self._committed[name] for name in sorted(self._names)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the scales from ``state_dict()``. Does not change the scales that ``commit()`` will set after
        a ``read()``.

        Raises:
            ValueError: it has another format, belongs to other parameters, or has an impossible scale.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"the saved scales have format {state.get('format')}: this version reads {_FORMAT}"
            )
        exponents = state["exponents"]
        if set(exponents) != self._names:
            raise ValueError(
                "the saved scales are of other parameters: missing are "
                f"{sorted(self._names - set(exponents))}, unknown are {sorted(set(exponents) - self._names)}"
            )
        allowed = range(FINEST, FINEST + _GRID * self._num_scales, _GRID)
        for name, exponent in exponents.items():
            if exponent not in allowed:
                raise ValueError(
                    f"the exponent of {name} is {exponent!r}: allowed are {allowed[0]} to {allowed[-1]} in "
                    f"steps of {_GRID}"
                )
        self._committed = {name: allowed.index(exponent) for name, exponent in exponents.items()}
        self._attempt = dict(self._committed)


class _Found:
    """One part's sum: scales used and asked for, gradients that exist and are finite."""

    def __init__(self, names: Sequence[str], counts: torch.Tensor, units: int) -> None:
        self.units = units
        scales, bad = counts[:, _SCALE], counts[:, _NOT_FINITE] > 0
        # n times the sum of squares equals the square of the sum only if all terms are equal.
        differ = units * counts[:, _SQUARE] != scales * scales
        if differ.any():
            which = [name for name, differs in zip(names, differ.tolist()) if differs]
            raise ScalesDiffer(
                f"the gradients of {len(which)} parameters were summed at different scales, first "
                f"{which[0]}: a rank has not abandoned a failed step, or was started with other state; the "
                "step must not be committed"
            )
        used = scales // max(1, units)
        numbers = torch.arange(counts.shape[1] - _ASKED)
        largest = torch.where(counts[:, _ASKED:] > 0, numbers, -1).amax(1)
        asked = torch.where(largest < 0, used, largest)
        self.fits = bool((bad | ((asked <= used + _ABOVE) & (asked >= used - _BELOW))).all())
        self.used = dict(zip(names, used.tolist()))
        self.asked = dict(zip(names, asked.tolist()))
        self.finite = (~bad).tolist()
        self.exists = (counts[:, _NOT_FINITE:].sum(1) > 0).tolist()


class _Part:
    """The parameters of one device, and their buffer: the number of units, counts of each tensor, values."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], bits: int, num_scales: int) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._bits = bits
        device = self._parameters[0].device
        shape = len(named), _ASKED + num_scales
        sizes = [1, shape[0] * shape[1], *map(self._num_values, self._parameters)]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.head = self.buffer[: sizes[0] + sizes[1]]
        self._units, counts, *self._values = self.buffer.split(sizes)
        self._counts = counts.view(shape)
        self._missing = torch.tensor(-1.0, dtype=torch.float64, device=device)
        self._nothing = torch.tensor(0.0, dtype=torch.float64, device=device)
        self._numbers = torch.arange(shape[1], device=device)
        self._piece = _PIECE if device.type == "cpu" else _PIECE_ON_DEVICE
        self._scales: list[int] = []
        self._scales_on_device = torch.empty(0)

    def begin(self, scales: Mapping[str, int]) -> None:
        self.buffer.zero_()
        self._scales = [scales[name] for name in self._names]
        rows = [[scale, scale * scale] for scale in self._scales]
        self._scales_on_device = torch.tensor(rows, dtype=torch.int64).to(self.buffer.device)
        self.clear()

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def add(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        for name, gradient in zip(self._names, gradients):
            if gradient is not None and gradient.layout != torch.strided:
                raise TypeError(f"the gradient of {name} is of {gradient.layout}: allowed are dense ones")
        self._count([self._peak(gradient) for gradient in gradients])
        for place, (gradient, values) in enumerate(zip(gradients, self._values)):
            if gradient is not None:
                flat = gradient.reshape(-1)
                for piece, sums in zip(flat.split(self._piece), values.split(self._piece)):
                    sums += self._scaled(piece, place).to(torch.int64)

    def _num_values(self, parameter: torch.nn.Parameter) -> int:
        return parameter.numel()

    def _count(self, peaks_of_tensors: list[torch.Tensor]) -> None:
        """Counts a unit with these largest magnitudes; see ``_peak``."""
        self._units += 1
        self._counts[:, :_NOT_FINITE] += self._scales_on_device
        peaks = torch.stack(peaks_of_tensors)
        # Not by a scatter, which some devices refuse under torch.use_deterministic_algorithms.
        columns = _columns(peaks, len(self._numbers))[:, None]
        self._counts += (self._numbers == columns) & (peaks != self._missing)[:, None]

    def _scaled(self, piece: torch.Tensor, place: int) -> torch.Tensor:
        """The gradients as whole numbers in float64, by the scale of the parameter at this place.

        A value that does not fit or is not finite becomes an arbitrary integer. That is safe, because the
        counts show it and the sum is not used.
        """
        factor = 2.0 ** (self._bits - FINEST - _GRID * self._scales[place])
        return piece.to(torch.float64, copy=True).mul_(factor).round_()

    def _peak(self, gradient: Optional[torch.Tensor]) -> torch.Tensor:
        """The largest magnitude, NaN if there is a NaN; -1 without a gradient."""
        if gradient is None:
            return self._missing
        if gradient.numel() == 0:
            return self._nothing
        low, high = torch.aminmax(gradient)
        return torch.maximum(high, -low).double()

    def find(self) -> _Found:
        """Reads the counts. Only this call waits for the device."""
        head = self.head.cpu()
        return _Found(self._names, head[1:].view(self._counts.shape), int(head[0]))

    @torch.no_grad()
    def read(self, found: _Found) -> None:
        each = zip(self._names, self._parameters, self._values, found.exists, found.finite)
        for name, parameter, values, exists, finite in each:
            if not exists:
                parameter.grad = None
                continue
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
            gradient = self._local(parameter.grad)
            if not finite:
                gradient.fill_(float("nan"))
                continue
            factor = 2.0 ** (FINEST + _GRID * found.used[name] - self._bits)
            # Elements are in the order of the shape, which is that in memory unless it is transposed.
            flat = gradient.view(-1) if gradient.is_contiguous() else gradient.new_empty(gradient.numel())
            for piece, sums in zip(flat.split(self._piece), values.split(self._piece)):
                piece.copy_(sums[: piece.numel()].to(torch.float64).mul_(factor))
            if not gradient.is_contiguous():
                gradient.copy_(flat.view(gradient.shape))

    def _local(self, gradient: Any) -> torch.Tensor:
        """The elements that this rank has of a gradient."""
        return gradient


class _ShardedPart(_Part):
    """The parameters of one device that are sharded over ranks. Their values are those of this rank's shards,
    each padded to the largest one; their counts those of this rank's units, which compute complete gradients.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], bits: int, num_scales: int, ranks: int
    ) -> None:
        self._ranks = ranks
        super().__init__(named, bits, num_scales)
        # By identity: tensors compare by their elements.
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._peaks: list[Optional[torch.Tensor]] = [None] * len(named)  # of the unit

    def has(self, parameter: torch.nn.Parameter) -> bool:
        return id(parameter) in self._places

    def clear(self) -> None:
        super().clear()
        self._peaks = [None] * len(self._parameters)

    @torch.no_grad()
    def take(
        self,
        parameters: Sequence[torch.nn.Parameter],
        gradients: torch.Tensor,
        scatter: Callable[[torch.Tensor], torch.Tensor],
        counted: bool,
    ) -> None:
        places = [self._places.get(id(parameter), -1) for parameter in parameters]
        if -1 in places or any(self._peaks[place] is not None for place in places):
            raise RuntimeError(
                "a sharded parameter got a second gradient in one unit, or is not in the sum: allowed is one "
                "backward pass a unit"
            )
        sizes = [self._values[place].numel() for place in places]
        if gradients.shape != (self._ranks, sum(sizes)):
            raise ValueError(
                f"gradients are of shape {tuple(gradients.shape)}, parameters of {self._ranks, sum(sizes)}"
            )
        for place, gradient in zip(places, gradients.split(sizes, 1)):
            self._peaks[place] = self._peak(gradient).to(self.buffer.device)
        begins = [end - size for end, size in zip(accumulate(sizes), sizes)]
        width = max(1, _SCATTERED // self._ranks)
        for begin in range(0, sum(sizes), width):
            block = gradients[:, begin : begin + width]
            integers = torch.zeros(block.shape, dtype=torch.int64, device=block.device)
            # of each parameter in the block: its place, where it is in the block, and what of it that is
            spans = [
                (place, slice(max(0, of - begin), min(width, of + size - begin)), max(0, begin - of))
                for place, of, size in zip(places, begins, sizes)
                if of < begin + width and begin < of + size
            ]
            for place, columns, _ in spans if counted else ():
                self._scale(block[:, columns], integers[:, columns], place)
            sums = scatter(integers).to(self.buffer.device)
            for place, columns, first in spans:
                of_shard = sums[columns]
                self._values[place][first : first + len(of_shard)] += of_shard

    def _scale(self, gradients: torch.Tensor, integers: torch.Tensor, place: int) -> None:
        """Writes gradients of the parameter at this place as integers, by pieces of columns."""
        columns = max(1, self._piece // self._ranks)
        for piece, whole in zip(gradients.split(columns, 1), integers.split(columns, 1)):
            whole.copy_(self._scaled(piece, place))

    @torch.no_grad()
    def add(self) -> None:
        for name, parameter, peak in zip(self._names, self._parameters, self._peaks):
            if peak is None and parameter.grad is not None:
                raise ValueError(
                    f"parameter {name} is a DTensor that FSDP2 does not reduce: its gradient has no exact sum"
                )
        self._count([self._missing if peak is None else peak for peak in self._peaks])

    def _num_values(self, parameter: Any) -> int:
        (dim,) = [placement.dim for placement in parameter.placements if placement.is_shard()]
        size = parameter.shape[dim]
        return parameter.numel() // max(1, size) * -(-size // self._ranks)

    def _local(self, gradient: Any) -> torch.Tensor:
        return gradient.to_local()


def _exponent(number: float) -> int:
    """The least e for which the number is below 2**e."""
    return int(torch.frexp(torch.tensor(number, dtype=torch.float64)).exponent)


def _asked(exponent: int) -> int:
    """The scale for a unit whose largest gradient is below 2**exponent and at least half of that."""
    return max(0, -((FINEST - _GRID - exponent) // _GRID))


def _columns(peaks: torch.Tensor, width: int) -> torch.Tensor:
    """The column in which each tensor is counted, by its largest magnitude; see ``_asked``."""
    exponents = torch.frexp(peaks).exponent.long()
    asked = -((FINEST - _GRID - exponents).div(_GRID, rounding_mode="floor"))
    columns = asked.clamp(0, width - _ASKED - 1) + _ASKED
    columns = torch.where(peaks == 0, _ZERO, columns)
    return torch.where(peaks.isfinite(), columns, _NOT_FINITE)
