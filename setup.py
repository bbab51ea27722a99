"""Builds the one extension, vim_mm._C; everything else about the package is in pyproject.toml.

Nothing without a compiler, which VIM_MM_BUILD=0/1 overrides (tools/dev/build_backend.py): then the
package is Python alone. C++ else; CUDA when there are CUDA sources and a toolkit, which
VIM_MM_BUILD_CUDA=0/1 overrides.
A live GPU is never asked for: TORCH_CUDA_ARCH_LIST names the architectures.
The extension uses only LibTorch's stable ABI and Python's limited API, so that one binary serves
every Python from 3.10 and every torch from 2.10.
"""

import os
import runpy
import sys
from pathlib import Path

from setuptools import setup

BACKEND = runpy.run_path(str(Path(__file__).parent / 'tools/dev/build_backend.py'))
left_out, wish = BACKEND['left_out'], BACKEND['wish']

CPP_SOURCES = [
    'csrc/ops.cpp',
    'csrc/cpu/kernels.cpp',
    'csrc/cpu/scan_row_avx2.cpp',
    'csrc/cpu/scan_row_avx512.cpp',
    'csrc/cpu/scan_row_portable.cpp',
    'csrc/cpu/selective_scan.cpp',
    'csrc/cuda/mixer/mixer_layout.cpp',  # sizes, of which Python's fake kernels ask everywhere
]
CUDA_SOURCES = [
    str(path)
    for kind in ('*.cpp', '*.cu')
    for path in sorted(Path('csrc/cuda').rglob(kind))
    if str(path) not in CPP_SOURCES
]
# Compute capability 8.0 to 12.0; the newest as PTX too, for what comes after.
CUDA_ARCHITECTURES = '8.0;8.6;8.9;9.0;10.0;12.0+PTX'

DEFINITIONS = [
    '-DTORCH_TARGET_VERSION=0x020a000000000000',  # the oldest torch that the binary must load in
]
CXX_FLAGS = [
    '-std=c++17',
    '-O3',
    '-fvisibility=hidden',
    # No result depends on errno or on floating point traps, and selects vectorize without them.
    '-fno-math-errno',
    '-fno-trapping-math',
    # Many a Python hands its own -g down: 10 MB, half of a library for one architecture.
    '-g0',
]
# torch's stable C interface to CUDA streams is hidden without it.
CUDA_DEFINITIONS = ['-DUSE_CUDA']
# Of several architectures three at once: else the longest file keeps many cores waiting for one.
NVCC_FLAGS = ['-std=c++17', '-O3', '-Xfatbin', '-compress-all', '--threads=3']


def build_cuda() -> bool:
    """Whether to build the CUDA sources; VIM_MM_BUILD_CUDA decides, else what is there."""
    from torch.utils.cpp_extension import CUDA_HOME

    cuda = wish('VIM_MM_BUILD_CUDA')
    if cuda == '1' and CUDA_HOME is None:
        raise SystemExit('VIM_MM_BUILD_CUDA=1, but no CUDA toolkit was found: set CUDA_HOME')
    return cuda != '0' and CUDA_HOME is not None


def nvcc_flags() -> list[str]:
    """Those of nvcc. Compression for size needs a driver of CUDA 12.4, which CUDA 13 implies."""
    from torch.version import cuda  # the toolkit is of the same major version, or torch refuses it

    newest = int((cuda or '0').partition('.')[0]) >= 13
    return NVCC_FLAGS + (['-Xfatbin', '-compress-mode=size'] if newest else [])


def extension():
    """The extension vim_mm._C."""
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    cuda = build_cuda()
    if cuda:
        os.environ.setdefault('TORCH_CUDA_ARCH_LIST', CUDA_ARCHITECTURES)
    make = CUDAExtension if cuda else CppExtension
    definitions = DEFINITIONS + (CUDA_DEFINITIONS if cuda else [])
    if cuda:
        # For the op build_info, and so for vim_mm.doctor: a binary does not list its own kernels.
        architectures = os.environ['TORCH_CUDA_ARCH_LIST'].strip().replace(' ', ';')
        definitions = [*definitions, f'-DVIM_MM_CUDA_ARCHITECTURES="{architectures}"']
    return make(
        'vim_mm._C',
        sources=CPP_SOURCES + (CUDA_SOURCES if cuda else []),
        depends=[str(path) for path in sorted(Path('csrc').rglob('*.*h'))],
        extra_compile_args={'cxx': definitions + CXX_FLAGS, 'nvcc': definitions + nvcc_flags()},
        # Where a compiler links the C++ library statically, that copy must not get between torch's
        # own and us: what an operator throws would be cut off, or end the process. Symbols are
        # bound when they are called, so that a program without Python loads the operators.
        extra_link_args=['-Wl,--exclude-libs,ALL', '-Wl,-z,lazy'],
        py_limited_api=True,
    )


def arguments():
    """Those of ``setup``: without the extension those of a package in Python alone."""
    reason = left_out()
    if reason is not None:
        print(
            f'vim_mm: the compiled kernels are left out, because {reason}. Scans are computed by '
            'Triton on a GPU and by PyTorch operators elsewhere.',
            file=sys.stderr,
        )
        return {}
    from torch.utils.cpp_extension import BuildExtension

    return dict(
        ext_modules=[extension()],
        cmdclass={'build_ext': BuildExtension},
        options={'bdist_wheel': {'py_limited_api': 'cp310'}},
    )


setup(**arguments())
