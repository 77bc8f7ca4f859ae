// tensor_forms: contract in tensor_forms.h.
#include "tensor_forms.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace statehold::python {
namespace {

namespace nb = nanobind;

// The layout of DLPack's structures, as far as it is used here. A major version never changes it.
struct ElementType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Described {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  ElementType dtype;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
};

struct Exchange {
  uint32_t major;
  uint32_t minor;
  const Exchange* older;
  void* allocate;
  void* owned_from_object;
  void* object_from_owned;
  int (*describe)(void* object, Described* found);
  void* current_stream;
};

const Exchange& usable(nb::handle capsule) {
  const void* found = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (found == nullptr) throw nb::python_error();
  const auto* table = static_cast<const Exchange*>(found);
  while (table != nullptr && table->major != 1) table = table->older;
  if (table == nullptr || table->describe == nullptr) {
    throw std::runtime_error("the exchange API has no version 1 that describes tensors");
  }
  return *table;
}

template <class Element>
nb::bytes bytes_of(const std::vector<Element>& elements) {
  return nb::bytes(elements.data(), elements.size() * sizeof(Element));
}

}  // namespace

nb::tuple read_forms(const nb::list& tensors, nb::handle exchange) {
  const Exchange& table = usable(exchange);
  const size_t count = tensors.size();
  // Of each its dimensions first: (2, 3) and (4,) are not (2,), (3, 4).
  std::vector<int64_t> shapes;
  std::vector<int64_t> strides;
  std::vector<ElementType> dtypes;
  shapes.reserve(3 * count);
  strides.reserve(2 * count);
  dtypes.reserve(count);
  nb::list addresses;
  for (size_t i = 0; i < count; ++i) {
    const nb::object tensor = tensors[i];
    Described found{};
    if (table.describe(tensor.ptr(), &found) != 0) throw nb::python_error();
    if (found.ndim > 0 && found.strides == nullptr) {
      throw std::runtime_error("a tensor is described without strides");
    }
    shapes.push_back(found.ndim);
    shapes.insert(shapes.end(), found.shape, found.shape + found.ndim);
    strides.insert(strides.end(), found.strides, found.strides + found.ndim);
    dtypes.push_back(found.dtype);
    addresses.append(reinterpret_cast<uint64_t>(found.data) + found.byte_offset);
  }
  return nb::make_tuple(bytes_of(shapes), bytes_of(strides), bytes_of(dtypes), addresses);
}

}  // namespace statehold::python
