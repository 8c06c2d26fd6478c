// Vectors of floats, as wide as the processor's.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// For functions that prefetch: to GCC those have no effect, and it leaves out calls that it has not inlined early.
#define ALWAYS_INLINE __attribute__((always_inline)) inline

#ifdef __AVX512F__
constexpr int64_t lanes = 16;
#else
constexpr int64_t lanes = 8;
#endif

typedef float Lanes __attribute__((vector_size(4 * lanes)));
typedef float Eight __attribute__((vector_size(32)));  // widths of heads are multiples of 8
typedef float Four __attribute__((vector_size(16)));

template <class Vector = Lanes>
inline Vector load(const void* from) {
  Vector found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}

template <class Vector>
inline void store(Vector from, void* to) {
  std::memcpy(to, &from, sizeof(from));
}

template <class Vector>
inline Vector larger(Vector one, Vector other) {
  return one > other ? one : other;
}

// The sum of a vector.
template <class Vector>
inline float total(Vector of) {
  constexpr int64_t fours = sizeof(Vector) / sizeof(Four);
  Four parts[fours];
  std::memcpy(parts, &of, sizeof(of));
  for (int64_t part = 1; part < fours; part++) parts[0] += parts[part];
  return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

// The sums of four vectors.
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
  const __m512 a = (__m512)of[0], b = (__m512)of[1], c = (__m512)of[2], d = (__m512)of[3];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Lanes abcd = (Lanes)_mm512_shuffle_ps(ab, cd, 0x44) + (Lanes)_mm512_shuffle_ps(ab, cd, 0xEE);
  Four parts[4];
  std::memcpy(parts, &abcd, sizeof(abcd));
  return (parts[0] + parts[2]) + (parts[1] + parts[3]);
}
#endif

// exp(x) for x <= 0, with a relative error of 2e-7, and 0 below -87. Coefficients: Cephes' expf.
template <class Vector>
inline Vector power(Vector x) {
  typedef decltype(x < x) Integers;
  const Vector least = Vector{} - 87.0f, bounded = x < least ? least : x;  // keeps NaN
  const Integers exponent = __builtin_convertvector(bounded * 1.44269504f - 0.5f, Integers);
  const Vector number = __builtin_convertvector(exponent, Vector);
  const Vector rest = bounded - number * 0.693359375f + number * 2.12194440e-4f;
  Vector sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return x < least ? Vector{} : sum * (Vector)((exponent + 127) << 23);
}

}  // namespace
