// Tensors by torch's C interface. Compiled layers call operators as C functions and lend them their tensors: torch's
// dispatcher, and the counts of who shares a tensor, take longer than some kernels do.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

// A tensor that its caller keeps.
class Borrowed {
 public:
  Borrowed(AtenTensorHandle handle) : handle_(handle) {}
  Borrowed(const torch::stable::Tensor& tensor) : handle_(tensor.get()) {}

  int64_t dim() const { return ask(aoti_torch_get_dim); }
  int64_t numel() const { return ask(aoti_torch_get_numel); }
  int64_t size(int64_t axis) const { return ask(aoti_torch_get_size, axis); }
  int64_t stride(int64_t axis) const { return ask(aoti_torch_get_stride, axis); }

  bool is_contiguous() const {
    bool is;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle_, &is));
    return is;
  }

  int32_t type() const {
    int32_t type;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle_, &type));
    return type;
  }

  bool is_float() const { return type() == aoti_torch_dtype_float32(); }

  template <class Value>
  Value* values() const {
    void* data;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle_, &data));
    return static_cast<Value*>(data);
  }

 private:
  AtenTensorHandle handle_;

  template <class Function, class... Arguments>
  int64_t ask(Function of, Arguments... arguments) const {
    int64_t answer;
    STABLE_TORCH_ERROR_CODE_CHECK(of(handle_, arguments..., &answer));
    return answer;
  }
};

template <class Tensors>
std::vector<Borrowed> borrowed(const Tensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

inline std::vector<Borrowed> borrowed(const AtenTensorHandle* handles, int64_t count) {
  return {handles, handles + count};
}

// The same tensor, shared.
inline torch::stable::Tensor shared(AtenTensorHandle handle) {
  AtenTensorHandle another;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &another));
  return torch::stable::Tensor(another);
}

// An uninitialized tensor on the CPU, contiguous.
inline torch::stable::Tensor empty_of(int32_t type, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t axis = sizes.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * std::max<int64_t>(sizes[axis], 1);
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(),
                                                         type, aoti_torch_device_type_cpu(), 0, &handle));
  return torch::stable::Tensor(handle);
}

inline torch::stable::Tensor empty_floats(const std::vector<int64_t>& sizes) {
  return empty_of(aoti_torch_dtype_float32(), sizes);
}

// Gives the caller of a C function its result. Exceptions pass through the caller, which is C++.
inline AOTITorchError hand_over(const torch::stable::Tensor& tensor, AtenTensorHandle* to) {
  return aoti_torch_new_tensor_handle(tensor.get(), to);
}
