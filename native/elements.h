// Elements of inputs and weights: float32, and 16 bits that are computed with as float32.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "handles.h"
#include "vectors.h"

namespace {

// Bits of a float16, and of a bfloat16: the upper half of a float32.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float half_as_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7FFF;
  float value;
  if (rest < 0x400) {  // below the smallest exponent
    value = rest * 0x1p-24f;
  } else {
    const uint32_t bits = rest >= 0x7C00 ? (rest << 13) | 0x7F800000 : (rest << 13) + 0x38000000;
    std::memcpy(&value, &bits, sizeof(value));
  }
  return sign ? -value : value;
}

inline uint16_t float_as_half(float value) {
#ifdef __F16C__
  return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#endif
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = bits >> 16 & 0x8000;
  const float size = std::fabs(value);
  if (!(size < 65520)) return sign | (size == size ? 0x7C00 : 0x7E00);
  if (size < 0x1p-14f) return sign | uint16_t(std::nearbyint(size * 0x1p24f));
  bits &= 0x7FFFFFFF;
  return sign | uint16_t((bits + 0xFFF + (bits >> 13 & 1) - 0x38000000) >> 13);
}

inline float as_float(float value) { return value; }
inline float as_float(Float16 value) { return half_as_float(value.bits); }
inline float as_float(BFloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof(found));
  return found;
}

template <class Vector = Lanes>
inline Vector floats(const float* from) {
  return load<Vector>(from);
}

template <class Vector = Lanes>
inline Vector floats(const Float16* from) {
#ifdef __AVX512F__
  if constexpr (sizeof(Vector) == 64) return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#endif
#ifdef __F16C__
  if constexpr (sizeof(Vector) == 32) return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#endif
  Vector found;
  for (size_t lane = 0; lane < sizeof(Vector) / sizeof(float); lane++) found[lane] = as_float(from[lane]);
  return found;
}

template <class Vector = Lanes>
inline Vector floats(const BFloat16* from) {
#ifdef __AVX512F__
  if constexpr (sizeof(Vector) == 64)
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#endif
#ifdef __AVX2__
  if constexpr (sizeof(Vector) == 32)
    return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#endif
  Vector found;
  for (size_t lane = 0; lane < sizeof(Vector) / sizeof(float); lane++) found[lane] = as_float(from[lane]);
  return found;
}

template <class Element>
void widen(const Element* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store(floats(from + i), to + i);
  for (; i < count; i++) to[i] = as_float(from[i]);
}

// Rounded to the nearest, of two as near to the even one.
inline void round_to(Lanes from, Float16* to) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)from, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)from, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int64_t lane = 0; lane < lanes; lane++) to[lane].bits = float_as_half(from[lane]);
#endif
}

inline void round_to(float from, float* to) { *to = from; }
inline void round_to(float from, Float16* to) { to->bits = float_as_half(from); }
inline void round_to(float from, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &from, sizeof(bits));
  const bool is_number = from == from;  // as others, NaN could become infinite
  to->bits = is_number ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0;
}

template <class Element>
void round_each(const float* from, int64_t count, Element* to) {
  for (int64_t i = 0; i < count; i++) round_to(from[i], to + i);
}

enum class Type { none, float32, bfloat16, float16 };

inline Type type_of(Borrowed tensor) {
  const int32_t type = tensor.type();
  if (type == aoti_torch_dtype_float32()) return Type::float32;
  if (type == aoti_torch_dtype_bfloat16()) return Type::bfloat16;
  return type == aoti_torch_dtype_float16() ? Type::float16 : Type::none;
}

// function(an element of this type)
template <class Function>
void with_element(Type type, const Function& function) {
  if (type == Type::float32) function(float{});
  if (type == Type::bfloat16) function(BFloat16{});
  if (type == Type::float16) function(Float16{});
}

constexpr char other_types[] = "tensors of other data types than float32, bfloat16 or float16, or of several";

}  // namespace
