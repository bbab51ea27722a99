// Coefficients of polynomials, with the least maximal relative error on their intervals.
// Printed by tools/dev/fit_constants.py, which says how; change that and print it anew.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "accuracy.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// The sum over j < terms of at(j) x^j, where x is bits = z / ln(2) or z, stands for a function of
// z where |bits|, or z of log(1 + z), is at most `end`. Behind colons: the largest relative error.
// clang-format off

template <Accuracy>
struct RootOfPhi2;

// sqrt(phi_2), in bits: 7.5e-06
template <>
struct RootOfPhi2<Accuracy::half> {
  static constexpr float end = 0.29f;
  static constexpr int terms = 3;
  static VIM_MM_INLINE constexpr float at(int j) {
    constexpr float c[] = {0.7071068f, 0.081743166f, 0.009439607f};
    return c[j];
  }
};
// sqrt(phi_2), in bits: 6.7e-08
template <>
struct RootOfPhi2<Accuracy::full> {
  static constexpr float end = 1.4f;
  static constexpr int terms = 6;
  static VIM_MM_INLINE constexpr float at(int j) {
    constexpr float c[] = {0.7071068f, 0.08168818f, 0.009436674f, 0.0008721633f, 6.341971e-05f, 3.5444834e-06f};
    return c[j];
  }
};

template <Accuracy>
struct TwicePhi3;

// 2 phi_3, in bits: 8.3e-06
template <>
struct TwicePhi3<Accuracy::half> {
  static constexpr float end = 0.7f;
  static constexpr int terms = 4;
  static VIM_MM_INLINE constexpr float at(int j) {
    constexpr float c[] = {0.3333306f, 0.057762746f, 0.008052472f, 0.00092700525f};
    return c[j];
  }
};
// 2 phi_3, in bits: 1.2e-07
template <>
struct TwicePhi3<Accuracy::full> {
  static constexpr float end = 1.8f;
  static constexpr int terms = 7;
  static VIM_MM_INLINE constexpr float at(int j) {
    constexpr float c[] = {0.33333334f, 0.057762418f, 0.0080075115f, 0.0009246807f, 9.161597e-05f, 8.178366e-06f, 6.184343e-07f};
    return c[j];
  }
};

template <Accuracy>
struct SixPhi4;

// 6 phi_4, in bits: 1.7e-06
template <>
struct SixPhi4<Accuracy::half> {
  static constexpr float end = 1.2f;
  static constexpr int terms = 5;
  static VIM_MM_INLINE constexpr float at(int j) {
    constexpr float c[] = {0.24999997f, 0.03465565f, 0.0040038405f, 0.00040123402f, 3.4551147e-05f};
    return c[j];
  }
};
// 6 phi_4, in bits: 9.7e-08
template <>
struct SixPhi4<Accuracy::full> {
  static constexpr float end = 2.0f;
  static constexpr int terms = 7;
  static VIM_MM_INLINE constexpr float at(int j) {
    constexpr float c[] = {0.25f, 0.034657434f, 0.004003767f, 0.00039629967f, 3.435119e-05f, 2.7264387e-06f, 1.8629453e-07f};
    return c[j];
  }
};

template <Accuracy>
struct RootOfTwicePhi3;

// cbrt(2 phi_3), in bits: 1.4e-06
template <>
struct RootOfTwicePhi3<Accuracy::half> {
  static constexpr float end = 0.9f;
  static constexpr int terms = 4;
  static VIM_MM_INLINE constexpr float at(int j) {
    constexpr float c[] = {0.6933603f, 0.040050145f, 0.0032482971f, 0.00022296002f};
    return c[j];
  }
};

template <Accuracy>
struct Phi2;

// phi_2, in z: 2.3e-05
template <>
struct Phi2<Accuracy::half> {
  static constexpr float end = 0.255f;
  static constexpr int terms = 3;
  static VIM_MM_INLINE constexpr float at(int j) {
    constexpr float c[] = {0.50000036f, 0.1668619f, 0.04167689f};
    return c[j];
  }
};

template <Accuracy>
struct Log1p;

// log(1 + z) / z, in z: 1.3e-06
template <>
struct Log1p<Accuracy::half> {
  static constexpr float end = 1.0f;
  static constexpr int terms = 7;
  static VIM_MM_INLINE constexpr float at(int j) {
    constexpr float c[] = {0.99999875f, -0.49987012f, 0.33109817f, -0.23505111f, 0.14924459f, -0.066418305f, 0.014146089f};
    return c[j];
  }
};

// clang-format on

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
