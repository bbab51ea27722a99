"""The stream as a whole: what comes out of it, in which order, and how it ends."""

import copy
import os
import signal
import threading
import time

import cv2
import numpy as np
import pytest
import torch

from tests.stream.conftest import (
    HEIGHT,
    WIDTH,
    damage,
    draw,
    number_of,
    read_video,
    write_video,
)
from vim_mm.stream.frames import Source, Video
from vim_mm.stream.overlay import Overlay
from vim_mm.stream.pixels import FrameError
from vim_mm.stream.predictor import Instances, Predictor, Slot
from vim_mm.stream.running import SLOTS, Stream
from vim_mm.stream.sinks import VideoFile, fit


class Counting:
    """In place of a model: the label of every pixel is the number that the frame shows."""

    def __init__(self, seconds=0.0, error=None):
        self.seconds, self.error, self.submitted = seconds, error, []

    def slot(self):
        return Slot()

    def prepare(self, size):
        pass

    def submit(self, slot):
        number = number_of(slot.picture)
        self.submitted.append(number)
        if self.error is not None and number == 5:
            raise self.error
        time.sleep(self.seconds)
        slot._result = np.full(slot.picture.shape[:2], number, np.uint8)

    def result(self, slot):
        return slot._result


class Drawn(Source):
    """Frames from memory; notes how far it has been read."""

    def __init__(self, frames, live=False, interval=0.0):
        self.pictures, self.live, self.interval, self.position = frames, live, interval, 0
        self.length = None if live else len(frames)

    def frames(self, allocate):
        for picture in self.pictures:
            self.position += 1
            if picture is None:
                yield None
                continue
            time.sleep(self.interval)
            buffer = allocate(picture.shape)
            if buffer is not None:
                buffer[...] = picture
            yield buffer


class Kept:
    """A sink."""

    def __init__(self, wanted=10**9, seconds=0.0, error=None):
        self.pictures, self.closed = [], False
        self.wanted, self.seconds, self.error = wanted, seconds, error

    def write(self, picture):
        if self.error is not None:
            raise self.error
        time.sleep(self.seconds)
        self.pictures.append(picture)
        return len(self.pictures) < self.wanted

    def close(self):
        self.closed = True


def overlay():
    return Overlay([str(i) for i in range(64)], [(4 * i, 0, 0) for i in range(64)], alpha=1.0)


def stream(source, predictor=None, sinks=(), **options):
    return Stream(source, predictor or Counting(), overlay(), sinks, **options)


