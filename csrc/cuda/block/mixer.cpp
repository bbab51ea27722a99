// The mixer of a block on CUDA tensors, and the norm before it: a sequence of kernels and matrix
// products, forward and backward. Shapes and letters as in ops.cpp.
//
// Everything between in_proj and out_proj is rows of channels, time contiguous: nothing is
// transposed. A convolution, projections and scans of all directions are one launch each.
//
// What a layer takes of the host decides how fast it trains. So memory comes in few allocations, kernels
// get addresses, and tensors are made only for torch's matrix products.
//
// SPDX-License-Identifier: Apache-2.0
// Products into given memory: torch's stable C interface, as AOTInductor's binaries call it.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <tuple>
#include <vector>

#include "../ops/selective_scan.h"
#include "../ops/tensors.h"
#include "block.h"
#include "norm.h"

namespace vim_mm {
namespace {

using torch::stable::accelerator::DeviceGuard;
using torch::stable::detail::from;
using torch::stable::detail::to;
using MaybeTensors = std::vector<std::optional<Tensor>>;
using Tensors = std::vector<Tensor>;
using Integers = std::vector<int64_t>;

constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16,
                                 ScalarType::Double};  // by number of Storage

// A view of t's memory.
Tensor view(const Tensor& t, std::initializer_list<int64_t> sizes,
            std::initializer_list<int64_t> strides) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), int64_t(sizes.size()), sizes.begin(), strides.begin(), 0, &handle));
  return Tensor(handle);
}

