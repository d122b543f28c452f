// Tensors of the device, what tasks and shape functions see of them, and walks over an operator's arguments.
#pragma once

#include "device.h"
#include "late.h"

#include <ATen/Functions.h>

namespace late {

inline bool is_late(const Tensor& t) {
  return t.defined() && t.device().type() == kDevice;
}

inline bool is_wrapped_number(const Tensor& t) {
  return t.unsafeGetTensorImpl()->is_wrapped_number();
}

inline Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator, c10::DispatchKeySet(kKey), type);
}

// A wrapped number takes part in type promotion otherwise than a tensor; the flag asserts a dimension of 0, even if unset.
inline void copy_flags(const Tensor& from, Tensor& to) {
  if (is_wrapped_number(from)) to.unsafeGetTensorImpl()->set_wrapped_number(true);
  to._set_conj(from.is_conj());
  to._set_neg(from.is_neg());
}

inline Tensor cpu_view(const Tensor& t) {
  char* p = static_cast<char*>(for_tasks(t.storage().data()));
  if (p) p += t.storage_offset() * t.itemsize();
  Tensor view = at::from_blob(p, t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()));
  copy_flags(t, view);
  return view;
}

// With the same shape and place in a storage, but without memory.
inline Tensor meta_of(const Tensor& t) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), c10::GetAllocator(c10::kMeta), true);
  Tensor meta = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::Meta), t.dtype());
  meta.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  meta.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  if (is_wrapped_number(t)) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// The base's key set: without its autograd keys a view has no version counter.
inline Tensor view_of(const Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, caffe2::TypeMeta type) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), type);
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

inline void resize(const Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  size_t bytes = at::detail::computeStorageNbytes(sizes, strides, t.itemsize(), t.storage_offset());
  if (bytes > t.storage().nbytes()) hooks.resizePrivateUse1Bytes(t.storage(), bytes);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

// The same value with each tensor in it replaced.
template <class F>
IValue map_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) {
    Tensor t = value.toTensor();
    return t.defined() ? IValue(f(t)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (Tensor t : value.toTensorList()) mapped.push_back(t.defined() ? f(t) : t);
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      mapped.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return mapped;
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, F&& f) {
  map_tensors(value, [&](const Tensor& t) {
    f(t);
    return t;
  });
}

// Of two values with the same structure.
template <class F>
void each_pair(const IValue& a, const IValue& b, F&& f) {
  std::vector<Tensor> as, bs;
  each_tensor(a, [&](const Tensor& t) { as.push_back(t); });
  each_tensor(b, [&](const Tensor& t) { bs.push_back(t); });
  for (size_t i = 0; i < std::min(as.size(), bs.size()); i++) f(as[i], bs[i]);
}

}  // namespace late
