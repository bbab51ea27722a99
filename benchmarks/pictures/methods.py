"""Pictures of what the methods are: regions, errors, responses and differences.

``tools/analysis/verify_discretization.py --pictures`` draws them for docs/methods.md.
The styles of the methods are in palette.py. The exact solution is a broad grey line. Mamba-3's
trapezoidal rule, which the package does not offer, is there for comparison.
"""

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.pictures.palette import MARKERS, METHOD_NAMES, STYLES
from vim_mm.ops import METHODS, discretize

_DPI = 110
EXACT = dict(color='0.78', linestyle='-', linewidth=6)
_LABELS = {'mamba3': 'Mamba-3 (not offered)'}


def coefficients(method: str, dt: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A_bar and beta of a method for steps and rates of shapes that broadcast, in fp64."""
    dt, a = (torch.as_tensor(np.asarray(x)) for x in (dt, a))
    A_bar, beta = discretize(dt.double(), a if a.is_complex() else a.double(), method)
    return A_bar.numpy(), beta.numpy()


def simulate(method: str, dt: float, a: float, u: np.ndarray) -> np.ndarray:
    """States at t = dt, 2 dt ... of x' = a x + u, x(0) = 0, from samples u_1, u_2 ... by a method.

    ``poly`` averages the scans in both directions. 'mamba3' is the exponential trapezoidal rule
    with lambda 1/2: x_t = A_bar (x_{t-1} + dt u_{t-1} / 2) + dt u_t / 2, with u_0 = u_1.
    """
    if method == 'mamba3':
        A_bar = np.exp(dt * a)
        drive = dt / 2 * (u + A_bar * np.concatenate([u[:1], u[:-1]]))
        return _recur(A_bar, drive)
    A_bar, beta = coefficients(method, dt, a)
    states = _recur(A_bar, beta * u)
    if not METHODS[method].causal:
        states = (states + _recur(A_bar, (beta * u)[::-1])[::-1]) / 2
    return states


def _recur(A_bar: np.ndarray, drive: np.ndarray) -> np.ndarray:
    x, states = 0.0, []
    for d in drive:
        x = A_bar * x + d
        states.append(x)
    return np.array(states)


def transfer(method: str, dt: float, a: float, omega: np.ndarray) -> np.ndarray:
    """Response to e^{i omega t}, sampled every dt, of the recurrence; complex."""
    delay = np.exp(-1j * omega * dt)
    if method == 'mamba3':
        A_bar = np.exp(dt * a)
        return dt / 2 * (1 + A_bar * delay) / (1 - A_bar * delay)
    A_bar, beta = coefficients(method, dt, a)
    response = beta / (1 - A_bar * delay)
    if not METHODS[method].causal:
        response = (response + beta / (1 - A_bar / delay)) / 2
    return response


def _panels(
    rows: int, columns: int, height: float, width: float = 4.6
) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width * columns, height * rows), dpi=_DPI, layout='constrained')
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(alpha=0.25)
        axes.spines[['top', 'right']].set_visible(False)
    return figure, grid


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc='outside lower center', ncols=columns, frameon=False, handlelength=4,
    )  # fmt: skip


def plot_stability(path: Path) -> None:
    """|A_bar| in the plane of z, and A_bar along the real axis."""
    figure, ((left, middle, right),) = _panels(1, 3, 4.0)
    x, y = np.linspace(-6, 3, 361), np.linspace(-5, 5, 401)
    z = x[None] + 1j * y[:, None]
    with np.errstate(divide='ignore'):
        for axes, method, title in (
            (left, 'zoh', 'every method but bilinear: |e^z|'),
            (middle, 'bilinear', 'bilinear: |(1 + z/2) / (1 - z/2)|'),
        ):
            A_bar = np.abs(coefficients(method, np.ones(()), z)[0])
            levels = [0.1, 0.2, 0.5, 0.8, 1.25, 2, 5, 10]
            axes.contourf(x, y, A_bar, [0, 1], colors=['#DDEEDD'])
            lines = axes.contour(x, y, A_bar, levels, colors='0.35', linewidths=0.8)
            axes.clabel(lines, fmt='%g', fontsize=7)
            axes.axvline(0, color='black', linewidth=1.6)
            axes.set(xlabel='Re z', ylabel='Im z', title=title, aspect='equal')
    # What rk4 would have if its polynomial made the state too: it does not.
    rk4_state = sum(z**j / np.prod(range(1, j + 1)) for j in range(5))
    colour = STYLES['rk4']['color']
    left.contour(x, y, np.abs(rk4_state), [1], colors=[colour], linestyles='--', linewidths=2)
    note = 'dashed: where a classical\nRunge-Kutta step is stable'
    left.text(-5.8, -4.7, note, fontsize=8, bbox=dict(color='white', alpha=0.8, pad=1))
    real = np.linspace(-10, 1, 400)
    for method, label in (('zoh', 'every method but bilinear'), ('bilinear', 'bilinear')):
        style = STYLES[method]
        right.plot(real, coefficients(method, np.ones(()), real)[0], label=label, **style)
    right.axhline(0, color='black', linewidth=0.8)
    right.set(xlabel='z, real', ylabel='A_bar', title='A_bar for real z', ylim=(-1, 3))
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def plot_errors(path: Path) -> None:
    """How far beta is from that of the zero-order hold, and states from the exact solution."""
    figure, ((left, right), (errors, scaled)) = _panels(2, 2, 3.2)
    size = np.logspace(-3, 2, 200)
    for axes, dt in ((left, 0.1), (right, 0.01)):
        _, hold = coefficients('zoh_exact', dt, -size / dt)
        for method in METHOD_NAMES:
            if method != 'zoh_exact':  # 0, which has no place on the axis
                _, beta = coefficients(method, dt, -size / dt)
                axes.loglog(size, np.abs(beta / hold - 1), **STYLES[method])
        axes.set(xlabel='|z| = dt |a|, a < 0', ylim=(1e-6, 1e3), ylabel='relative difference')
        axes.set_title(f'beta against that of zoh_exact, dt = {dt:g}')
    steps = 2.0 ** -np.arange(1, 10)
    for method, style in STYLES.items():
        error = np.array([_error_of_states(method, dt) for dt in steps])
        drawn = style | dict(marker=MARKERS[method], markersize=4, fillstyle='none')
        errors.loglog(steps, error, label=_LABELS.get(method, method), **drawn)
        if method not in ('foh', 'poly'):  # whose states do not tend to the solution
            scaled.semilogx(steps, error / steps, **drawn)
    for power, factor in ((1, 0.25), (2, 0.15)):
        errors.loglog(steps, factor * steps**power, color='0.6', linewidth=0.8)
        at = (steps[-3], factor * steps[-3] ** power)
        errors.annotate(f'slope {power}', at, (3, -9), textcoords='offset points', fontsize=7)
    errors.set(xlabel='dt', ylabel='relative error', ylim=(1e-6, 3))
    errors.set_title("states of x' = -x + sin(2 t)")
    for y, names in ((1.2, 'zoh, highorder'), (0.85, 'zoh_exact, bilinear, rk4')):
        scaled.text(steps[-1], y, names, fontsize=8)
    scaled.set(xlabel='dt', ylabel='relative error / dt', ylim=(0, 1.6))
    scaled.set_title('the same over dt: the methods of first order')
    _legend(figure, errors, 4)
    figure.savefig(path)


def _error_of_states(method: str, dt: float) -> float:
    """Largest error of x' = -x + sin(2 t) away from the ends, relative to the largest state."""
    a, omega = -1.0, 2.0
    t = dt * np.arange(1, round(20 / dt) + 1)
    x = simulate(method, dt, a, np.sin(omega * t))
    settled = np.imag(np.exp(1j * omega * t) / (1j * omega - a))
    exact = settled + omega / (omega**2 + a**2) * np.exp(a * t)
    inside = (t >= 5) & (t <= 15)
    return np.abs(x - exact)[inside].max() / np.abs(exact)[inside].max()


def plot_responses(path: Path) -> None:
    """Step and frequency response of a sampled system, beside those of the exact solution."""
    figure, grid = _panels(2, 2, 3.4)
    for axes, dt, end in ((grid[0, 0], 0.5, 6.0), (grid[0, 1], 3.0, 18.0)):
        t = np.linspace(0, end, 400)
        axes.plot(t, 1 - np.exp(-t), label='exact', **EXACT)
        times = dt * np.arange(1, round(end / dt) + 1)
        for method, style in STYLES.items():
            x = simulate(method, dt, -1.0, np.ones_like(times))
            marker = dict(marker=MARKERS[method], markersize=6, fillstyle='none')
            axes.plot(times, x, label=_LABELS.get(method, method), **marker, **style)
        axes.set(xlabel='t', ylabel='x')
        axes.set_title(f"unit step, x' = -x + u, dt = {dt:g} (z = {-dt:g})")
    dt = 0.5
    omega = np.linspace(1e-3, np.pi / dt, 400)
    share = omega * dt / np.pi
    gain, phase = grid[1]
    responses = {method: transfer(method, dt, -1.0, omega) for method in STYLES}
    for method, response in {'exact': 1 / (1j * omega + 1), **responses}.items():
        style = STYLES.get(method, EXACT)
        gain.plot(share, 20 * np.log10(np.abs(response)), **style)
        phase.plot(share, np.degrees(np.angle(response)), **style)
    gain.set(xlabel='frequency / Nyquist frequency', ylabel='gain, dB')
    gain.set_title('gain, dt = 0.5 (z = -0.5)')
    phase.set(xlabel='frequency / Nyquist frequency', ylabel='phase, degrees')
    phase.set_title('phase, dt = 0.5 (z = -0.5)')
    phase.text(
        0.2,
        -5,
        'zoh, foh, highorder, rk4, zoh_exact:\none line; bilinear close to it',
        fontsize=8,
        va='top',
    )
    _legend(figure, grid[0, 0], 5)
    figure.savefig(path)


def plot_differences(relative: dict[str, np.ndarray], methods: list[str], path: Path) -> None:
    """Largest differences of outputs, relative to the larger output: a panel for each input.

    Args:
        relative: By title, (methods, methods) with zeros on the diagonal.
        methods: Names of rows and columns.
        path: Picture to write.
    """
    figure = Figure(figsize=(5.2 * len(relative), 4.8), dpi=_DPI, layout='constrained')
    for axes, (title, table) in zip(figure.subplots(1, len(relative)), relative.items()):
        shown = np.ma.masked_less_equal(table, 0)
        image = axes.imshow(np.ma.log10(shown), cmap='viridis', vmin=-3, vmax=0.5)
        for row, column in np.ndindex(table.shape):
            if row != column:
                dark = np.log10(table[row, column]) < -1.2
                axes.text(
                    column, row, f'{table[row, column]:.2g}', ha='center', va='center',
                    fontsize=7, color='white' if dark else 'black',
                )  # fmt: skip
        axes.set_xticks(range(len(methods)), methods, rotation=45, ha='right', fontsize=8)
        axes.set_yticks(range(len(methods)), methods, fontsize=8)
        axes.set_title(title, fontsize=10)
        bar = figure.colorbar(image, ax=axes, shrink=0.8, ticks=[-3, -2, -1, 0])
        bar.ax.set_yticklabels(['0.001', '0.01', '0.1', '1'])
    bar.set_label('largest difference / larger output')
    figure.savefig(path)


def plot_inputs(path: Path) -> None:
    """The input between samples for which a method is exact, where there is one."""
    figure, grid = _panels(1, 4, 3.0, width=3.3)
    fine = np.linspace(0, 5, 300)
    course, samples = np.sin(0.9 * fine) + 1.2, np.arange(6)
    values = np.sin(0.9 * samples) + 1.2
    drawings = (
        ('zoh_exact', 'zoh_exact: constant\n(bilinear, rk4: approximately)', _draw_hold),
        ('zoh', 'zoh: an impulse of area dt u\nat the end of the step', _draw_impulses),
        ('foh', 'foh: a ramp from 0\nof slope u (here dt = 1)', _draw_ramps),
        ('mamba3', 'Mamba-3 (not offered): half\nan impulse at either end', _draw_half_impulses),
    )
    for axes, (method, title, draw) in zip(grid[0], drawings):
        axes.plot(fine, course, **EXACT)
        axes.plot(samples, values, 'o', color='0.35', markersize=5)
        draw(axes, samples, values, STYLES[method])
        axes.set(xlabel='t / dt', ylim=(0, 2.6), xlim=(-0.15, 5.3), yticks=[])
        axes.set_title(title, fontsize=10)
    grid[0, 0].set_ylabel('input u')
    figure.savefig(path)


def _draw_hold(axes: Axes, t: np.ndarray, u: np.ndarray, style: dict) -> None:
    for k in range(1, len(t)):
        axes.plot([t[k - 1], t[k]], [u[k], u[k]], **(style | {'linestyle': '-'}))


def _draw_impulses(axes: Axes, t: np.ndarray, u: np.ndarray, style: dict) -> None:
    for k in range(1, len(t)):
        _draw_arrow(axes, t[k], u[k], style)


def _draw_half_impulses(axes: Axes, t: np.ndarray, u: np.ndarray, style: dict) -> None:
    for k in range(1, len(t)):
        _draw_arrow(axes, t[k - 1] + 0.07, u[k - 1] / 2, style)
        _draw_arrow(axes, t[k] - 0.07, u[k] / 2, style)


def _draw_ramps(axes: Axes, t: np.ndarray, u: np.ndarray, style: dict) -> None:
    for k in range(1, len(t)):
        axes.plot([t[k - 1], t[k]], [0, u[k]], **(style | {'linestyle': '-'}))


def _draw_arrow(axes: Axes, x: float, height: float, style: dict) -> None:
    arrow = dict(arrowstyle='-|>', color=style['color'], linewidth=1.6, shrinkA=0, shrinkB=0)
    axes.annotate('', xy=(x, height), xytext=(x, 0), arrowprops=arrow)