// out = a b, for matrices or batches of them, where out may be float32 whatever a and b are.
void multiply_into(const Tensor& out, const Tensor& a, const Tensor& b) {
  const bool batched = a.dim() == 3;
  if (a.size(a.dim() - 1) == 0) {  // not every matrix product knows empty sums
    Tensor zeros = out;
    torch::stable::zero_(zeros);
  } else if (out.scalar_type() == a.scalar_type()) {
    const auto product = batched ? aoti_torch_cuda_bmm_out : aoti_torch_cuda_mm_out;
    TORCH_ERROR_CODE_CHECK(product(out.get(), a.get(), b.get()));
  } else {
    std::array<StableIValue, 4> stack{from(a), from(b), from(out.scalar_type()), from(out)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(batched ? "aten::bmm" : "aten::mm", "dtype_out",
                                                 stack.data(), TORCH_ABI_VERSION));
    to<Tensor>(stack[0]);  // the reference to out that comes back
  }
}
// out = the sum of t over a dimension, in the type of out.
void sum_into(const Tensor& out, const Tensor& t, int64_t dim, bool keep) {
  std::array<StableIValue, 5> stack{from(t), from(std::optional(Integers{dim})), from(keep),
                                    from(std::optional(out.scalar_type())), from(out)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::sum", "IntList_out", stack.data(), TORCH_ABI_VERSION));
  to<Tensor>(stack[0]);
}

// The parameters in the order in which they come: those above kSingle once, the following for each
// set, A_log for each direction.
enum Single { kInProj, kInBias, kOutProj, kOutBias, kSingle };
enum Each { kConv, kConvBias, kXProj, kDtProj, kDtBias, kD, kEach };
constexpr int kMaxParameters = kSingle + kMaxDirections * (kEach + 1);

struct Parameter {
  const char* name;
  int dims;
  std::array<int64_t, 3> sizes;
  bool narrow;  // kernels and products take it in the dtype of x, else in float32
  bool optional;
  int64_t place;  // of what they take, in what forward keeps

  int64_t numel() const {
    int64_t numel = 1;
    for (int i = 0; i < dims; ++i) numel *= sizes[i];
    return numel;
  }
};

// The sizes that parameters alone tell.
struct InnerSizes {
  int64_t channels, states, rank, taps;
};
InnerSizes sizes_of(const MaybeTensors& parameters) {
  STD_TORCH_CHECK(parameters.size() > kSingle + kEach, "vim_mm: wrong number of parameters");
  const auto get = [](const std::optional<Tensor>& t, const char* name,
                      int64_t dims) -> const Tensor& {
    STD_TORCH_CHECK(t && t->dim() == dims, "vim_mm: wrong shape of ", name);
    return *t;
  };
  const Tensor& A_log = get(parameters.back(), "A_log", 2);
  return {A_log.size(0), A_log.size(1), get(parameters[kSingle + kDtProj], "dt_proj", 2).size(1),
          get(parameters[kSingle + kConv], "conv", 3).size(2)};
}

// The mixer of one call: its sizes, and where what forward keeps lies in memory.
struct Mixer {
  int64_t batch, steps, outer, channels, states, rank, taps;
  int sets, directions;
  ScalarType type;  // of activations
  Storage storage;
  int64_t item;  // its bytes
  std::array<Parameter, kMaxParameters> parameters;
  int count;
  ScanArguments scan{};  // all but the tensors
  Plan kept;
  int64_t input, rstd, xz, dt_B_C, edges, sum;  // the first two where the norm is part of it

  // `x` is [B, L, C] of any dtype, `type_` that of activations. `normed`: with the norm. `with_sum`: with
  // the sum over directions, which backward asks for.
  Mixer(const Tensor& x, ScalarType type_, bool normed, int64_t count_, const InnerSizes& inner,
        int64_t method, const Integers& reverse, bool with_sum)
      : batch(x.size(0)), steps(x.size(1)), outer(x.size(2)), channels(inner.channels),
        states(inner.states), rank(inner.rank), taps(inner.taps),
        sets((int(count_) - kSingle - int(reverse.size())) / kEach),
        directions(int(reverse.size())), type(type_), storage(storage_of(type_)),
        item(storage == Storage::float32 ? 4 : 2), count(int(count_)) {
    STD_TORCH_CHECK(
        directions >= 1 && directions <= kMaxDirections && (sets == 1 || sets == directions) &&
            count == kSingle + sets * kEach + directions,
        "vim_mm: expected 1 or 2 directions, and one set of parameters or one for each");
    STD_TORCH_CHECK(taps >= 1 && taps <= kMaxTaps,
                    "vim_mm: expected convolutions [H, 1, W], W <= ", kMaxTaps);
    STD_TORCH_CHECK(method >= 0 && method < kMethods, "vim_mm: unknown discretization number ",
                    method);
    add(kInProj, 1, 1, {"in_proj", 2, {2 * channels, outer}, true});
    add(kInBias, 1, 1, {"in_bias", 1, {2 * channels}, true, true});
    add(kOutProj, 1, 1, {"out_proj", 2, {outer, channels}, true});
    add(kOutBias, 1, 1, {"out_bias", 1, {outer}, true, true});
    const auto add_each = [&](Each which, const Parameter& p) {
      add(index(which, 0), sets, kEach, p);
    };
    add_each(kConv, {"conv", 3, {channels, 1, taps}});
    add_each(kConvBias, {"conv_bias", 1, {channels}, false, true});
    add_each(kXProj, {"x_proj", 2, {rows(), channels}, true});
    add_each(kDtProj, {"dt_proj", 2, {channels, rank}, true});
    add_each(kDtBias, {"dt_bias", 1, {channels}});
    add_each(kD, {"D", 1, {channels}});
    add(index_of_A(0), directions, 1, {"A_log", 2, {channels, states}});

    scan.delta_softplus = true;
    scan.batch = batch, scan.groups = directions, scan.channels = channels;
    scan.steps = steps, scan.states = states, scan.method = int(method);
    set_directions(scan, reverse);
    input = kept.take(normed ? bytes_of(outer) : 0);
    rstd = kept.take(normed ? tokens() * kFloat : 0);
    xz = kept.take(bytes_of(2 * channels));
    dt_B_C = kept.take(bytes_of(sets * rows()));
    edges = kept.take(count_edges(scan) * kFloat);
    sum = kept.take(with_sum ? bytes_of(channels) : 0);
  }

  int64_t tokens() const { return batch * steps; }
  int64_t rows() const { return rank + 2 * states; }  // of dt, B and C
  // Of so many rows of activations.
  int64_t bytes_of(int64_t rows) const { return rows * tokens() * item; }
  static int index(Each which, int set) { return kSingle + set * kEach + which; }
  int index_of_A(int direction) const { return kSingle + sets * kEach + direction; }

  // Where parameters lie, those of all sets or directions one behind the other.
  int64_t place(Single which) const { return parameters[which].place; }
  int64_t place(Each which) const { return parameters[index(which, 0)].place; }
  int64_t place_of_A() const { return parameters[index_of_A(0)].place; }

  // Rows of tokens as a matrix, a stack of them, or transposed.
  Tensor matrix(const Pool& pool, int64_t place, int64_t rows) const {
    return pool.tensor(place, type, {rows, tokens()}, {tokens(), 1});
  }
  Tensor transposed(const Pool& pool, int64_t place, int64_t rows) const {
    return pool.tensor(place, type, {tokens(), rows}, {1, tokens()});
  }
  // So many matrices, the first `rows` of every `stride`.
  Tensor stack(const Pool& pool, int64_t place, int64_t count, int64_t rows, int64_t stride) const {
    return pool.tensor(place, type, {count, rows, tokens()}, {stride * tokens(), tokens(), 1});
  }

  // A parameter as it is taken by products, or the matrices of all sets.
  Tensor matrix(const Pool& memory, Single which) const {
    const auto [rows, columns, _] = parameters[which].sizes;
    return memory.tensor(place(which), type, {rows, columns}, {columns, 1});
  }
  Tensor transposed(const Pool& memory, Single which) const {
    const auto [rows, columns, _] = parameters[which].sizes;
    return memory.tensor(place(which), type, {columns, rows}, {1, columns});
  }
  Tensor x_proj(const Pool& memory) const {
    const int64_t size = rows() * channels;
    return memory.tensor(place(kXProj), type, {sets, rows(), channels}, {size, channels, 1});
  }
  Tensor x_proj_transposed(const Pool& memory) const {
    const int64_t size = rows() * channels;
    return memory.tensor(place(kXProj), type, {sets, channels, rows()}, {size, 1, channels});
  }
  Tensor dt_proj(const Pool& memory) const {  // [sets, R, H], see conversions_of
    const int64_t size = rank * channels;
    return memory.tensor(place(kDtProj), type, {sets, rank, channels}, {size, channels, 1});
  }

  // What the scan reads or writes: rows of activations of a direction, which follow each other after
  // `group` rows, or 0 where directions share them.
  View activations(void* data, int64_t group) const {
    View v;
    v.data = static_cast<char*>(data), v.storage = storage;
    v.batch = steps * item, v.group = bytes_of(group), v.row = bytes_of(1), v.last = item;
    return v;
  }
  // Floats of channels, `columns` each.
  View floats(float* data, bool shared, int64_t columns = 1) const {
    View v;
    v.data = reinterpret_cast<char*>(data);
    v.group = shared ? 0 : channels * columns * kFloat, v.row = columns * kFloat, v.last = kFloat;
    return v;
  }
  bool shares() const { return sets < directions; }
  // The scan of these activations.
  ScanArguments scan_of(const Pool& memory, void* u, void* delta) const {
    ScanArguments s = scan;
    s.u = s.z = activations(u, shares() ? 0 : channels);
    s.delta = activations(delta, shares() ? 0 : channels);
    s.B =
        activations(static_cast<char*>(memory.at(dt_B_C)) + bytes_of(rank), shares() ? 0 : rows());
    s.C = s.B, s.C.data += bytes_of(states);
    s.A = floats(memory.floats(place_of_A()), false, states);
    s.D = floats(memory.floats(place(kD)), shares());
    s.delta_bias = floats(memory.floats(place(kDtBias)), shares());
    return s;
  }

  Convolution convolution(const Pool& memory) const {
    Convolution p{};
    p.storage = storage;
    p.channels = channels, p.batch = batch, p.steps = steps;
    p.directions = sets, p.taps = int(taps);
    for (int k = 0; k < sets; ++k) p.reverse[k] = reverses(k);
    p.weight = memory.floats(place(kConv)), p.bias = memory.floats(place(kConvBias));
    p.x = memory.at(xz), p.x_row = tokens();
    return p;
  }
  StepProjection step_projection(const Pool& memory) const {
    StepProjection p{};
    p.storage = storage;
    p.sets = sets, p.rank = int(rank);
    p.channels = channels, p.tokens = tokens();
    p.weight = memory.at(place(kDtProj));
    p.dt = memory.at(dt_B_C), p.dt_set = rows() * tokens();
    return p;
  }

 private:
  bool reverses(int k) const {
    return scan.directions.bits[0] >> (scan.same_direction ? 0 : k) & 1;
  }
  // So many parameters of one kind, which come every `stride`.
  void add(int first, int count, int stride, Parameter p) {
    STD_TORCH_CHECK(p.numel() <= INT32_MAX, "vim_mm: too large a parameter");
    const int64_t bytes = p.numel() * (p.narrow ? item : kFloat);
    p.place = kept.take(count * bytes);
    for (int k = 0; k < count; ++k, p.place += bytes) parameters[first + k * stride] = p;
  }
};

// What is taken of the parameters.
Conversions conversions_of(const Mixer& mixer, const Tensor& x, const MaybeTensors& parameters,
                           const Pool& memory) {
  Conversions all;
  for (int i = 0; i < mixer.count; ++i) {
    const Parameter& p = mixer.parameters[i];
    const std::optional<Tensor>& t = parameters[i];
    STD_TORCH_CHECK(t || p.optional, "vim_mm: expected ", p.name);
    if (!t && p.narrow) continue;
    Conversion c;  // of zeros, unless
    if (t) {
      const auto sizes = t->sizes();
      STD_TORCH_CHECK(
          sizes.size() == size_t(p.dims) && std::equal(sizes.begin(), sizes.end(), p.sizes.begin()),
          "vim_mm: wrong shape of ", p.name);
      STD_TORCH_CHECK(t->is_contiguous(), "vim_mm: expected ", p.name, " contiguous");
      expect_device(*t, p.name, x);
      expect_type(*t, p.name,
                  {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Double});
      c.from = t->data_ptr(), c.from_storage = storage_of(*t);
    }
    c.to = memory.at(p.place), c.to_storage = p.narrow ? mixer.storage : Storage::float32;
    c.columns = int(p.numel());
    if (i >= mixer.index_of_A(0)) {
      c.function = Conversion::negative_exp;
    } else if (i >= kSingle && (i - kSingle) % kEach == kDtProj) {  // transposed
      c.rows = int(mixer.rank), c.columns = int(mixer.channels);
      c.from_row = 1, c.from_column = int(mixer.rank);
    }
    all.each[all.count++] = c;
  }
  return all;
}

void expect_tokens(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 3 && t.is_cuda() && t.is_contiguous(), "vim_mm: expected ", name,
                  " [B, L, C], contiguous on CUDA");
  expect_narrow(t, name);
}

