// The product of a matrix and a vector, at memory bandwidth.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>  // <torch/extension.h> compiles half a minute longer

#include <algorithm>

namespace {

constexpr int64_t lanes = 8, rows_at_once = 4;
typedef float Lanes __attribute__((vector_size(4 * lanes)));

inline Lanes load(const float* from) {
  Lanes found;
  __builtin_memcpy(&found, from, sizeof(found));
  return found;
}

// Products of a vector with `rows` rows of the matrix, which are read in parallel.
template <int rows>
void multiply(const float* vector, const float* matrix, int64_t stride, int64_t width, float* out) {
  Lanes even[rows] = {}, odd[rows] = {};  // two sums, so that additions need not wait for each other
  int64_t i = 0;
  for (; i + 2 * lanes <= width; i += 2 * lanes) {
    const Lanes first = load(vector + i), second = load(vector + i + lanes);
    for (int row = 0; row < rows; row++) {
      const float* at = matrix + row * stride + i;
      __builtin_prefetch(at + rows * stride, 0, 0);
      even[row] += first * load(at);
      odd[row] += second * load(at + lanes);
    }
  }
  for (int row = 0; row < rows; row++) {
    float sum = 0;
    for (int64_t lane = 0; lane < lanes; lane++) sum += even[row][lane] + odd[row][lane];
    for (int64_t rest = i; rest < width; rest++) sum += vector[rest] * matrix[row * stride + rest];
    out[row] = sum;
  }
}

}  // namespace

// matrix [rows, width], the width contiguous, and a vector of that width, both float32 on the CPU -> [rows].
at::Tensor gemv(const at::Tensor& matrix, const at::Tensor& given) {
  const auto vector = given.contiguous();
  const int64_t rows = matrix.size(0), width = matrix.size(1), stride = matrix.stride(0);
  auto out = at::empty({rows}, matrix.options());
  const float *from = matrix.const_data_ptr<float>(), *by = vector.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  const int64_t of_thread = std::max<int64_t>(1, (rows + at::get_num_threads() - 1) / at::get_num_threads());
  at::parallel_for(0, rows, of_thread, [&](int64_t row, int64_t end) {
    for (; row + rows_at_once <= end; row += rows_at_once)
      multiply<rows_at_once>(by, from + row * stride, stride, width, to + row);
    for (; row < end; row++) multiply<1>(by, from + row * stride, stride, width, to + row);
  });
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("gemv", &gemv); }
