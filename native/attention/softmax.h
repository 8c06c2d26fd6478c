// The softmax of one query, over some slots at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../vectors.h"

namespace {

constexpr float lowest = std::numeric_limits<float>::lowest(), unseen = -std::numeric_limits<float>::infinity();

// So far: the largest score, and the sum of exp(score - largest).
struct Softmax {
  float most = lowest, total = 0;
};

// Adds the softmax and the sums [width] of a query over other slots.
inline void join(Softmax& all, float* sums, const Softmax& other, const float* of_other, int64_t width) {
  const float most = std::max(all.most, other.most);
  const float factor = std::exp(all.most - most), of_others = std::exp(other.most - most);
  for (int64_t i = 0; i < width; i++) sums[i] = sums[i] * factor + of_other[i] * of_others;
  all = {most, all.total * factor + other.total * of_others};
}

// Turns scores into weights, and rescales the sums [width] of earlier slots to the new largest score. slots: a multiple
// of 8; scores behind the last are `unseen`.
inline void weigh(float* scores, int64_t slots, Softmax& softmax, float* sums, int64_t width) {
  Eight largest = Eight{} + softmax.most, sum = {};
  for (int64_t i = 0; i < slots; i += 8) largest = larger(load<Eight>(scores + i), largest);
  float now = softmax.most;
  for (int64_t i = 0; i < 8; i++) now = std::max(now, largest[i]);
  if (now != softmax.most) {
    const float factor = std::exp(softmax.most - now);
    softmax.most = now, softmax.total *= factor;
    for (int64_t i = 0; i < width; i++) sums[i] *= factor;
  }
  for (int64_t i = 0; i < slots; i += 8) {
    const Eight weights = power(load<Eight>(scores + i) - now);
    store(weights, scores + i);
    sum += weights;
  }
  softmax.total += total(sum);
}

}  // namespace
