// Runs a package of tools/export_aoti.py without Python: docs/deploy.md says how.
//
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

using Clock = std::chrono::steady_clock;

// Float32 numbers of a file, as many as the shape has.
at::Tensor read(const std::string& path, at::IntArrayRef shape) {
  at::Tensor images = at::empty(shape);
  std::ifstream file(path, std::ios::binary);
  if (!file.read(static_cast<char*>(images.data_ptr()), images.nbytes()) || file.peek() != EOF)
    throw std::runtime_error(path + ": expected float32 numbers of B x C x H x W");
  return images;
}

void write(const std::string& path, const at::Tensor& output) {
  const at::Tensor numbers = output.cpu().to(at::kFloat).contiguous();
  std::ofstream file(path, std::ios::binary);
  if (!file.write(static_cast<const char*>(numbers.data_ptr()), numbers.nbytes()))
    throw std::runtime_error(path + ": cannot be written");
  std::cout << path << ": " << numbers.sizes() << '\n';
}

int main(int argc, char** argv) try {
  if (argc < 9) {
    std::cerr << "usage: run_package LIBRARY PACKAGE IMAGES B C H W OUT [REPEATS]\n";
    return 2;
  }
  // The operators register themselves. What the library has for Python is never called, and so
  // need not be found.
  if (dlopen(argv[1], RTLD_LAZY) == nullptr) throw std::runtime_error(dlerror());
  const int64_t height = std::stoll(argv[6]), width = std::stoll(argv[7]);
  at::Tensor images = read(argv[3], {std::stoll(argv[4]), std::stoll(argv[5]), height, width});

  // Else images of another size than the package's would be read beyond their end.
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);
  const c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader package(argv[2]);
  auto facts = package.get_metadata();
  const at::Device device(facts.at("AOTI_DEVICE_KEY"));
  const c10::impl::VirtualGuardImpl backend(device.type());
  // Zeros at the right and bottom, as the model adds them.
  const int64_t multiple = std::stoll(facts.at("vim_mm_multiple"));
  const auto missing = [&](int64_t size) { return (multiple - size % multiple) % multiple; };
  images = at::constant_pad_nd(images, {0, missing(width), 0, missing(height)}).to(device);

  std::vector<at::Tensor> outputs = package.run({images});
  for (size_t i = 0; i < outputs.size(); ++i) {
    at::Tensor output = outputs[i];
    // A map of the images' size, such as logits, loses what was added to them.
    if (output.dim() == 4 && output.sizes().slice(2) == images.sizes().slice(2))
      output = output.narrow(2, 0, height).narrow(3, 0, width);
    write(std::string(argv[8]) + '.' + std::to_string(i), output);
  }

  std::vector<double> times;
  for (int i = 0; argc > 9 && i < std::stoi(argv[9]); ++i) {
    const auto start = Clock::now();
    outputs = package.run({images});
    if (!device.is_cpu()) backend.synchronizeDevice(backend.getDevice().index());
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  if (times.empty()) return 0;
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  std::cout << "median of " << times.size() << " runs: " << times[times.size() / 2] << " ms\n";
} catch (const std::exception& error) {
  std::cerr << "run_package: error: " << error.what() << '\n';
  return 1;
}
