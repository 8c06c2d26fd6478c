// The exponential function, for vectors.
#pragma once

namespace {

// exp(x) for x <= 0, with a relative error of 2e-7, and 0 below -87. Coefficients: Cephes' expf.
template <class Vector, class Integers>
inline Vector power_of(Vector x) {
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
