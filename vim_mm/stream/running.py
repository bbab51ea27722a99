"""The stream itself: decoding, prediction, drawing and writing, each in a thread of its own.

A frame under way holds a slot, of which there are few: a reader without a free one waits, unless
its source is live. As many frames again may be drawn and wait for the writer. So memory is bounded,
however slow a stage is.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Queue, SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from vim_mm.progress import progress, say
from vim_mm.stream.frames import Source
from vim_mm.stream.overlay import Overlay
from vim_mm.stream.pixels import FrameError
from vim_mm.stream.predictor import Prediction, Predictor, Slot

SLOTS = 6
# Frames that are predicted at a time: one is uploaded while the other is computed. More would be
# later each, and no faster together.
PREDICTED_AT_A_TIME = 2
_END = object()


@dataclass
class Summary:
    """What became of the frames of a source.

    Attributes:
        predicted (int): Frames that were predicted.
        unreadable (int): Frames that could not be read or resized, or of a camera that nobody took
            in time. A written video has the frame before in their places.
        length (int | None): What the source says of its number of frames.
        limit (int | None): The number of frames that the user wants at most.
        seconds (float): From the first frame that was there to the last that was done.
        latencies (list[float]): Of each frame, seconds from where it was taken, in host memory, to
            where its prediction was.
        exhausted (bool): Whether the source has no more frames.
        interrupted (bool): Whether the user ended it by Ctrl-C.
    """

    predicted: int = 0
    unreadable: int = 0
    length: int | None = None
    limit: int | None = None
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    exhausted: bool = False
    interrupted: bool = False

    @property
    def rate(self) -> float:
        """Frames a second."""
        return self.predicted / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        frames = self.predicted + self.unreadable
        parts = [f'{self.predicted} of {frames} frames predicted']
        if self.seconds:
            parts.append(f'{self.seconds:.1f} s, {self.rate:.1f} frames/s')
        if self.latencies:
            median, worst = 1e3 * np.percentile(self.latencies, (50, 99))
            parts.append(f'{median:.1f} ms from a frame to its prediction (p99 {worst:.1f} ms)')
        parts.append(f'{self.unreadable} unreadable')
        if self.exhausted and self.length is not None:
            missing = min(self.length, self.limit or self.length) - frames
            if missing > 0:
                parts.append(f'the source names {missing} more, which it does not hold')
        return ('interrupted: ' if self.interrupted else '') + '; '.join(parts)


def _until_end(queue: Queue | SimpleQueue) -> Iterator:
    while (item := queue.get()) is not _END:
        yield item


@contextmanager
def _at_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` at the first Ctrl-C instead of raising KeyboardInterrupt; the next one raises.

    An exception at any instruction could leave a library in the middle of its work. ``act`` runs at
    any instruction as well: it must not take a lock.

    SIGTERM is treated alike where it has Python's handler of SIGINT. Other handlers stay as they
    are, and so do all if this is not the main thread, which alone may change them.
    """
    ours = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread()
        and signal.getsignal(number) is signal.default_int_handler
    ]

    def restore() -> None:
        for number in ours:
            signal.signal(number, signal.default_int_handler)

    def handle(*_: Any) -> None:
        restore()
        act()

    try:
        for number in ours:
            signal.signal(number, handle)
        yield
    finally:
        restore()


class _Thread(threading.Thread):
    """Runs a function that empties one queue and fills another.

    What it raises is kept, and ends the stream; until the end of that it goes on emptying.
    """

    def __init__(self, stream: 'Stream', function: Callable, taken_from=None, given_to=None):
        super().__init__(daemon=True, name=function.__name__)
        self.stream, self.function = stream, function
        self.taken_from, self.given_to = taken_from, given_to

    def run(self) -> None:
        try:
            self.function()
        except BaseException as error:
            self.stream.errors.append(error)
            self.stream.end()
            if self.taken_from is not None:
                for _ in _until_end(self.taken_from):
                    pass
        finally:
            if self.given_to is not None:
                self.given_to.put(_END)


