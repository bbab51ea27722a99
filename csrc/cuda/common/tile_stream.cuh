// How tiles of tensors come into shared memory and gradients go out: window by window, or channels
// by channels, a few neighbouring entries per thread.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "async_copy.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// What is known of u, delta, z, B, C and their gradients when a kernel is compiled. `any`: nothing;
// every stride and dtype is looked up, B and C may be constant in time, there may be many states.
// Else: real, B and C vary in time, no more than kStateTile states, all contiguous in time and of
// one dtype, of 16 bits or of 32.
enum class Layout { any, half, single };

constexpr __host__ __device__ int item_of(Layout layout) { return layout == Layout::half ? 2 : 4; }
constexpr __host__ __device__ Accuracy accuracy_of(Layout layout) {
  return layout == Layout::half ? Accuracy::half : Accuracy::full;
}

// What the conversions of such a dtype need to know. With Layout::any they look it up.
template <bool Bfloat, bool Reversed>
struct FormatOf {
  static constexpr bool bfloat = Bfloat, reversed = Reversed;
};
using Unknown = FormatOf<false, false>;

// Calls f with the format, as a constant.
template <Layout layout, class F>
__device__ __forceinline__ void specialize(Storage storage, bool reverse, const F& f) {
  if constexpr (layout == Layout::any) {
    f(Unknown());
  } else if (layout == Layout::half && storage == Storage::bfloat16) {
    if (reverse) f(FormatOf<true, true>());
    else f(FormatOf<true, false>());
  } else {
    if (reverse) f(FormatOf<false, true>());
    else f(FormatOf<false, false>());
  }
}

// How a tile is loaded: all of it, which lies in the tensor; by slots that are aligned and lie in the
// tensor or outside; all of it by slots that begin anywhere, as a Stream that is not `Shifted` loads
// apart; or each entry for itself.
enum class Loads { whole, aligned, shifted, apart };

// Which entries (row, step) of a tile a thread loads, converts and stores: `count` times `width`
// neighbours in time, which are quads, or with `any` single entries.
// Neighbouring threads are neighbours in time too, or with `any`, if rows are nearer in memory,
// neighbours in rows.
// Of small tiles only the first threads have any, the others rows that are not there.
template <int Rows, class Shape, Layout layout>
struct Slots {
  static constexpr int all = Rows * Shape::window;
  static constexpr int threads =
      layout != Layout::any && all < Shape::threads * kQuad ? all / kQuad : Shape::threads;
  static constexpr int entries = all / threads;
  static constexpr int width = layout == Layout::any ? 1 : kQuad;
  static constexpr int count = entries / width, per_row = Shape::window / width;
  static_assert(entries >= width && threads % per_row == 0, "uneven tiles");
  int thread;  // of those that share the tile
  bool along_rows, reverse;

