"""One run: the training step as a CUDA graph, and the loop around it."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from studies.discretization.models.arms import ARMS, StudyMamba, make_net
from studies.discretization.models.other_models import PEERS
from studies.discretization.models.stiffness import IMAGES, stiffness
from studies.discretization.tasks import (
    Data,
    Task,
    loss_of,
    normalize,
    test,
    test_resolutions,
    test_spacings,
)
from vim_mm.engine.watching.run_record import card
from vim_mm.models.weight_decay import undecayed_parameters

_TESTS = 5  # points of a learning curve
_WARM_UP_CALLS = 3  # of a step, before it is captured
_CHECK = 50  # steps between two looks at the clock
_measured: set[torch.device] = set()  # by measure_step, in this process


@dataclass(frozen=True)
class Settings:
    """What all arms have in common; lr and dt_range are the grid's."""

    lr: float = 2e-3
    dt_range: tuple[float, float] = (1e-3, 0.1)
    warm_up: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.05
    clip: float = 1.0
    drop_path: float = 0.1


def autocast_of(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, else float32. No cache of weights: a graph would keep the first."""
    return torch.autocast(
        device.type, torch.bfloat16, enabled=device.type == 'cuda', cache_enabled=False
    )


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine to 0."""
    warm_up = max(1, round(settings.warm_up * steps))
    if step < warm_up:
        return settings.lr * (step + 1) / warm_up
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def build(arm: str, task: Task, seed: int, settings: Settings) -> nn.Module:
    """The network of an arm or a peer, with the weights of a seed, on the CPU."""
    if arm in PEERS:
        torch.manual_seed(seed)
        return PEERS[arm](task.size, settings.drop_path)
    return make_net(ARMS[arm], task.size, task.dense, seed, settings.dt_range, settings.drop_path)


def make_optimizer(net: nn.Module, lr: Tensor, settings: Settings) -> torch.optim.AdamW:
    """AdamW that reads its learning rate from a tensor; no decay of vectors and of what says so."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    undecayed = undecayed_parameters(net)
    for param in net.parameters():
        groups[param.ndim > 1 and param not in undecayed].append(param)
    return torch.optim.AdamW(
        [
            {'params': groups[True], 'weight_decay': settings.weight_decay},
            {'params': groups[False], 'weight_decay': 0.0},
        ],
        lr=lr,
        betas=settings.betas,
        fused=True,
        capturable=lr.is_cuda,
    )


class Step:
    """A training step, forward to optimizer, on static tensors: captured on a GPU, eager without.

    Attributes:
        plan (Tensor): (B, columns), what the step takes, to be copied into.
        lr (Tensor): The learning rate, to be filled.
        loss_sum (Tensor): Sum of the losses since it was last set to 0.
    """

    def __init__(self, net: nn.Module, data: Data, settings: Settings, graph: bool):
        device = data.pixels.device
        self.net, self.data, self.settings = net, data, settings
        self.plan = torch.zeros_like(data.plan(0, 1)[0])
        self.lr = torch.zeros((), device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.optimizer = make_optimizer(net, self.lr, settings)
        self.autocast = autocast_of(device)
        self.call: Callable[[], Any] = self._capture() if graph else self.eager

    def eager(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        images, labels = self.data.take(self.plan)
        with self.autocast:
            outputs = self.net(images)
        loss = loss_of(self.data.task, outputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.settings.clip)
        self.optimizer.step()
        self.loss_sum += loss.detach()

    def _capture(self) -> Callable[[], Any]:
        """The step as a graph. Nothing is learned: at a learning rate of 0 weights keep their bits;
        what the optimizer has gathered is set to 0 again, and statistics of batch norm are
        those of before."""
        for module in self.net.modules():
            if isinstance(module, StudyMamba):
                module.compiled = True
        buffers = [(buffer, buffer.clone()) for buffer in self.net.buffers()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_CALLS):
                self.eager()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.eager()
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        for buffer, before in buffers:
            buffer.copy_(before)
        self.loss_sum.zero_()
        return graph.replay

    def __call__(self, plan: Tensor, lr: float) -> None:
        """Take a step with what ``plan`` (B, columns) says."""
        self.plan.copy_(plan)
        self.lr.fill_(lr)
        self.call()


def train(
    arm: str,
    seed: int,
    data: Data,
    settings: Settings,
    steps: int,
    deadline: float = math.inf,
    graph: bool | None = None,
) -> dict[str, Any] | None:
    """Train an arm on a seed and test it.

    Args:
        arm (str): A name in ``ARMS`` or ``PEERS``.
        seed (int): From it follow initialization, data, augmentation and drop path.
        data (Data): The task's.
        settings (Settings): What all arms have in common.
        steps (int): Length of the run.
        deadline (float): By ``time.monotonic``; a run that is not done by then is given up.
        graph (bool, optional): Whether to capture the step; None does so on a GPU.

    Returns:
        dict: The result's figures; None if it was given up.
    """
    device, task = data.pixels.device, data.task
    began = time.monotonic()
    net = build(arm, task, seed, settings).to(device)
    step = Step(net, data, settings, device.type == 'cuda' if graph is None else graph)
    plan = data.plan(seed, steps)
    torch.manual_seed(seed)  # drop path's draws, of the device too, after the calls of warm-up
    interval = max(1, steps // _TESTS)
    curve, tested = [], 0
    for i in range(steps):
        if i % _CHECK == 0 and time.monotonic() > deadline:
            return None
        step(plan[i], learning_rate(i, steps, settings))
        if (i + 1) % interval == 0 or i + 1 == steps:
            loss = step.loss_sum.item() / (i + 1 - tested)
            step.loss_sum.zero_()
            tested = i + 1
            metric = test(task, net, data.test_images, data.test_labels, step.autocast)
            curve.append([i + 1, round(metric, 4), round(loss, 5) if math.isfinite(loss) else None])
    result = {
        'task': task.name,
        'arm': arm,
        'seed': seed,
        'metric': curve[-1][1],
        'curve': curve,
        'diverged': any(loss is None for _, _, loss in curve),
        'seconds': round(time.monotonic() - began, 2),
        'settings': {'steps': steps, 'batch': task.batch, **asdict(settings)},
        'parameters': sum(p.numel() for p in net.parameters()),
        'data': data.digest,
        'card': card(device.type),
    }
    if arm not in PEERS:
        if ARMS[arm].dt:
            result['dt'] = dict(zip(('dt_min', 'dt_max', 'dt_scale'), ARMS[arm].dt))
        with step.autocast:
            result['stiffness'] = stiffness(net, normalize(data.test_images[:IMAGES]))
        net.train()
    if task.factors:
        result['resolutions'] = _rounded(test_resolutions(task, net, data, step.autocast))
    if task.spacings:
        result['spacings'] = _rounded(test_spacings(task, net, data, step.autocast))
    return result


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def measure_step(arm: str, data: Data, settings: Settings) -> dict[str, Any]:
    """Time and peak memory of a step alone on the card: median of 50 replays after 10.

    The first measurement of a process is thrown away. It also allocates what stays for all further
    ones: cuBLAS's workspaces, one for each handle on the stream of captures, and the backward
    pass has a handle of its own. So a whole step allocates them, not some matrix product.
    """
    task, device = data.task, data.pixels.device
    if device not in _measured:
        _measured.add(device)
        measure_step(arm, data, settings)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    net = build(arm, task, 0, settings)
    step = Step(net.to(device), data, settings, graph=True)
    plan = data.plan(0, 60)
    times = []
    for i in range(60):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        step(plan[i], 1e-5)
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return {
        'task': task.name,
        'arm': arm,
        'milliseconds': round(float(torch.tensor(times[10:]).median()), 4),
        'mebibytes': round((torch.cuda.max_memory_allocated() - before) / 2**20, 1),
        'card': card(device.type),
    }
