"""The scan's headers under NVRTC: CUDA's compiler as a library, which has no headers of the host.

So kernels can be compiled where they run, without a toolkit. Nothing runs here: no GPU is needed.
"""

import ctypes
from pathlib import Path

import pytest
import torch

from tests.emulation.test_emulation import HEADERS
from tests.native import ROOT

LIBRARIES = [
    *Path(torch.__file__).parents[1].glob('nvidia/cu*/lib/libnvrtc.so.*'),
    *Path('/usr/local/cuda/lib64').glob('libnvrtc.so.*'),
]
# What the headers want of the host's standard library.
STANDARD = {
    'math.h': '',
    'stdint.h': """
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
""",
    'string.h': '',
    'type_traits': """
#pragma once
namespace std {
template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <class T, class U> struct is_same : false_type {};
template <class T> struct is_same<T, T> : true_type {};
template <bool, class T, class> struct conditional { using type = T; };
template <class T, class U> struct conditional<false, T, U> { using type = U; };
template <bool c, class T, class U> using conditional_t = typename conditional<c, T, U>::type;
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool c, class T = void> using enable_if_t = typename enable_if<c, T>::type;
template <class T> struct extent : integral_constant<size_t, 0> {};
template <class T, size_t n> struct extent<T[n]> : integral_constant<size_t, n> {};
template <class...> using void_t = void;
}
""",
    'utility': '#pragma once\nnamespace std { template <class T> T&& declval() noexcept; }',
}
SEQUENTIAL = 'SequentialShape<1, 1, 4, 2, 2, 2, 2, true>'
KERNELS = {
    'forward': ('forward/kernel.cuh', f'forward_kernel<Zoh, {SEQUENTIAL}, Layout::half, false>'),
    'splits': ('forward/splits.cuh', 'split_ends_kernel<Zoh, SplitEnds, Layout::half>'),
    'sweep': ('boundary/sweep.cuh', 'sweep_kernel<Zoh, SixChannelShape<1>, Layout::half, false>'),
    'segments': (
        'boundary/segments.cuh',
        'segment_sweep_kernel<Zoh, float, Shape<16, 16, 4, 3>, Layout::half, true, false, false>',
    ),
    'general': (
        'general/forward.cuh',
        'general_forward_kernel<Foh, Complex<float>, Shape<8, 8, 4>, false>',
    ),
    'backward': (
        'backward/chunk.cuh',
        'backward_kernel<Zoh, float, Shape<8, 8, 4, 2, 2>, Layout::half, true, false>',
    ),
}

pytestmark = [
    pytest.mark.slowest,
    pytest.mark.skipif(not LIBRARIES, reason='needs libnvrtc'),
    pytest.mark.skipif(not HEADERS, reason="needs CUDA's headers"),
]


def compile_kernel(source: str, name: str, options: list[str]) -> tuple[int, str]:
    """The size of the machine code of that kernel, 0 where it fails, and what the compiler said."""
    nvrtc = ctypes.CDLL(str(LIBRARIES[0]))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def texts(values):
        return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))

    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b'kernel.cu', len(STANDARD),
        texts([*STANDARD.values()]), texts([*STANDARD]),
    )  # fmt: skip
    nvrtc.nvrtcAddNameExpression(program, name.encode())
    failed = nvrtc.nvrtcCompileProgram(program, len(options), texts(options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    size.value = 0
    if not failed:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return size.value, log.value.decode()


@pytest.mark.parametrize('kernel', KERNELS)
def test_a_kernel_compiles(kernel):
    header, name = KERNELS[kernel]
    source = f'#include "csrc/cuda/{header}"\nusing namespace vim_mm;\n'
    options = ['-std=c++17', '-arch=sm_90', '-default-device', f'-I{ROOT}', f'-I{HEADERS[0]}']
    size, log = compile_kernel(source, name, options)
    assert size > 10_000, log
