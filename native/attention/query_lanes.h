// Attention of some queries, which are the lanes of vectors: a key is read once for all of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../vectors.h"
#include "slots.h"
#include "softmax.h"

namespace {

constexpr int most_vectors = lanes == 16 ? 3 : 2;  // of a group of queries
constexpr int at_once = lanes == 16 ? 8 : 6;  // sums of a tile that stay in registers, each of so many vectors
constexpr int64_t block = 96;  // slots: their scores stay in the L1 cache

// to[o, :] (+)= sum over i of a[o, i] * b[i, :], where a row of `b` and `to` is some vectors.
template <int vectors, int outs, bool adds>
inline void tile(const float* a, int64_t a_out, int64_t a_in, const float* b, int64_t count, float* to) {
  constexpr int64_t each = vectors * lanes;
  Lanes sums[outs][vectors] = {};
  if (adds)
    for (int o = 0; o < outs; o++)
      for (int v = 0; v < vectors; v++) sums[o][v] = load(to + o * each + v * lanes);
  for (int64_t i = 0; i < count; i++, a += a_in, b += each) {
    Lanes values[vectors];
    for (int v = 0; v < vectors; v++) values[v] = load(b + v * lanes);
    for (int o = 0; o < outs; o++)
      for (int v = 0; v < vectors; v++) sums[o][v] += values[v] * a[o * a_out];
  }
  for (int o = 0; o < outs; o++)
    for (int v = 0; v < vectors; v++) store(sums[o][v], to + o * each + v * lanes);
}

template <int vectors, bool adds>
inline void product(const float* a, int64_t outs, int64_t a_out, int64_t a_in, const float* b, int64_t count,
                    float* to) {
  constexpr int64_t each = vectors * lanes;
  int64_t o = 0;
  for (; o + at_once <= outs; o += at_once)
    tile<vectors, at_once, adds>(a + o * a_out, a_out, a_in, b, count, to + o * each);
  for (; o + 2 <= outs; o += 2)
    tile<vectors, 2, adds>(a + o * a_out, a_out, a_in, b, count, to + o * each);
  for (; o < outs; o++) tile<vectors, 1, adds>(a + o * a_out, a_out, a_in, b, count, to + o * each);
}

// Floats, of which vectors do not cross the lines of the cache.
class AlignedFloats {
  struct alignas(64) Line {
    float values[16];
  };
  std::vector<Line> lines;

 public:
  explicit AlignedFloats(int64_t count) : lines((count + 15) / 16) {}
  float* data() { return reinterpret_cast<float*>(lines.data()); }
  const float* data() const { return reinterpret_cast<const float*>(lines.data()); }
};

// The queries read a block of slots at a time: `score`, then `add`. Lanes without a query are not used.
template <int vectors>
struct QueryLanes {
  static constexpr int64_t size = vectors * lanes;
  int64_t width, out_width;
  AlignedFloats transposed, sums;  // [width, size] and [out_width, size]
  alignas(64) float scores[block * size];  // [slots, size]
  alignas(64) float most[size], total[size];  // of the softmax: the largest score, the sum of exp(score - largest)

  QueryLanes(int64_t width, int64_t out_width)
      : width(width), out_width(out_width), transposed(width * size), sums(out_width * size) {
    std::fill(most, most + size, lowest);
    std::fill(total, total + size, 0.0f);
  }

  template <class Element>
  void set(int64_t lane, const Element* query, float scale) {
    float* to = transposed.data() + lane;
    for (int64_t i = 0; i < width; i++) to[i * size] = as_float(query[i]) * scale;
  }

  // The sums of a query, times `factor`.
  template <class Element>
  void get(int64_t lane, float factor, Element* to) const {
    const float* from = sums.data() + lane;
    for (int64_t i = 0; i < out_width; i++) round_to(from[i * size] * factor, to + i);
  }

  // `score` and `add` are not inlined, so that their code is compiled once.
  __attribute__((noinline)) void score(const HeadSlots<float>& keys) {
    product<vectors, false>(keys.data, keys.count, keys.stride, 1, transposed.data(), width, scores);
  }

  // Turns the scores into weights, and adds the values times these.
  __attribute__((noinline)) void add(const HeadSlots<float>& values) {
    for (int64_t v = 0; v < size; v += lanes) weigh(v, values.count);
    product<vectors, true>(values.data, out_width, 1, values.stride, scores, values.count, sums.data());
  }

  // Of one vector of queries.
  void weigh(int64_t v, int64_t slots) {
    const Lanes before = load(most + v);
    Lanes now = before, sum = {};
    for (int64_t i = 0; i < slots; i++) now = larger(load(scores + i * size + v), now);
    for (int64_t i = 0; i < slots; i++) {
      const Lanes weights = power(load(scores + i * size + v) - now);
      sum += weights;
      store(weights, scores + i * size + v);
    }
    const Lanes factor = power(before - now);
    store(now, most + v), store(load(total + v) * factor + sum, total + v);
    bool rescales = false;
    for (int64_t i = 0; i < lanes; i++) rescales |= factor[i] != 1;
    if (rescales)
      for (float *at = sums.data() + v, *end = at + out_width * size; at < end; at += size) store(load(at) * factor, at);
  }
};

}  // namespace