// out = a b + bias, where there may be no bias.
void multiply_add_into(const Tensor& out, const std::optional<Tensor>& bias, const Tensor& a,
                       const Tensor& b) {
  if (!bias) return multiply_into(out, a, b);
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cuda_addmm_out(out.get(), bias->get(), a.get(), b.get(), 1.0, 1.0));
}

std::tuple<Tensor, Tensor, Tensor> mixer_fwd(const Tensor& x, const std::optional<Tensor>& update,
                                             const std::optional<Tensor>& norm, double eps,
                                             ScalarType dtype, const MaybeTensors& parameters,
                                             int64_t method, const Integers& reverse, double scale,
                                             bool keep) {
  expect_tokens(x, "x");
  if (!norm) {
    STD_TORCH_CHECK(!update, "vim_mm: an update without a norm");
    expect_type(x, "x", {dtype});
  }
  const Mixer mixer(x, dtype, norm.has_value(), int64_t(parameters.size()), sizes_of(parameters),
                    method, reverse, keep);
  const DeviceGuard guard(x.get_device_index());
  void* const stream = current_stream(x);
  const int64_t channels = mixer.channels, outer = mixer.outer, tokens = mixer.tokens();
  Plan plan;
  const int64_t u = plan.take(mixer.bytes_of(mixer.sets * channels));
  const int64_t delta = plan.take(mixer.bytes_of(mixer.sets * channels));
  const int64_t y = plan.take(mixer.bytes_of(mixer.directions * channels));
  const int64_t last_state =
      plan.take(mixer.batch * mixer.directions * channels * mixer.states * kFloat);
  const Pool memory(x, mixer.kept), scratch(x, plan);
  const Tensor sum = update ? new_tensor(x) : new_tensor(x, {0}, x.scalar_type());
  const Conversions conversions = conversions_of(mixer, x, parameters, memory);
  if (norm) {
    AddRmsNorm p = norm_arguments(x, update, *norm, eps, dtype);
    p.normed = memory.at(mixer.input), p.rstd = memory.floats(mixer.rstd);
    if (update) p.sum = sum.data_ptr();
    add_rms_norm(p, conversions, stream);
  } else {
    convert(conversions, stream);
  }

  std::optional<Tensor> bias;
  if (parameters[kInBias])
    bias = memory.tensor(mixer.place(kInBias), dtype, {2 * channels, tokens}, {1, 0});
  multiply_add_into(mixer.matrix(memory, mixer.xz, 2 * channels), bias,
                    mixer.matrix(memory, kInProj),
                    norm ? memory.tensor(mixer.input, dtype, {outer, tokens}, {1, outer})
                         : view(x, {outer, tokens}, {1, outer}));
  Convolution convolution = mixer.convolution(memory);
  convolution.u = scratch.at(u);
  convolve(convolution, stream);
  multiply_into(mixer.stack(memory, mixer.dt_B_C, mixer.sets, mixer.rows(), mixer.rows()),
                mixer.x_proj(memory), mixer.stack(scratch, u, mixer.sets, channels, channels));
  StepProjection step_projection = mixer.step_projection(memory);
  step_projection.delta = scratch.at(delta);
  project_steps(step_projection, stream);
  scan_into(mixer.scan_of(memory, scratch.at(u), scratch.at(delta)),
            mixer.activations(scratch.at(y), channels), memory.at(mixer.edges),
            scratch.at(last_state), x, stream);

  const Tensor out = new_tensor(x, x.sizes(), dtype);
  OutputProjection o{};
  o.gate.storage = mixer.storage, o.gate.count = channels * tokens;
  o.gate.scale = static_cast<float>(scale), o.gate.directions = mixer.directions;
  o.gate.y = scratch.at(y), o.gate.z = memory.at(mixer.xz + mixer.bytes_of(channels));
  if (keep) o.gate.sum = memory.at(mixer.sum);
  o.channels = channels, o.tokens = tokens, o.outer = outer;
  o.weight = memory.at(mixer.place(kOutProj)), o.out = out.data_ptr();
  if (parameters[kOutBias]) o.bias = memory.at(mixer.place(kOutBias));
  if (can_project_output(o)) {
    project_output(o, stream);
  } else {
    // What was convolved is done with, and as large.
    o.gate.out = scratch.at(u);
    gate(o.gate, stream);
    bias.reset();
    if (o.bias) bias = memory.tensor(mixer.place(kOutBias), dtype, {tokens, outer}, {0, 1});
    multiply_add_into(view(out, {tokens, outer}, {outer, 1}), bias,
                      mixer.transposed(scratch, u, channels), mixer.transposed(memory, kOutProj));
  }
  return {out, sum, keep ? memory.memory() : new_tensor(x, {0}, ScalarType::Byte)};
}

