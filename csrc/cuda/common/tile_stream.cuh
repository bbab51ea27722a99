// How tiles of tensors come into shared memory and gradients go out: window by window, or channels
// by channels, a few neighbouring entries per thread.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "async_copy.cuh"
#include "layout.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// A thread's entries of one tensor, [.., rows, L], tile by tile. Loads stay unconverted until
// `values`, or the conversion would wait for them. What follows from the view is not kept: kernel
// parameters are as near as registers, and there are fewer of those. `Shifted`: slots of 16 bits may
// begin in the middle of a word, all of a thread's or none, wherever it goes: it goes by whole words. Where
// a tile is whole they are kept as loaded, which takes a word more.
template <class E, int Rows, class Shape, Layout layout, bool Shifted = false>
class Stream {
  static constexpr bool shifted = Shifted && layout == Layout::half;

 public:
  using Places = Slots<Rows, Shape, layout>;
  static constexpr int width = Places::width, count = Places::count;

 private:
  // Words of a slot, and as many as are held of it.
  static constexpr int item = item_of(layout);
  static constexpr int words = layout == Layout::any ? sizeof(E) / 4 : width * item / 4;
  static constexpr int words_held = words + shifted;
  static_assert(words * 4 >= width * item, "16 bits come in pairs");
  static_assert(!shifted || (width == 4 && Shape::threads / Places::per_row % 2 == 0),
                "all slots of a thread begin alike");

 public:
  // At the first row of `base`, in that window.
  __device__ __forceinline__ void begin(const View& v, const char* base, const Places& slots,
                                        const Work& work, int64_t window) {
    const int64_t first = window * Shape::window + slots.step(0);
    p_ = const_cast<char*>(base) + slots.row(0) * v.row +
         (work.reverse ? work.steps - 1 - first : first) * (layout == Layout::any ? v.last : item);
    // Against the order of memory a slot begins at its lowest address all the same.
    if (layout != Layout::any && slots.reverse) p_ -= (width - 1) * item;
  }
  // Has the address in registers from now on. The compiler would rather add that of the tensor, which is
  // among the kernel's parameters, to every offset anew.
  __device__ __forceinline__ void settle() {
#if defined(__CUDA_ARCH__)
    size_t address = __cvta_generic_to_global(p_);
    asm("" : "+l"(address));
    p_ = static_cast<char*>(__cvta_global_to_generic(address));
#endif
  }
  __device__ __forceinline__ void next(int64_t bytes) { p_ += bytes; }
  // Where it is, to be kept in shared memory.
  __device__ __forceinline__ char*& place() { return p_; }

  // Starts the loads of the tile at hand, `offset` bytes further, of which there are so many rows and
  // steps.
  template <Loads loads>
  __device__ __forceinline__ void load(const View& v, const Places& slots, int rows, int steps,
                                       int64_t offset = 0) {
    load<loads>(v, slots, rows, steps, offset, own_);
  }
  // Likewise into other registers than its own.
  struct Held;
  template <Loads loads>
  __device__ __forceinline__ void load(const View& v, const Places& slots, int rows, int steps,
                                       int64_t offset, Held& to) const {
    static_assert(loads != Loads::shifted && (!shifted || loads == Loads::apart),
                  "those are copied");
    if constexpr (loads == Loads::whole) {
      load_whole(v, slots, offset, to.raw);
    } else if constexpr (loads == Loads::apart) {
      load(v, slots, rows, steps, offset, to.raw);
    } else {
#pragma unroll
      for (int k = 0; k < count; ++k) {
        Vector vector{};
        if (v.data && slots.row(k) < rows && slots.step(k) < steps)
          vector = *reinterpret_cast<const Vector*>(at(v, slots, k) + offset);
        *reinterpret_cast<Vector*>(to.raw + k * words_held) = vector;
      }
    }
  }
  // Starts to copy that tile to shared memory, where `to` is the thread's own; `arrived` has it after
  // wait_for_all_copies. What begins anywhere and is not whole it waits for.
  template <Loads loads>
  __device__ __forceinline__ void copy(const View& v, const Places& slots, int rows, int steps,
                                       Held& to) const {
    static_assert(loads != Loads::whole,
                  "what is aligned is not copied otherwise where it is whole");
    if constexpr (loads == Loads::apart) {
      Held held;
      load<loads>(v, slots, rows, steps, 0, held);
      if (shifted && is_in_mid_word(p_)) {
#pragma unroll
        for (int k = 0; k < count; ++k) held.raw[k * words_held] <<= 16;
      }
      to = held;
    } else {
#pragma unroll
      for (int k = 0; k < count; ++k) {
        const char* const p = at(v, slots, k);
        uint32_t* const raw = to.raw + k * words_held;
        if constexpr (shifted) {
          // Whole words, of which the first one and the last one are not all the slot's: the first one's
          // other half is there because memory begins with a word, of the last one's nothing is read.
          const bool odd = is_in_mid_word(p);
          start_copy<4>(raw, odd ? p - 2 : p, odd ? 4 : 0);
          start_copy<4>(raw + 1, odd ? p + 2 : p, 4);
          start_copy<4>(raw + 2, odd ? p + 6 : p + 4, odd ? 2 : 4);
        } else if constexpr (loads == Loads::shifted) {
#pragma unroll
          for (int w = 0; w < words; ++w) start_copy<4>(raw + w, p + 4 * w, 4);
        } else {
          const bool inside = slots.row(k) < rows && slots.step(k) < steps;
          start_copy<4 * words>(raw, p, inside ? 4 * words : 0);
        }
      }
    }
  }
  __device__ __forceinline__ Held arrived(const Held& copied) const {
    Held held = copied;
    if (shifted && is_in_mid_word(p_)) {
#pragma unroll
      for (int k = 0; k < count; ++k) held.raw[k * words_held] >>= 16;
    }
    return held;
  }
  // The tile that was loaded, unconverted, while the next one comes.
  __device__ __forceinline__ Held held() const { return own_; }
  template <class Format>
  __device__ __forceinline__ void values(const View& v, int k, E (&out)[width]) const {
    values<Format>(v, k, own_, out);
  }
  template <class Format>
  __device__ __forceinline__ void values(const View& v, int k, const Held& held,
                                         E (&out)[width]) const {
    convert<Format>(v, slot(k, held), out);
  }
  // A slot's words, in the order of memory.
  struct Slot {
    uint32_t word[words];
  };
  __device__ __forceinline__ Slot slot(int k, const Held& from) const {
    const uint32_t* const raw = from.raw + k * words_held;
    Slot slot;
    if constexpr (shifted) {
      const bool odd = is_in_mid_word(p_);
      slot.word[0] = odd ? raw[0] | raw[1] << 16 : raw[1];
      slot.word[1] = odd ? raw[1] >> 16 | raw[2] << 16 : raw[2];
    } else {
#pragma unroll
      for (int w = 0; w < words; ++w) slot.word[w] = raw[w];
    }
    return slot;
  }

