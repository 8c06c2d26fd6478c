// Vectors of floats, as wide as the processor's, and products of matrices whose rows are vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "exponential.h"

namespace {

#ifdef __AVX512F__
constexpr int64_t lanes = 16;
#else
constexpr int64_t lanes = 8;
#endif
constexpr int most_vectors = lanes == 16 ? 3 : 2;  // of a group of queries
constexpr int at_once = lanes == 16 ? 8 : 6;  // sums of a tile that stay in registers, each of so many vectors
constexpr float lowest = std::numeric_limits<float>::lowest();

typedef float Lanes __attribute__((vector_size(4 * lanes)));
typedef int32_t Ints __attribute__((vector_size(4 * lanes)));
typedef float Eight __attribute__((vector_size(32)));  // widths are multiples of 8
typedef int32_t EightInts __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));

template <class Vector = Lanes>
inline Vector load(const float* from) {
  Vector found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}

template <class Vector>
inline void store(Vector from, float* to) {
  std::memcpy(to, &from, sizeof(from));
}

inline float total(Eight of) {
  float sum = 0;
  for (int64_t i = 0; i < 8; i++) sum += of[i];
  return sum;
}

// The totals of four vectors.
inline Four totals(const Eight* of) {
#ifdef __AVX2__
  const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps((__m256)of[0], (__m256)of[1]),
                                       _mm256_hadd_ps((__m256)of[2], (__m256)of[3]));
  return (Four)_mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
#else
  return Four{total(of[0]), total(of[1]), total(of[2]), total(of[3])};
#endif
}

#ifdef __AVX512F__
inline Four totals(const Lanes* of) {
  Eight halves[4];
  for (int i = 0; i < 4; i++) {
    Eight parts[2];
    std::memcpy(parts, of + i, sizeof(Lanes));
    halves[i] = parts[0] + parts[1];
  }
  return totals(halves);
}
#endif

template <class Vector>
inline Vector larger(Vector one, Vector other) {
  return one > other ? one : other;
}

inline Lanes power(Lanes x) { return power_of<Lanes, Ints>(x); }
#ifdef __AVX512F__
inline Eight power(Eight x) { return power_of<Eight, EightInts>(x); }
#endif

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

}  // namespace
