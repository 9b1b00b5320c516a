"""Tracebacks that cross from the pool's process: where each call was, not the map of every function that was called.

billiard copies the positions of every instruction of every function on the way, and pickles them with each error: tens
of kilobytes for a task that is tried again, a millisecond and more of either process. Who prints a traceback reads one
position of each function.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, repeat
from types import CodeType, FrameType, TracebackType

from inference_tasks.worker import seam

__all__ = ["BriefTraceback", "use_brief_tracebacks"]

Position = tuple[int | None, int | None, int | None, int | None]

NOWHERE: Position = (None, None, None, None)


class _Everywhere:
    """The positions of a code of which one is asked for: that one, whatever the instruction."""

    def __init__(self, position: Position) -> None:
        self._position = position

    def __iter__(self) -> Iterator[Position]:
        return repeat(self._position)


class _BriefCode(seam.einfo._Code):  # type: ignore[misc]
    _co_positions: _Everywhere

    def __init__(self, code: CodeType) -> None:
        # mirrors billiard.einfo._Code, without the positions
        self.co_filename, self.co_name, self.co_qualname = code.co_filename, code.co_name, code.co_qualname
        self.co_firstlineno, self.co_flags, self.co_argcount = code.co_firstlineno, code.co_flags, code.co_argcount
        self.co_nlocals, self.co_stacksize = code.co_nlocals, code.co_stacksize
        self.co_names = self.co_varnames = self.co_cellvars = self.co_freevars = ()
        self.co_code = self.co_lnotab = b""


class _BriefFrame(seam.einfo._Frame):  # type: ignore[misc]
    Code = _BriefCode


class BriefTraceback(seam.einfo.Traceback):  # type: ignore[misc]
    """What billiard keeps of a traceback, for ``traceback.print_tb`` and its like."""

    Frame = _BriefFrame

    def __init__(self, tb: TracebackType, max_frames: int = seam.einfo.DEFAULT_MAX_FRAMES, depth: int = 0) -> None:
        super().__init__(_Alone(tb), max_frames, depth)
        self.tb_frame.f_code._co_positions = _Everywhere(_position(tb))
        if tb.tb_next is not None:
            follows = depth <= max_frames
            self.tb_next = BriefTraceback(tb.tb_next, max_frames, depth + 1) if follows else seam.einfo._Truncated()


class _Alone:
    """One entry of a traceback without those that follow."""

    tb_next = None

    def __init__(self, tb: TracebackType) -> None:
        self.tb_frame: FrameType = tb.tb_frame
        self.tb_lineno = tb.tb_lineno
        self.tb_lasti = tb.tb_lasti


def _position(tb: TracebackType) -> Position:
    return NOWHERE if tb.tb_lasti < 0 else _position_in(tb.tb_frame.f_code, tb.tb_lasti // 2)


@lru_cache(maxsize=512)
def _position_in(code: CodeType, instruction: int) -> Position:
    return next(islice(code.co_positions(), instruction, None), NOWHERE)


def use_brief_tracebacks() -> None:
    """Have the errors of this process, and of those that it forks, carry brief tracebacks."""
    seam.einfo.Traceback = BriefTraceback