  template <class Format>
  __device__ __forceinline__ void store(const View& v, const Places& slots, int k,
                                        const E (&values)[width], bool whole, int rows, int steps,
                                        int64_t offset = 0) const {
    char* const p = at(v, slots, k) + offset;
    if constexpr (layout == Layout::any) {
      if (count_inside(slots, k, rows, steps)) store_element(p, v.storage, values[0]);
    } else {
      uint32_t raw[words];
      encode<Format>(values, raw);
      if (whole) *reinterpret_cast<Vector*>(p) = *reinterpret_cast<const Vector*>(raw);
      else store_apart(p, count_inside(slots, k, rows, steps), slots.reverse, raw);
    }
  }
  // Where slots are aligned.
  template <class Format>
  __device__ __forceinline__ void store_aligned(const View& v, const Places& slots, int k,
                                                const float (&values)[width], bool whole, int rows,
                                                int steps, int64_t offset = 0) const {
    alignas(words * 4) uint32_t raw[words];
    encode<Format>(values, raw);
    if (whole || (slots.row(k) < rows && slots.step(k) < steps))
      *reinterpret_cast<Vector*>(at(v, slots, k) + offset) = *reinterpret_cast<const Vector*>(raw);
  }

 private:
  // Moves the words of a slot at once.
  struct alignas(words * 4) Vector {
    uint32_t word[words];
  };
  __device__ __forceinline__ void load_whole(const View& v, const Places& slots, int64_t offset,
                                             uint32_t* to) const {
#pragma unroll
    for (int k = 0; k < count; ++k)
      *reinterpret_cast<Vector*>(to + k * words_held) =
          *reinterpret_cast<const Vector*>(at(v, slots, k) + offset);
  }
  __device__ __forceinline__ void load(const View& v, const Places& slots, int rows, int steps,
                                       int64_t offset, uint32_t* to) const {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      uint32_t* const raw = to + k * words_held;
      const char* const p = at(v, slots, k) + offset;
      const int inside = v.data ? count_inside(slots, k, rows, steps) : 0;
      if constexpr (layout == Layout::any) {
#pragma unroll
        for (int w = 0; w < words; ++w) {
          raw[w] = 0;
          if (inside && v.storage == Storage::float32)
            raw[w] = reinterpret_cast<const uint32_t*>(p)[w];
          if (inside && v.storage != Storage::float32)
            raw[w] = *reinterpret_cast<const uint16_t*>(p);
        }
      } else {
        load_apart(p, inside, slots.reverse, raw);
      }
    }
  }

  template <class Format>
  static __device__ __forceinline__ void convert(const View& v, const Slot& slot, E (&out)[width]) {
    const auto& raw = slot.word;
    if constexpr (sizeof(E) > sizeof(uint32_t)) {
      out[0] = {__uint_as_float(raw[0]), __uint_as_float(raw[1])};
    } else if constexpr (layout == Layout::any) {
      out[0] = decode(raw[0], v.storage);
    } else {
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const int j = Format::reversed ? width - 1 - i : i;
        if constexpr (layout == Layout::single) out[i] = __uint_as_float(raw[j]);
        else if constexpr (Format::bfloat)
          out[i] = __uint_as_float(j % 2 ? raw[j / 2] & 0xffff0000u : raw[j / 2] << 16);
        else out[i] = __half2float(__ushort_as_half(uint16_t(raw[j / 2] >> j % 2 * 16)));
      }
    }
  }
  __device__ __forceinline__ char* at(const View& v, const Places& slots, int k) const {
    if (k == 0) return p_;
    if (slots.along_rows) return p_ + k * (Shape::threads / Rows * slots.to_step(v));
    return p_ + k * (Shape::threads / Places::per_row * v.row);
  }
  // How many of a slot's entries, the first ones, lie in the tensor.
  static __device__ __forceinline__ int count_inside(const Places& slots, int k, int rows,
                                                     int steps) {
    const int in_steps = steps - slots.step(k);
    if (slots.row(k) >= rows || in_steps <= 0) return 0;
    return in_steps < width ? in_steps : width;
  }
  // Whether an address is in the middle of a word.
  static __device__ __forceinline__ bool is_in_mid_word(const char* p) {
    return reinterpret_cast<uintptr_t>(p) & 2;
  }
  // In the order of memory, and those that are not inside zero.
  static __device__ __forceinline__ void load_apart(const char* p, int inside, bool reverse,
                                                    uint32_t* raw) {
    uint32_t v[width];
#pragma unroll
    for (int i = 0; i < width; ++i) {
      v[i] = 0;
      if ((reverse ? width - 1 - i : i) >= inside) continue;
      if constexpr (item == 4) v[i] = reinterpret_cast<const uint32_t*>(p)[i];
      else v[i] = reinterpret_cast<const uint16_t*>(p)[i];
    }
    if constexpr (shifted) {
      const bool odd = is_in_mid_word(p);
      raw[0] = v[0];
      raw[1] = odd ? v[1] | v[2] << 16 : v[0] | v[1] << 16;
      raw[2] = odd ? v[3] : v[2] | v[3] << 16;
    } else {
#pragma unroll
      for (int w = 0; w < words; ++w) raw[w] = item == 4 ? v[w] : v[2 * w] | v[2 * w + 1] << 16;
    }
  }
  static __device__ __forceinline__ void store_apart(char* p, int inside, bool reverse,
                                                     const uint32_t* raw) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if ((reverse ? width - 1 - i : i) >= inside) continue;
      if constexpr (item == 4) reinterpret_cast<uint32_t*>(p)[i] = raw[i];
      else reinterpret_cast<uint16_t*>(p)[i] = uint16_t(raw[i / 2] >> i % 2 * 16);
    }
  }
  template <class Format>
  static __device__ __forceinline__ void encode(const float (&values)[width], uint32_t* raw) {
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const int j = w * width / words, next = j + width / words - 1;
      const float low = values[Format::reversed ? width - 1 - j : j];
      const float high = values[Format::reversed ? width - 1 - next : next];
      const auto bfloats = __floats2bfloat162_rn(low, high);
      const auto halves = __floats2half2_rn(low, high);
      if constexpr (layout == Layout::single) raw[w] = __float_as_uint(low);
      else if constexpr (Format::bfloat) memcpy(raw + w, &bfloats, sizeof bfloats);
      else memcpy(raw + w, &halves, sizeof halves);
    }
  }

  char* p_;  // the first slot in the tile at hand

 public:
  struct Held {
    alignas(shifted ? 4 : words * 4) uint32_t raw[count * words_held];
  };

 private:
  Held own_ = {};
};