// Backward, part by part from the last: each takes the gradient of what forward's part makes. The
// gradients of parameters are sums over tokens in float32, from which `finish` makes what is returned.
class Backward {
 public:
  // What comes in: x is the sum where there is a norm.
  struct Given {
    const Tensor &grad_out, &x, &kept;
    const std::optional<Tensor>&grad_sum, &norm;
    const Integers& types;  // of parameters
    bool with_update;
    float scale;
  };

  Backward(const Mixer& mixer, const Given& given)
      : m_(mixer), given_(given), types_(given.types), memory_(given.kept),
        stream_(current_stream(given.x)) {
    if (given.norm) norm_ = norm_backward_arguments(given.x, *given.norm, m_.type);
    plan();
    scratch_.emplace(given.x, plan_);
  }

  Tensors run() {
    output_gradients();
    scan_gradients();
    if (m_.shares()) add_directions();
    projection_gradients();
    convolution_gradients();
    input_gradients();
    return finish();
  }

 private:
  // Whether that parameter is float32, as sums are.
  bool is_single(int which) const { return types_[which] == int64_t(Storage::float32); }
  void plan() {
    const int64_t channels = m_.channels, sets = m_.sets, directions = m_.directions;
    const auto rows = [&](int64_t count) { return plan_.take(m_.bytes_of(count)); };
    const auto floats = [&](int64_t count) { return plan_.take(count * kFloat); };
    // The gradient of u comes when the gate's are done with.
    grad_u_ = grad_gated_ = rows(2 * channels), gated_ = grad_gated_ + m_.bytes_of(channels);
    grad_y_ = rows(channels), grad_xz_ = rows(2 * channels);
    u_ = rows(sets * channels), delta_ = rows(sets * channels);
    grad_delta_ = rows(directions * channels), grad_dt_B_C_ = rows(directions * m_.rows());
    for (int i = 0; i < kSingle; ++i)
      sums_[i] = types_[i] < 0 || is_single(i) ? 0 : floats(m_.parameters[i].numel());
    conv_ = floats(sets * channels * m_.taps), conv_bias_ = floats(sets * channels);
    x_proj_ = floats(sets * m_.rows() * sets * channels);
    dt_proj_ = floats(sets * channels * sets * m_.rows());
    D_ = floats(directions * channels), dt_bias_ = floats(directions * channels);
    A_ = floats(directions * channels * m_.states);
    if (m_.shares()) {
      sum_u_ = rows(channels), sum_delta_ = rows(channels), sum_dt_B_C_ = rows(m_.rows());
      sum_D_ = floats(channels), sum_dt_bias_ = floats(channels);
    }
    if (given_.norm) grad_input_ = rows(m_.outer), norm_parts_ = floats(count_parts(norm_));
  }
  // The float32 sum of a parameter that there is once: where it is float32 itself, what is returned.
  Tensor sum_of(Single which) {
    if (is_single(which)) return gradient(which);
    const auto [rows, columns, _] = m_.parameters[which].sizes;
    if (m_.parameters[which].dims == 1)
      return scratch_->tensor(sums_[which], ScalarType::Float, {rows}, {1});
    return scratch_->tensor(sums_[which], ScalarType::Float, {rows, columns}, {columns, 1});
  }
  // Made when first asked for.
  const Tensor& gradient(int which) {
    const Parameter& p = m_.parameters[which];
    std::optional<Tensor>& g = gradients_[which];
    if (!g) {
      const std::vector<int64_t> sizes(p.sizes.begin(), p.sizes.begin() + p.dims);
      g = new_tensor(given_.x, sizes, kTypes[types_[which]]);
    }
    return *g;
  }
  Tensor matrix_of_floats(int64_t place, int64_t rows, int64_t columns) const {
    return scratch_->tensor(place, ScalarType::Float, {rows, columns}, {columns, 1});
  }
  Tensor grad_rows() const { return view(given_.grad_out, {m_.tokens(), m_.outer}, {m_.outer, 1}); }
  Tensor grad_columns() const {
    return view(given_.grad_out, {m_.outer, m_.tokens()}, {1, m_.outer});
  }

