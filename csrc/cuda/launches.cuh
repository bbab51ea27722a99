// Everything that the scan of a method launches.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "launch_backward.cuh"
#include "launch_edges.cuh"
#include "launch_forward.cuh"