// Writes a slot's values to a tile in shared memory.
template <class V, class Tile, int Rows, class Shape, Layout layout>
__device__ __forceinline__ void put(Tile& tile, const Slots<Rows, Shape, layout>& slots, int k,
                                    const V (&values)[Slots<Rows, Shape, layout>::width]) {
  constexpr int width = Slots<Rows, Shape, layout>::width;
  if constexpr (sizeof(V) == 4 && width % kQuad == 0) {
#pragma unroll
    for (int i = 0; i < width; i += kQuad)
      *reinterpret_cast<float4*>(tile.at(slots.row(k), slots.step(k) + i)) =
          make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
  } else {
    V* const to = tile.at(slots.row(k), slots.step(k));
#pragma unroll
    for (int i = 0; i < width; ++i) to[i] = values[i];
  }
}
// The sum over such tiles.
template <class Tile, int Rows, class Shape, Layout layout, int Tiles>
__device__ __forceinline__ void get_sum(const Tile (&tiles)[Tiles],
                                        const Slots<Rows, Shape, layout>& slots, int k,
                                        float (&sum)[Slots<Rows, Shape, layout>::width]) {
  constexpr int width = Slots<Rows, Shape, layout>::width, piece = width < kQuad ? width : kQuad;
  struct alignas(4 * piece) Piece {
    float v[piece];
  };
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
#pragma unroll
    for (int first = 0; first < width; first += piece) {
      const Piece p =
          *reinterpret_cast<const Piece*>(tiles[t].at(slots.row(k), slots.step(k) + first));
#pragma unroll
      for (int i = 0; i < piece; ++i) sum[first + i] = t == 0 ? p.v[i] : sum[first + i] + p.v[i];
    }
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