  // Of the gate and out_proj.
  void output_gradients() {
    const int64_t channels = m_.channels, half = m_.bytes_of(channels);
    multiply_into(m_.matrix(*scratch_, grad_gated_, channels), m_.transposed(memory_, kOutProj),
                  grad_columns());
    GateBackward g{};
    g.storage = m_.storage, g.count = channels * m_.tokens(), g.scale = given_.scale;
    g.grad_out = scratch_->at(grad_gated_);
    g.sum = memory_.at(m_.sum), g.z = memory_.at(m_.xz + half);
    g.grad_y = scratch_->at(grad_y_), g.grad_z = scratch_->at(grad_xz_ + half);
    g.out = scratch_->at(gated_);
    gate_backward(g, stream_);
    multiply_into(sum_of(kOutProj), grad_columns(), m_.transposed(*scratch_, gated_, channels));
    if (types_[kOutBias] >= 0) sum_into(sum_of(kOutBias), grad_rows(), 0, false);
  }

  // Of u and dt_B_C what comes through the scan alone, of dt_B_C therefore its B and C.
  void scan_gradients() {
    Convolution convolution = m_.convolution(memory_);
    convolution.u = scratch_->at(u_);
    convolve(convolution, stream_);
    StepProjection step_projection = m_.step_projection(memory_);
    step_projection.delta = scratch_->at(delta_);
    project_steps(step_projection, stream_);
    ScanGradients g;
    g.out = m_.activations(scratch_->at(grad_y_), 0);
    g.u = m_.activations(scratch_->at(grad_u_), m_.channels);
    g.delta = m_.activations(scratch_->at(grad_delta_), m_.channels);
    g.B = m_.activations(scratch_->at(grad_dt_B_C_ + m_.bytes_of(m_.rank)), m_.rows());
    g.C = g.B, g.C.data += m_.bytes_of(m_.states);
    g.A = m_.floats(scratch_->floats(A_), false, m_.states);
    g.D = m_.floats(scratch_->floats(D_), false);
    g.delta_bias = m_.floats(scratch_->floats(dt_bias_), false);
    scan_backward_into(m_.scan_of(memory_, scratch_->at(u_), scratch_->at(delta_)), g,
                       memory_.at(m_.edges), given_.x, stream_);
  }

