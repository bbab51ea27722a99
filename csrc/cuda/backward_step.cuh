// What backward keeps of a step of one state.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// It takes x to a_bar x + input. `drive`, which all states share, is u, but with Method::scaled dt u
// times drive_weight. `pulls_back`: it has gradients of its own.
template <class Method, Accuracy accuracy, class E>
struct Step {
  static constexpr bool pulls_back = false;
  static constexpr float drive_weight = 1.0f, a_weight = 1.0f;
  E a_bar, input;

  Step() = default;
  __device__ __forceinline__ Step(float dt, E a, float drive, E b)
      : a_bar(Method::coefficients(dt, a).a_bar), input(drive * b) {
    if constexpr (!Method::scaled) input = input * linearize<Method, accuracy>(dt, a, a_bar).beta;
    else if constexpr (!Method::beta_is_step) input = input * Method::scale(dt, a).value;
  }
};

// As Bilinear::Half does it, s (x + b drive) - x with the derivative s^2 / 4 of s by z: fewer
// instructions than by A_bar and beta, each with its own derivative.
template <>
struct Step<Bilinear, Accuracy::half, float> {
  static constexpr bool pulls_back = true;
  static constexpr float drive_weight = 0.5f, a_weight = 0.25f;
  float s, a_bar, input;

  Step() = default;
  __device__ __forceinline__ Step(float dt, float a, float drive, float b)
      : s(Bilinear::Half(a).s(dt)), a_bar(s - 1.0f), input(s * (drive * b)) {}

  // From the gradient of the state after the step and from the state before: adds to the gradients
  // of drive, of dt (but for what drive has of it) and of b, returns what times a_weight is that of a.
  __device__ __forceinline__ float pull_back(float gradient, float before, float dt, float a,
                                             float drive, float b, float& to_drive, float& to_dt,
                                             float& to_b) const {
    const float driven = s * gradient, grad_z = s * driven * fma(drive, b, before);
    to_drive += driven * b;
    to_dt += grad_z * (a_weight * a);
    to_b += drive * driven;
    return dt * grad_z;
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
