"""``vim_mm::recurrence`` in ONNX: ``Scan``, whose body holds three operators."""

from onnxscript import FLOAT, graph, script
from onnxscript import opset18 as op


@script()
def recurrence(A_bar: FLOAT, drive: FLOAT, C: FLOAT) -> tuple[FLOAT, FLOAT]:
    """As :func:`vim_mm.ops.exported.recurrence`."""

    @graph()
    def step(x, A_bar_t, drive_t, C_t):
        x_t = A_bar_t * x + drive_t
        y_t = op.MatMul(x_t, C_t)
        return x_t, y_t

    start = op.Expand(op.Constant(value_float=0.0), op.Shape(drive, start=1))
    last, y = op.Scan(start, A_bar, drive, C, body=step, num_scan_inputs=3)
    return y, last