  // Where directions share parameters and activations. Of dt_B_C, dt comes with the projections.
  void add_directions() {
    const int64_t directions = m_.directions, channels = m_.channels, rows = m_.rows();
    const auto add = [&](int64_t& place, int64_t sum, int64_t stride, int64_t first) {
      const int64_t skipped = m_.bytes_of(first), count = stride - first;
      sum_into(m_.stack(*scratch_, sum + skipped, 1, count, stride),
               m_.stack(*scratch_, place + skipped, directions, count, stride), 0, true);
      place = sum;
    };
    add(grad_u_, sum_u_, channels, 0), add(grad_delta_, sum_delta_, channels, 0);
    add(grad_dt_B_C_, sum_dt_B_C_, rows, m_.rank);
    const auto add_floats = [&](int64_t& place, int64_t sum) {
      sum_into(matrix_of_floats(sum, 1, channels), matrix_of_floats(place, directions, channels), 0,
               true);
      place = sum;
    };
    add_floats(D_, sum_D_), add_floats(dt_bias_, sum_dt_bias_);
  }

  // One product for all sets of parameters, of which only the blocks where a set meets itself count:
  // sums over so many tokens are faster split, as products are and batches of them are not.
  void projection_gradients() {
    const int64_t sets = m_.sets, rows = m_.rows(), channels = m_.channels;
    const Tensor grad_u = m_.stack(*scratch_, grad_u_, sets, channels, channels);
    const Tensor grad_dt_B_C = m_.stack(*scratch_, grad_dt_B_C_, sets, rows, rows);
    multiply_into(m_.stack(*scratch_, grad_dt_B_C_, sets, m_.rank, rows), m_.dt_proj(memory_),
                  m_.stack(*scratch_, grad_delta_, sets, channels, channels));
    multiply_into(matrix_of_floats(dt_proj_, sets * channels, sets * rows),
                  m_.matrix(*scratch_, grad_delta_, sets * channels),
                  m_.transposed(memory_, m_.dt_B_C, sets * rows));
    multiply_into(matrix_of_floats(x_proj_, sets * rows, sets * channels),
                  m_.matrix(*scratch_, grad_dt_B_C_, sets * rows),
                  m_.transposed(*scratch_, u_, sets * channels));
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_baddbmm_out(grad_u.get(), grad_u.get(),
                                                       m_.x_proj_transposed(memory_).get(),
                                                       grad_dt_B_C.get(), 1.0, 1.0));
  }

  void convolution_gradients() {
    ConvolutionBackward c{};
    c.forward = m_.convolution(memory_);
    c.grad_u = scratch_->at(grad_u_);
    c.grad_x = scratch_->at(grad_xz_), c.grad_x_row = m_.tokens();
    c.grad_weight = scratch_->floats(conv_), c.grad_bias = scratch_->floats(conv_bias_);
    convolve_backward(c, stream_);
  }

  // Of in_proj, and of the norm.
  void input_gradients() {
    const int64_t rows = 2 * m_.channels, tokens = m_.tokens(), outer = m_.outer;
    const auto matrix_of = [&](const Tensor& t) { return view(t, {tokens, outer}, {outer, 1}); };
    const auto matrix_at = [&](const Pool& pool, int64_t place) {
      return pool.tensor(place, m_.type, {tokens, outer}, {outer, 1});
    };
    const bool normed = given_.norm.has_value();
    const Tensor grad_xz = m_.matrix(*scratch_, grad_xz_, rows);
    grad_x_ = new_tensor(given_.x);
    multiply_into(sum_of(kInProj), grad_xz,
                  normed ? matrix_at(memory_, m_.input) : matrix_of(given_.x));
    if (types_[kInBias] >= 0) sum_into(sum_of(kInBias), grad_xz, 1, false);
    multiply_into(normed ? matrix_at(*scratch_, grad_input_) : matrix_of(grad_x_),
                  m_.transposed(*scratch_, grad_xz_, rows), m_.matrix(memory_, kInProj));
    if (normed) norm_gradients();
  }

  void norm_gradients() {
    norm_.grad_normed = scratch_->at(grad_input_);
    if (given_.grad_sum) norm_.grad_sum = given_.grad_sum->data_ptr();
    norm_.rstd = memory_.floats(m_.rstd);
    norm_.grad_residual = grad_x_.data_ptr();
    if (given_.with_update) {
      grad_update_ = new_tensor(given_.grad_out);
      norm_.grad_update = grad_update_.data_ptr();
    }
    norm_.grad_weight = scratch_->floats(norm_parts_);
    grad_norm_ = new_tensor(*given_.norm);
    norm_backward_into(norm_, grad_norm_, stream_);
  }

  // All gradients in the dtypes of their parameters, what is not yet by one launch.
  Tensors finish() {
    Conversions all;
    const auto convert_from = [&](int which, int64_t place) -> Conversion& {
      Conversion& c = all.each[all.count++] = {};
      c.from = scratch_->at(place);
      c.to = gradient(which).data_ptr(), c.to_storage = Storage(types_[which]);
      c.columns = int(m_.parameters[which].numel());
      return c;
    };
    for (int i = 0; i < kSingle; ++i)
      if (types_[i] >= 0 && !is_single(i)) convert_from(i, sums_[i]);
    for (int k = 0; k < m_.sets; ++k) {
      // The k-th of sums that follow each other.
      const auto convert_each = [&](Each which, int64_t place) {
        const int i = m_.index(which, k);
        if (types_[i] >= 0) convert_from(i, place + k * m_.parameters[i].numel() * kFloat);
      };
      convert_each(kConv, conv_), convert_each(kConvBias, conv_bias_);
      convert_each(kDtBias, dt_bias_), convert_each(kD, D_);
      // What begins the k-th block on the diagonal.
      const auto convert_block = [&](Each which, int64_t place, int64_t rows, int64_t columns) {
        const int i = m_.index(which, k);
        Conversion& c = convert_from(i, place + (k * rows * m_.sets + k) * columns * kFloat);
        c.rows = int(m_.parameters[i].sizes[0]), c.columns = int(m_.parameters[i].sizes[1]);
        c.from_row = int(m_.sets * columns);
      };
      convert_block(kXProj, x_proj_, m_.rows(), m_.channels);
      convert_block(kDtProj, dt_proj_, m_.channels, m_.rows());
    }
    for (int k = 0; k < m_.directions; ++k) {  // A is its own derivative by A_log
      const int64_t skipped = k * m_.channels * m_.states * kFloat;
      Conversion& c = convert_from(m_.index_of_A(k), A_ + skipped);
      c.factor = memory_.floats(m_.place_of_A() + skipped), c.function = Conversion::product;
    }
    convert(all, stream_);

    const auto none = [&] { return new_tensor(given_.x, {0}, m_.type); };
    Tensors results{grad_x_, given_.with_update ? grad_update_ : none(),
                    given_.norm ? grad_norm_ : none()};
    for (int i = 0; i < m_.count; ++i) results.push_back(gradients_[i] ? *gradients_[i] : none());
    return results;
  }

  const Mixer& m_;
  const Given given_;
  const Integers& types_;
  const Pool memory_;
  void* const stream_;
  AddRmsNormBackward norm_{};
  // Places of activations and their gradients, and of sums over tokens: those that there are once, or
  // of all sets; D's, the bias's and A's of directions.
  Plan plan_;
  int64_t grad_gated_, gated_, grad_y_, grad_xz_, u_, delta_, grad_u_, grad_delta_, grad_dt_B_C_;
  std::array<int64_t, kSingle> sums_;
  int64_t conv_, conv_bias_, x_proj_, dt_proj_, D_, dt_bias_, A_;
  int64_t sum_u_, sum_delta_, sum_dt_B_C_, sum_D_, sum_dt_bias_;  // over directions
  int64_t grad_input_, norm_parts_;
  std::optional<Pool> scratch_;
  std::array<std::optional<Tensor>, kMaxParameters> gradients_;
  Tensor grad_x_, grad_update_, grad_norm_;
};