def drawn_numbers(pictures):
    """From the colour, red, that the overlay gives a label."""
    return [int(picture[0, 0, 2]) // 4 for picture in pictures]


def test_frames_come_out_in_order_each_with_its_own_prediction():
    seen = []
    sink = Kept()
    summary = stream(
        Drawn([draw(i) for i in range(30)]),
        sinks=[sink],
        on_result=lambda number, slot, labels: seen.append((number, int(labels[0, 0]))),
    ).run()
    assert seen == [(i, i) for i in range(30)]
    assert drawn_numbers(sink.pictures) == list(range(30)) and sink.closed
    assert (summary.predicted, summary.unreadable, summary.interrupted) == (30, 0, False)
    assert len(summary.latencies) == 30 and summary.seconds > 0
    assert str(summary).startswith('30 of 30 frames predicted; ')
    assert str(summary).endswith('; 0 unreadable')


def test_an_unreadable_frame_is_counted_and_its_place_taken_by_the_one_before():
    frames = [None, draw(1), draw(2), None, None, draw(5)]
    sink = Kept()
    summary = stream(Drawn(frames), sinks=[sink]).run()
    assert drawn_numbers(sink.pictures) == [0, 1, 2, 2, 2, 5]
    assert (summary.predicted, summary.unreadable) == (3, 3)
    assert '3 of 6 frames predicted' in str(summary) and '3 unreadable' in str(summary)


def test_a_frame_that_cannot_be_resized_is_told_and_counted(capfd):
    asked = []

    class Particular(Counting):
        def prepare(self, size):
            asked.append(size)
            if size[0] < 2:
                raise FrameError(f'frames of {size[0]} x {size[1]} pixels cannot be resized')

    thin = np.zeros((1, 300, 3), np.uint8)
    frames = [draw(0), *[thin] * (2 * SLOTS), draw(2), draw(3)]
    sink = Kept()
    summary = stream(Drawn(frames), Particular(), [sink]).run()
    assert (summary.predicted, summary.unreadable) == (3, 2 * SLOTS)
    assert drawn_numbers(sink.pictures) == [0] * (2 * SLOTS + 1) + [2, 3]
    assert capfd.readouterr().out.count('frames of 1 x 300 pixels cannot be resized') == 1
    assert asked.count((1, 300)) == 1


def test_the_limit_and_a_sink_that_wants_no_more():
    summary = stream(Drawn([draw(i) for i in range(30)]), limit=7).run()
    assert summary.predicted == 7 and 'more' not in str(summary)
    sink = Kept(wanted=4)
    source = Drawn([draw(i) for i in range(60)], interval=0.002)
    summary = stream(source, sinks=[sink]).run()
    assert summary.predicted < 60 and 'more' not in str(summary)
    assert drawn_numbers(sink.pictures)[:4] == [0, 1, 2, 3] and sink.closed


def test_a_source_with_fewer_frames_than_it_names():
    source = Drawn([draw(i) for i in range(7)])
    source.length = 12
    summary = stream(source, limit=10).run()
    assert str(summary).endswith('; the source names 3 more, which it does not hold')


@pytest.mark.parametrize('slow', ['model', 'writer'])
def test_few_frames_are_under_way_however_slow_a_stage_is(slow):
    source = Drawn([draw(i) for i in range(40)])
    sink = Kept(seconds=0.005 if slow == 'writer' else 0.0)
    ahead = []

    class Watched(Kept):
        def write(self, picture):
            ahead.append(source.position - len(sink.pictures))
            return sink.write(picture)

    predictor = Counting(0.005 if slow == 'model' else 0.0)
    summary = stream(source, predictor, [Watched()]).run()
    assert summary.predicted == 40
    assert max(ahead) <= 2 * SLOTS + 2


def test_a_live_source_drops_what_nobody_takes():
    source = Drawn([draw(i) for i in range(40)], live=True, interval=0.002)
    summary = stream(source, Counting(0.02)).run()
    assert summary.predicted + summary.unreadable == 40
    assert summary.unreadable > 10 and summary.predicted >= SLOTS


def test_an_interruption_finishes_what_is_under_way_and_closes(tmp_path):
    video = VideoFile(tmp_path / 'out.mp4', 12.0)
    summary = stream(
        Drawn([draw(i) for i in range(30)]), Counting(error=KeyboardInterrupt()), [video]
    ).run()
    assert summary.interrupted and str(summary).startswith('interrupted: 5 of 5 frames')
    frames, _ = read_video(tmp_path / 'out.mp4')
    assert len(frames) == video.frames == 5
    assert [path.name for path in tmp_path.iterdir()] == ['out.mp4']


class Interrupted(Counting):
    """Gets Ctrl-C while it predicts its sixth frame; notes whether it could finish that."""

    def __init__(self, times=1, number=signal.SIGINT):
        super().__init__()
        self.times, self.number, self.finished = times, number, False

    def submit(self, slot):
        super().submit(slot)
        if number_of(slot.picture) == 5:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
                time.sleep(0.01)
            self.finished = True


@pytest.fixture
def ctrl_c():
    """Python's handler, which a shell takes from what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures('ctrl_c')
def test_ctrl_c_does_not_throw_the_model_out_of_its_work():
    predictor, kept = Interrupted(), Kept()
    summary = stream(Drawn([draw(i) for i in range(30)]), predictor, [kept]).run()
    assert predictor.finished and kept.closed
    assert summary.interrupted and str(summary).startswith('interrupted: 6 of 6 frames')
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures('ctrl_c')
def test_a_second_ctrl_c_does_not_wait():
    predictor, kept = Interrupted(times=2), Kept()
    summary = stream(Drawn([draw(i) for i in range(30)]), predictor, [kept]).run()
    assert not predictor.finished and kept.closed and len(kept.pictures) == 5
    assert summary.interrupted


@pytest.mark.usefixtures('ctrl_c')
def test_ctrl_c_while_the_sinks_still_write():
    """Everything is predicted by then; the sinks get it all, and are closed."""
    kept = Kept(seconds=0.05)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    summary = stream(Drawn([draw(i) for i in range(12)]), sinks=[kept]).run()
    assert summary.interrupted and kept.closed and len(kept.pictures) == 12


def test_sigterm_as_the_tool_sets_it():
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        predictor, kept = Interrupted(number=signal.SIGTERM), Kept()
        summary = stream(Drawn([draw(i) for i in range(30)]), predictor, [kept]).run()
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert predictor.finished and summary.interrupted and len(kept.pictures) == 6


def test_the_handler_of_a_caller_stays():
    got = []
    before = signal.signal(signal.SIGINT, lambda *_: got.append(1))
    try:
        summary = stream(Drawn([draw(i) for i in range(30)]), Interrupted()).run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert got == [1] and summary.predicted == 30 and not summary.interrupted


def test_a_stream_in_a_thread_leaves_signals_alone():
    summaries = []
    whole = stream(Drawn([draw(i) for i in range(30)]))
    thread = threading.Thread(target=lambda: summaries.append(whole.run()))
    thread.start()
    thread.join(20)
    assert summaries[0].predicted == 30


@pytest.mark.usefixtures('ctrl_c')
def test_ctrl_c_ends_the_wait_for_a_camera():
    over = threading.Event()

    class Silent(Drawn):
        def frames(self, allocate):
            yield from super().frames(allocate)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            self.ended_by_the_stream = over.wait(20)  # no further frame comes

    source = Silent([draw(i) for i in range(3)], live=True, interval=0.05)
    whole = stream(source)
    end = whole.end
    whole.end = lambda: (over.set(), end())
    summary = whole.run()
    assert source.ended_by_the_stream
    assert summary.interrupted and summary.predicted == 3


@pytest.mark.parametrize('where', ['model', 'sink'])
def test_an_error_ends_the_stream_and_is_raised(where):
    error = OSError('no room')
    broken, kept = Kept(error=error if where == 'sink' else None), Kept()
    predictor = Counting(error=error if where == 'model' else None)
    source = Drawn([draw(i) for i in range(60)])
    source.close = lambda: setattr(source, 'closed', True)
    with pytest.raises(OSError, match='no room'):
        stream(source, predictor, [kept, broken]).run()
    assert broken.closed and kept.closed and source.closed
    assert not {'_read', '_draw', '_write'} & {thread.name for thread in threading.enumerate()}


def test_a_video_that_cannot_be_written_is_the_error_that_is_told(tmp_path):
    (tmp_path / 'out.mkv').mkdir()
    source, kept = Drawn([draw(i) for i in range(30)]), Kept()
    with pytest.raises(OSError, match='OpenCV cannot write'):
        stream(source, sinks=[VideoFile(tmp_path / 'out.mkv', 12.0), kept]).run()
    assert kept.closed


def test_a_sink_that_cannot_be_closed_leaves_none_open():
    class Broken(Kept):
        def close(self):
            raise OSError('no room for the index')

    kept = Kept()
    with pytest.raises(OSError, match='no room for the index'):
        stream(Drawn([draw(0)]), sinks=[Broken(), kept]).run()
    assert kept.closed


@pytest.mark.parametrize('ending', ['avi', 'mkv', 'mp4'])
def test_the_written_video_has_rate_number_and_size_of_the_source(ending, tmp_path):
    source = Video(write_video(tmp_path / 'in.avi', 20, rate=12.0))
    video = VideoFile(tmp_path / f'out.{ending}', source.rate)
    stream(source, sinks=[video]).run()
    frames, rate = read_video(tmp_path / f'out.{ending}')
    assert len(frames) == video.frames == 20 and rate == pytest.approx(12.0)
    assert {frame.shape for frame in frames} == {(HEIGHT, WIDTH, 3)}
    reds = [int(np.median(frame[..., 2])) for frame in frames]
    assert np.abs(np.array(reds) - 4 * np.arange(20)).max() <= 6  # lossy


def test_a_damaged_video_keeps_its_number_of_frames(tmp_path):
    source = Video(damage(write_video(tmp_path / 'in.mkv', 60, codec='mp4v')))
    video = VideoFile(tmp_path / 'out.mkv', source.rate)
    summary = stream(source, sinks=[video]).run()
    assert summary.unreadable > 0 and summary.predicted + summary.unreadable == 60
    assert len(read_video(tmp_path / 'out.mkv')[0]) == 60


def test_frames_of_other_sizes_are_fitted_into_the_first():
    wide = fit(np.full((10, 40, 3), 200, np.uint8), (20, 20))
    assert wide.shape == (20, 20, 3)
    assert (wide[8:12] == 200).all() and not wide[:7].any() and not wide[13:].any()


def infer(task, picture, tmp_path):
    """The prediction of tools/infer.py for a picture."""
    from mmengine.dataset import Compose, pseudo_collate

    cv2.imwrite(str(tmp_path / 'picture.png'), picture)
    data = Compose(task.transforms)(dict(img_path=str(tmp_path / 'picture.png'), img_id=0))
    with torch.no_grad():
        return task.model.test_step(pseudo_collate([data]))[0]


@pytest.mark.parametrize('mode', ['whole', 'slide'])
def test_labels_are_those_of_infer(mode, seg, tmp_path, monkeypatch):
    if mode == 'slide':
        window = dict(mode='slide', crop_size=(32, 32), stride=(24, 20))
        monkeypatch.setattr(seg.model, 'test_cfg', type(seg.model.test_cfg)(window))
    pictures = [draw(0), draw(9), draw(20, 64, 80)]
    labels = []
    predictor = Predictor(seg.model, seg.transforms)
    stream(
        Drawn(pictures), predictor, on_result=lambda number, slot, x: labels.append(x.copy())
    ).run()
    for picture, found in zip(pictures, labels, strict=True):
        truth = infer(seg, picture, tmp_path).pred_sem_seg.data[0].numpy()
        assert found.dtype == np.uint8 and np.array_equal(found, truth)
        assert len(np.unique(found)) > 1
    assert not np.array_equal(labels[0], labels[1])


@pytest.mark.slow
def test_compiled_labels_are_those_of_infer(seg, tmp_path, monkeypatch):
    original, compiled = torch.compile, []

    def compile_quickly(function):
        compiled.append(function.__qualname__)
        return original(function, backend='aot_eager')  # Inductor takes minutes

    monkeypatch.setattr(torch, 'compile', compile_quickly)
    model = copy.deepcopy(seg.model)
    predictor = Predictor(model, seg.transforms, compile=True)
    labels = []
    stream(Drawn([draw(9)]), predictor, on_result=lambda n, slot, x: labels.append(x.copy())).run()
    assert [name.rpartition('.')[2] for name in compiled] == ['_backbone', '_head', 'labels']
    truth = infer(seg, draw(9), tmp_path).pred_sem_seg.data[0].numpy()
    assert (labels[0] == truth).mean() > 0.995  # where logits are nearly equal


def test_instances_are_those_of_infer(det, tmp_path):
    predictor = Predictor(det.model, det.transforms, score=0.1, timed=True)
    seen = []
    stream(
        Drawn([draw(7)]),
        predictor,
        on_result=lambda number, slot, x: seen.append((x, slot.seconds)),
    ).run()
    ((found, seconds),) = seen
    truth = infer(det, draw(7), tmp_path).pred_instances
    truth = truth[truth.scores >= 0.1]
    order = truth.scores.argsort(descending=True)
    assert len(order) > 0
    assert np.array_equal(found.boxes, truth.bboxes[order].numpy())
    assert np.array_equal(found.scores, truth.scores[order].numpy())
    assert np.array_equal(found.masks, truth.masks[order].numpy())
    assert [*seconds] == ['preprocess', 'backbone', 'head', 'postprocess', 'download']
    assert all(0 < value < 60 for value in seconds.values())


def test_instances_are_drawn_where_they_are():
    masks = np.zeros((2, 40, 60), bool)
    masks[0, 20:30, 10:20] = masks[1, 20:30, 40:50] = True
    found = Instances(
        boxes=np.array([[10, 20, 19, 29], [40, 20, 49, 29.0]]),
        labels=np.array([0, 1]),
        scores=np.array([0.9, 0.5]),
        masks=masks,
    )
    picture = np.zeros((40, 60, 3), np.uint8)
    draw_over = Overlay(['a', 'b'], [(200, 0, 0), (0, 100, 0)], alpha=0.5)
    drawn = draw_over(picture, found)
    assert drawn[25, 15].tolist() == [0, 0, 100] and drawn[25, 45].tolist() == [0, 50, 0]
    # Its box, whose lines newer versions of OpenCV smooth.
    assert np.abs(drawn[20, 12].astype(int) - [0, 0, 200]).max() <= 8
    assert not drawn[33:].any() and not picture.any()


def test_more_classes_than_a_byte_holds_are_drawn_too():
    palette = [(i % 256, i // 256, 0) for i in range(300)]
    draw_over = Overlay([str(i) for i in range(300)], palette, alpha=1.0)
    labels = np.array([[0, 299]], np.int16)
    drawn = draw_over(np.zeros((1, 2, 3), np.uint8), labels)
    assert drawn.tolist() == [[[0, 0, 0], [0, 1, 43]]]
