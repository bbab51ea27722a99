"""Packages of AOTInductor: a model compiled for one machine, which C++ runs without Python."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError
from torch.export import Dim, ExportedProgram

from vim_mm.errors import UserRuntimeError, UserValueError
from vim_mm.models.mamba import Mamba
from vim_mm.ops.backends import OPERATORS, path_of
from vim_mm.whole_file import whole_file

MULTIPLE = 'vim_mm_multiple'  # in the package's metadata, see examples/cpp/run_package.cpp


def export_graph(module: nn.Module, images: Tensor, multiple: int | None = None) -> ExportedProgram:
    """The graph of a module of images, by ``torch.export``, without gradients.

    Args:
        module: In evaluation mode, see :func:`vim_mm.export.part_of`.
        images: An example (B, C, H, W) on the module's device. For open sizes a batch of 2 or more,
            and H and W that differ from each other.
        multiple: None fixes all sizes to the example's. Else B is open, and H and W are open
            multiples of it. Of the distance of patches the graph compiles several times as fast as
            of 1, because the number of tokens is then a product of two symbols.

    Raises:
        ValueError: H or W of the example is no multiple.
        RuntimeError: A scan would not be one operator, which takes any length.
    """
    _check_scans(module)
    shapes = None
    if multiple is not None:
        _check_multiple(images, multiple)
        height, width = (_multiples(name, multiple) for name in ('height', 'width'))
        shapes = ({0: Dim('batch', min=1), 2: height, 3: width},)
    with torch.no_grad():
        try:
            return torch.export.export(module, (images,), dynamic_shapes=shapes)
        except UserError as error:
            # A pyramid takes no images whose coarsest map is a single row: the least size is told.
            if 'Suggested fixes' not in str(error):
                raise
            from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

            shapes = refine_dynamic_shapes_from_suggested_fixes(str(error), shapes)
            return torch.export.export(module, (images,), dynamic_shapes=shapes)


def _check_scans(module: nn.Module) -> None:
    """RuntimeError if a mixer's scan is PyTorch's: its graph has the steps of the example.

    A package would take images of other sizes, and compute something else without a word.
    """
    for mixer in module.modules():
        if isinstance(mixer, Mamba):
            device, dtype = mixer.A_log.device, mixer.parameters_dtype()
            path = path_of(device, dtype, mixer.use_cuda_kernel, backend=mixer.backend)
            if path.name not in OPERATORS:
                raise UserRuntimeError(
                    'a graph holds the scan as one operator, of the backend native or triton, but '
                    f'on {device} it is {path.name!r} here: {path.reason}'
                )


def _multiples(name: str, multiple: int) -> Dim:
    if multiple == 1:
        return Dim.DYNAMIC
    return multiple * Dim(name, min=2)  # of one patch torch.export would make another graph


def write_package(program: ExportedProgram, path: str | Path, multiple: int | None = None) -> None:
    """Compile a graph, for the device of its parameters and for this machine, into a ``.pt2`` file.

    Needs a C++ compiler. The operators of :mod:`vim_mm.ops` are called, not compiled in: whoever
    loads the package loads the library that registers them first.

    Args:
        program: Of :func:`export_graph`.
        path: Of the package.
        multiple: As in :func:`export_graph`. It is noted in the package's metadata.
    """
    facts = {MULTIPLE: str(1 if multiple is None else multiple)}
    path = Path(path)
    # The compiler insists on the ending, and the package knows its name.
    with whole_file(path) as part, TemporaryDirectory(dir=path.parent, prefix='.part') as folder:
        file = Path(folder) / path.name
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(file),
            inductor_configs={
                'aot_inductor.metadata': facts,
                # Inductor believes that an open size is 2 or more, but computes with what it gets.
                'aot_inductor.check_lowerbound': False,
                # The threads of the program that runs the package. Else a package has those of the
                # process that wrote it, and they wait for each other in a busy loop.
                'cpp.dynamic_threads': True,
                # Some compilers link a copy of the C++ library into what they build. With that
                # copy beside PyTorch's shared library, a package for a GPU crashes when it is
                # loaded. Named here, the shared library provides every symbol.
                'aot_inductor.custom_op_libs': [':libstdc++.so.6']
                if sys.platform == 'linux'
                else None,
            },
        )
        file.replace(part)


def load_package(path: str | Path) -> Callable[[Tensor], Tensor | Sequence[Tensor]]:
    """A package as a function of images, which here runs in Python.

    It raises ValueError if height or width is no multiple of what the package has in its metadata,
    and RuntimeError if a size that is fixed is another one.
    """
    # Read once a process. Without it other sizes than the package's read beyond the images.
    os.environ.setdefault('AOTI_RUNTIME_CHECK_INPUTS', '1')
    package = torch._inductor.aoti_load_package(str(path))
    multiple = int(package.get_metadata()[MULTIPLE])

    def run(images: Tensor) -> Tensor | Sequence[Tensor]:
        _check_multiple(images, multiple)
        return package(images)

    return run


def _check_multiple(images: Tensor, multiple: int) -> None:
    if any(n % multiple for n in images.shape[-2:]):
        raise UserValueError(
            f'images: height and width must be multiples of {multiple}, '
            f'got {" x ".join(map(str, images.shape[-2:]))}'
        )
