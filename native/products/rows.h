// Rows of an input, and vectors of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "../vectors.h"

namespace {

// Rows of an input, float32 [count, width], and how many threads share the outputs.
struct Rows {
  const float* values;
  int64_t count, width, stride, threads;
};

constexpr int64_t bytes_of_line = 64, bytes_ahead = 4096;
ALWAYS_INLINE void fetch_ahead(const void* from) {
  __builtin_prefetch(static_cast<const char*>(from) + bytes_ahead, 0, 2);
}

// In one instruction: GCC on AMD Zen takes two where there is one sum only, and then equal rows have other products.
#if defined(__AVX2__) && defined(__FMA__)
inline void add_product(Eight& sum, Eight one, Eight other) {
  sum = (Eight)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
}
#ifdef __AVX512F__
inline void add_product(Lanes& sum, Lanes one, Lanes other) {
  sum = (Lanes)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sum);
}
#endif
inline void add_product(float& sum, float one, float other) { sum = __builtin_fmaf(one, other, sum); }
#else
template <class Value>
inline void add_product(Value& sum, Value one, Value other) {
  sum += one * other;
}
#endif

template <int count>
inline void sum_each(const Lanes* vectors, float* sums) {
  int at = 0;
  for (; at + 4 <= count; at += 4) {
    store(totals(vectors + at), sums + at);
  }
  // In the order of the others: equal rows have equal sums.
  for (; at < count; at++) {
    const Lanes four[] = {vectors[at], vectors[at], vectors[at], vectors[at]};
    sums[at] = totals(four)[0];
  }
}

// From [rows, width], whose rows are `stride` apart, to [width, side]: zeros where there are no rows.
inline void transpose(const float* from, int64_t stride, int64_t rows, int64_t width, float* to, int64_t side) {
  int64_t row = 0;
#ifdef __AVX2__
  // Lines of the processor's cache are read as wholes: those of several rows may exclude each other.
  constexpr int64_t line = bytes_of_line / sizeof(float);
  const int64_t fours = rows / 4 * 4, lines = width / line * line;
  for (int64_t begin = 0; begin < lines; begin += line)
    for (row = 0; row < fours; row += 4)
      for (int64_t i = begin; i < begin + line; i += 4) {
        const float* corner = from + row * stride + i;
        __m128 one = _mm_loadu_ps(corner), two = _mm_loadu_ps(corner + stride);
        __m128 three = _mm_loadu_ps(corner + 2 * stride), four = _mm_loadu_ps(corner + 3 * stride);
        _MM_TRANSPOSE4_PS(one, two, three, four);
        float* out = to + i * side + row;
        _mm_storeu_ps(out, one), _mm_storeu_ps(out + side, two);
        _mm_storeu_ps(out + 2 * side, three), _mm_storeu_ps(out + 3 * side, four);
      }
  for (row = 0; row < fours; row++)
    for (int64_t i = lines; i < width; i++) to[i * side + row] = from[row * stride + i];
#endif
  for (; row < side; row++)
    for (int64_t i = 0; i < width; i++) to[i * side + row] = row < rows ? from[row * stride + i] : 0;
}

}  // namespace
