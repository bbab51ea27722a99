"""Forward-mode derivatives, which only the reference has."""

from torch import Tensor
from torch.autograd import forward_ad


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Keep tensors with a forward-mode derivative from operators that would drop it unnoticed.

    Raises:
        NotImplementedError: One has a tangent, of ``torch.func.jvp`` for example.
    """
    if forward_ad._current_level < 0:  # PyTorch has no public name for it
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            'this operator has no forward-mode derivative (jvp); '
            "the scan's backend='reference' has, for zoh and rk4"
        )