class Stream:
    """Takes the frames of a source through a predictor, draws them and hands them to sinks.

    Args:
        source (Source): Closed at the end.
        predictor (Predictor): Its results come in the order of the frames.
        overlay (Overlay): Not asked if there are no sinks.
        sinks (Sequence): With ``write(picture) -> bool``, False to end the stream, and ``close()``;
            closed at the end.
        limit (int, optional): Frames at most.
        slots (int): Frames between decoding and drawing at most.
        on_result (Callable, optional): Called with number, slot and prediction of each frame.
    """

    def __init__(
        self,
        source: Source,
        predictor: Predictor,
        overlay: Overlay,
        sinks: Sequence[Any] = (),
        *,
        limit: int | None = None,
        slots: int = SLOTS,
        on_result: Callable[[int, Slot, Prediction], None] | None = None,
    ):
        self.source, self.predictor, self.overlay, self.sinks = source, predictor, overlay, sinks
        self.limit, self.on_result = limit, on_result
        self.stop, self.errors = threading.Event(), []
        # Slots bound the first three.
        self.free, self.decoded, self.predicted = (SimpleQueue() for _ in range(3))
        self.drawn: Queue = Queue(maxsize=slots)
        for _ in range(slots):
            self.free.put(predictor.slot())
        self.room = threading.Semaphore(PREDICTED_AT_A_TIME)
        self.summary = Summary(length=source.length, limit=limit)
        self._begin: float | None = None
        self._refused: set[tuple[int, int]] = set()  # sizes that cannot be predicted

    def run(self) -> Summary:
        """Until the source ends, a sink wants no more, the limit is reached, or Ctrl-C.

        After Ctrl-C the frames under way are finished and the sinks closed. A second one ends the
        prediction at once, or the wait for the sinks.

        Raises:
            Exception: What a stage raised, after the sinks were closed.
        """
        threads = [
            _Thread(self, self._read, given_to=self.decoded),
            _Thread(self, self._draw, self.predicted, self.drawn),
            _Thread(self, self._write, self.drawn),
        ]
        with _at_interrupt(self._interrupt):
            for thread in threads:
                thread.start()
            try:
                self._predict()
            except KeyboardInterrupt:
                self.summary.interrupted = True
            finally:
                self.end()
                self.predicted.put(_END)
                for thread in threads[1:]:
                    thread.join()
                for sink in self.sinks:
                    try:
                        sink.close()
                    except Exception as error:  # the others are closed all the same
                        self.errors.append(error)
                threads[0].join(timeout=5.0)  # of a camera that gives no frame, say
                if not threads[0].is_alive():
                    self.source.close()
        if self.errors:
            raise self.errors[0]
        return self.summary

    def end(self) -> None:
        """Let reading and predicting end, also where they wait."""
        self.stop.set()
        self.free.put(None)
        self.room.release()

    def _interrupt(self) -> None:
        """Let predicting end after its frame, or now if it waits for one; takes no lock."""
        self.summary.interrupted = True
        self.decoded.put(_END)

    def _read(self) -> None:
        slot: Slot | None = None

        def allocate(shape: tuple[int, int, int]) -> np.ndarray | None:
            nonlocal slot
            if slot is None:
                if self.source.live and self.free.empty():
                    return None
                slot = self.free.get()
            return None if slot is None else slot.buffer(shape)

        for number, picture in enumerate(self.source.frames(allocate)):
            if self.stop.is_set():
                return
            taken = None
            if picture is not None:
                if slot is None:
                    allocate(picture.shape)
                if slot is not None:
                    slot.put(picture)
                    taken, slot = slot, None
            self.decoded.put(taken)
            if number + 1 == self.limit:
                return
        self.summary.exhausted = True

    def _predict(self) -> None:
        """In the main thread, which is the one that Ctrl-C interrupts."""
        for slot in _until_end(self.decoded):
            if self.summary.interrupted:
                return
            if slot is not None:
                if not self._prepare(slot.picture.shape[:2]):
                    self.free.put(slot)
                    self.predicted.put(None)
                    continue
                self.room.acquire()
                if self.stop.is_set():
                    return
                slot.taken = perf_counter()
                if self._begin is None:
                    self._begin = slot.taken
                self.predictor.submit(slot)
            self.predicted.put(slot)

    def _prepare(self, size: tuple[int, int]) -> bool:
        """Make what is made once for frames of a size, as no part of any frame; False if none."""
        if size in self._refused:
            return False
        try:
            self.predictor.prepare(size)
        except FrameError as error:
            say(str(error))
            self._refused.add(size)
            return False
        return True

    def _draw(self) -> None:
        for number, slot in enumerate(_until_end(self.predicted)):
            picture = None
            if slot is None:
                self.summary.unreadable += 1
            else:
                prediction = self.predictor.result(slot)
                self.summary.latencies.append(perf_counter() - slot.taken)
                self.room.release()
                if self.on_result is not None:
                    self.on_result(number, slot, prediction)
                if self.sinks:
                    picture = self.overlay(slot.picture, prediction)
                self.free.put(slot)
                self.summary.predicted += 1
            self.drawn.put(picture)

    def _write(self) -> None:
        last, waiting = None, 0
        lengths = [n for n in (self.source.length, self.limit) if n is not None]
        pictures = _until_end(self.drawn)
        for picture in progress(pictures, 'frames', min(lengths, default=None)):
            last = last if picture is None else picture
            if last is None:  # unreadable frames before the first, whose size is not known yet
                waiting += 1
            else:
                for _ in range(waiting):
                    self._hand_over(np.zeros_like(last))
                waiting = 0
                self._hand_over(last)
            if self._begin is not None:
                self.summary.seconds = perf_counter() - self._begin

    def _hand_over(self, picture: np.ndarray) -> None:
        for sink in self.sinks:
            if not sink.write(picture):
                self.stop.set()
