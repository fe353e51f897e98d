// The kernels of the fake accelerator: those without which Paddle cannot fill a tensor, make it contiguous, assign to it
// in place or accumulate a gradient. It runs all other kernels on the CPU, between a copy to the host and one back. Like those of a device they
// run on a stream.

#include "device.h"

#include "paddle/phi/capi/all.h"

namespace fake {

using Numbers = std::vector<int64_t>;

// The offset of an element, given its index in row-major order.
int64_t offset_of(int64_t index, const Numbers& shape, const Numbers& strides) {
  int64_t offset = 0;
  for (int axis = static_cast<int>(shape.size()) - 1; axis >= 0; --axis) {
    offset += (index % shape[axis]) * strides[axis];
    index /= shape[axis];
  }
  return offset;
}

template <typename T>
T* numbers_of(const phi::DenseTensor& tensor) {
  return static_cast<T*>(behind(tensor.data<T>()));
}

template <typename T>
void fill_flat(const phi::Context& context, const phi::Scalar& value, phi::DenseTensor* out) {
  T* to = static_cast<T*>(behind(context.template Alloc<T>(out)));
  submit(context.stream(), [to, n = out->numel(), number = static_cast<T>(value.to<double>())] {
    std::fill(to, to + n, number);
  });
}

template <typename T>
void Full(const phi::Context& context, const phi::IntArray& shape, const phi::Scalar& value, phi::DataType,
          phi::DenseTensor* out) {
  out->Resize(shape.GetData());
  fill_flat<T>(context, value, out);
}

template <typename T>
void FullLike(const phi::Context& context, const phi::DenseTensor&, const phi::Scalar& value, phi::DataType,
              phi::DenseTensor* out) {
  fill_flat<T>(context, value, out);
}

template <typename T>
void Fill(const phi::Context& context, const phi::DenseTensor&, const phi::Scalar& value, phi::DenseTensor* out) {
  T* to = static_cast<T*>(behind(context.template Alloc<T>(out)));
  submit(context.stream(), [to, n = out->numel(), shape = out->dims(), strides = out->strides(),
                            number = static_cast<T>(value.to<double>())] {
    for (int64_t k = 0; k < n; ++k) to[offset_of(k, shape, strides)] = number;
  });
}

template <typename T>
void Contiguous(const phi::Context& context, const phi::DenseTensor& in, phi::DenseTensor* out) {
  T* to = static_cast<T*>(behind(context.template Alloc<T>(out)));
  submit(context.stream(), [to, from = numbers_of<T>(in), n = in.numel(), shape = in.dims(), strides = in.strides()] {
    for (int64_t k = 0; k < n; ++k) to[k] = from[offset_of(k, shape, strides)];
  });
}

template <typename T>
void StridedCopy(const phi::Context& context, const phi::DenseTensor& in, const Numbers& out_shape,
                 const Numbers& out_strides, int64_t, phi::DenseTensor* out) {
  submit(context.stream(), [to = numbers_of<T>(*out), from = numbers_of<T>(in), n = in.numel(), shape = in.dims(),
                            strides = in.strides(), out_shape, out_strides] {
    for (int64_t k = 0; k < n; ++k) to[offset_of(k, out_shape, out_strides)] = from[offset_of(k, shape, strides)];
  });
}

// The fallback of this one would move its output to another address, and views of it would lose it.
template <typename T>
void Assign(const phi::Context& context, const phi::DenseTensor& in, phi::DenseTensor* out) {
  T* to = static_cast<T*>(behind(context.template Alloc<T>(out)));
  submit(context.stream(), [to, from = numbers_of<T>(in), n = in.numel()] { std::copy(from, from + n, to); });
}

// Row-major strides of a tensor that is broadcast to a shape: 0 where its own length is 1.
Numbers broadcast_strides(const Numbers& own, const Numbers& shape) {
  Numbers strides(shape.size(), 0);
  int64_t stride = 1;
  size_t missing = shape.size() - own.size();
  for (size_t axis = own.size(); axis-- > 0;) {
    if (own[axis] != 1) strides[missing + axis] = stride;
    stride *= own[axis];
  }
  return strides;
}

// Paddle accumulates gradients by this kernel without asking where they are: its fallback would be the CPU's kernel on
// addresses of the device.
template <typename T>
void Add(const phi::Context& context, const phi::DenseTensor& left, const phi::DenseTensor& right,
         phi::DenseTensor* out) {
  using Wide = typename std::conditional<sizeof(T) == 2, float, T>::type;
  T* to = static_cast<T*>(behind(context.template Alloc<T>(out)));
  Numbers shape = out->dims();
  submit(context.stream(), [to, one = numbers_of<T>(left), other = numbers_of<T>(right), n = out->numel(), shape,
                            strides = broadcast_strides(left.dims(), shape),
                            others = broadcast_strides(right.dims(), shape)] {
    for (int64_t k = 0; k < n; ++k)
      to[k] = static_cast<T>(static_cast<Wide>(one[offset_of(k, shape, strides)]) +
                             static_cast<Wide>(other[offset_of(k, shape, others)]));
  });
}

}  // namespace fake

#define TYPES bool, uint8_t, int8_t, int16_t, int32_t, int64_t, float, double, phi::dtype::float16, phi::dtype::bfloat16
PD_BUILD_PHI_KERNEL(full, fake_device, ALL_LAYOUT, fake::Full, TYPES) {}
PD_BUILD_PHI_KERNEL(full_like, fake_device, ALL_LAYOUT, fake::FullLike, TYPES) {}
PD_BUILD_PHI_KERNEL(fill, fake_device, ALL_LAYOUT, fake::Fill, TYPES) {}
PD_BUILD_PHI_KERNEL(contiguous, fake_device, ALL_LAYOUT, fake::Contiguous, TYPES) {}
PD_BUILD_PHI_KERNEL(strided_copy, fake_device, ALL_LAYOUT, fake::StridedCopy, TYPES) {}
PD_BUILD_PHI_KERNEL(assign, fake_device, ALL_LAYOUT, fake::Assign, TYPES) {}
PD_BUILD_PHI_KERNEL(add, fake_device, ALL_LAYOUT, fake::Add, int32_t, int64_t, float, double, phi::dtype::float16,
                    phi::dtype::bfloat16) {}