  __device__ __forceinline__ Slots(const View& v, const Work& work)
      : thread(threadIdx.x % Shape::threads), along_rows(layout == Layout::any && v.row < v.last),
        reverse(work.reverse) {}
  __device__ __forceinline__ bool has_any() const {
    return threads == Shape::threads || thread < threads;
  }
  __device__ __forceinline__ int row(int k) const {
    if (along_rows) return (thread + k * Shape::threads) % Rows;
    return thread / per_row + k * Shape::threads / per_row;
  }
  __device__ __forceinline__ int step(int k) const {
    if (along_rows) return (thread + k * Shape::threads) / Rows;
    return thread % per_row * width;
  }
  // Bytes from one step to the next.
  __device__ __forceinline__ int64_t to_step(const View& v) const {
    const int64_t step = layout == Layout::any ? v.last : item_of(layout);
    return reverse ? -step : step;
  }
};

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
    static_assert(!shifted || loads == Loads::shifted || loads == Loads::apart,
                  "slots are not aligned");
    if constexpr (loads == Loads::whole) {
      load_whole(v, slots, offset, to.raw);
    } else if constexpr (loads == Loads::apart || (loads == Loads::shifted && !shifted)) {
      load(v, slots, rows, steps, offset, to.raw);
    } else if constexpr (loads == Loads::shifted) {
#pragma unroll
      for (int k = 0; k < count; ++k)
        if (v.data) load_shifted(at(v, slots, k) + offset, to.raw + k * words_held);
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
  // Half a word, a word and half a word, or two words: nothing is made of them before they are there.
  static __device__ __forceinline__ void load_shifted(const char* p, uint32_t* raw) {
    const bool odd = is_in_mid_word(p);
    if (odd) raw[0] = *reinterpret_cast<const uint16_t*>(p);
    raw[1] = *reinterpret_cast<const uint32_t*>(odd ? p + 2 : p);
    if (odd) raw[2] = *reinterpret_cast<const uint16_t*>(p + 6);
    else raw[2] = *reinterpret_cast<const uint32_t*>(p + 4);
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

// A segment of B or C.
template <class E, Layout layout>
struct SegmentOf {
  const E* p;  // with `any` null: constant
  E value;

  __device__ __forceinline__ void quad(int first, E (&out)[kQuad]) const {
    if (layout != Layout::any || p) {
      load_quad(p + first, out);
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) out[i] = value;
    }
  }
  template <int Steps>
  __device__ __forceinline__ void load(E (&out)[Steps]) const {
#pragma unroll
    for (int first = 0; first < Steps; first += kQuad)
      quad(first, reinterpret_cast<E(&)[kQuad]>(out[first]));
  }
};

// B or C as a stream of state tiles; with `any` it may be constant in time: then each lane reads
// the constant of its channel.
template <class E, class Shape, Layout layout>
class StateMatrix {
 public:
  using Memory = StateTile<E, Shape>;

  __device__ __forceinline__ StateMatrix(const View& v, bool constant, const Work& work)
      : view_(v), slots_(v, work), constant_(layout == Layout::any && constant) {}
  __device__ __forceinline__ bool constant() const { return layout == Layout::any && constant_; }

  __device__ __forceinline__ void begin(const Work& work, int64_t window) {
    if (constant()) return;
    const char* const base = view_.data + work.b * view_.batch + work.g * view_.group;
    stream_.begin(view_, base, slots_, work, window);
  }
  __device__ __forceinline__ void next(int windows) {
    if (!constant()) stream_.next(windows * Shape::window * slots_.to_step(view_));
  }
  // Starts the loads of all states in all steps of the window at hand, aligned.
  __device__ __forceinline__ void load_whole() {
    stream_.template load<Loads::whole>(view_, slots_, kStateTile, Shape::window);
  }
  // Starts the loads of states [first, first + kStateTile) of the window at hand, which has so many
  // steps.
  __device__ __forceinline__ void load(int first, int states, int steps) {
    if (!constant())
      stream_.template load<Loads::apart>(view_, slots_, states - first, steps, first * view_.row);
  }
  template <class Format>
  __device__ __forceinline__ void commit(Memory& to) const {
    if (constant()) return;
#pragma unroll
    for (int k = 0; k < Places::count; ++k) {
      E values[Places::width];
      stream_.template values<Format>(view_, k, values);
      if (slots_.has_any()) put(to, slots_, k, values);
    }
  }
  // State n, which is so far in its tile, in the segment of a lane.
  __device__ __forceinline__ SegmentOf<E, layout> segment(const Memory& tile, const Work& work,
                                                          int channel, int segment, int in_tile,
                                                          int n) const {
    if (!constant()) return {tile.segment(in_tile, segment), E(0.0f)};
    if (channel >= work.channels) return {nullptr, E(0.0f)};
    return {nullptr,
            load_element<E>(work.at(view_) + channel * view_.row + n * view_.last, view_.storage)};
  }

 private:
  using Places = Slots<kStateTile, Shape, layout>;
  const View& view_;
  const Places slots_;
  const bool constant_;
  Stream<E, kStateTile, Shape, layout> stream_;
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