Tensors mixer_bwd(const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& x,
                  const std::optional<Tensor>& norm, const Tensor& kept, const Integers& sizes,
                  const Integers& types, bool with_update, int64_t method, const Integers& reverse,
                  double scale) {
  expect_tokens(x, "x");
  expect_tokens(grad_out, "grad_out");
  expect_contiguous(grad_out, "grad_out", x.sizes());
  if (grad_sum) {
    expect_contiguous(*grad_sum, "grad_sum", x.sizes());
    expect_type(*grad_sum, "grad_sum", {x.scalar_type()});
  }
  if (!norm) {
    STD_TORCH_CHECK(!grad_sum && !with_update, "vim_mm: an update without a norm");
    expect_type(grad_out, "grad_out", {x.scalar_type()});
  }
  STD_TORCH_CHECK(sizes.size() == 4, "vim_mm: expected H, N, R and W");
  const Mixer mixer(x, grad_out.scalar_type(), norm.has_value(), int64_t(types.size()),
                    {sizes[0], sizes[1], sizes[2], sizes[3]}, method, reverse, true);
  for (int i = 0; i < mixer.count; ++i)
    STD_TORCH_CHECK(types[i] >= (mixer.parameters[i].optional ? -1 : 0) &&
                        types[i] < int64_t(std::size(kTypes)),
                    "vim_mm: unknown dtype of ", mixer.parameters[i].name);
  int64_t offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(kept.get(), &offset));
  STD_TORCH_CHECK(kept.scalar_type() == ScalarType::Byte && kept.is_contiguous() && offset == 0 &&
                      kept.numel() == mixer.kept.bytes(),
                  "vim_mm: expected what the mixer's forward kept");
  expect_device(kept, "what forward kept", x);
  expect_device(grad_out, "grad_out", x);
  if (grad_sum) expect_device(*grad_sum, "grad_sum", x);
  const DeviceGuard guard(x.get_device_index());
  return Backward(mixer, {grad_out, x, kept, grad_sum, norm, types, with_update,
                          static_cast<float>(scale)})
      .run();
}

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CUDA, m) {
  m.impl("mixer_fwd", TORCH_BOX(&vim_mm::mixer_fwd));
  m.impl("mixer_bwd", TORCH_BOX(&vim_mm::mixer_bwd));
}
