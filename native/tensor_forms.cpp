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

PyObject* read_member(PyObject* reader, bool is_attribute, PyObject* object) {
  if (!is_attribute) return PyObject_Vectorcall(reader, &object, 1, nullptr);
  auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return Py_TYPE(reader)->tp_descr_get(reader, object, kind);
}

}  // namespace

nb::list read_members(const nb::list& objects, const nb::list& readers) {
  const size_t count = objects.size();
  nb::list found;
  for (size_t i = 0; i < readers.size(); ++i) {
    nb::object column = nb::steal(PyList_New(static_cast<Py_ssize_t>(count)));
    if (!column.is_valid()) throw nb::python_error();
    found.append(column);
  }
  // One object after the other: all that is read of it is in the cache then.
  for (size_t i = 0; i < count; ++i) {
    const nb::object object = objects[i];
    for (size_t k = 0; k < readers.size(); ++k) {
      const nb::object reader = readers[k];
      const bool is_attribute = Py_TYPE(reader.ptr()) == &PyGetSetDescr_Type;
      PyObject* member = read_member(reader.ptr(), is_attribute, object.ptr());
      if (member == nullptr) throw nb::python_error();
      PyList_SET_ITEM(nb::object(found[k]).ptr(), static_cast<Py_ssize_t>(i), member);
    }
  }
  return found;
}

nb::object read_elements(const nb::list& addresses, size_t size) {
  const size_t count = addresses.size();
  nb::object found =
      nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * size)));
  if (!found.is_valid()) throw nb::python_error();
  char* to = PyByteArray_AS_STRING(found.ptr());
  for (size_t i = 0; i < count; ++i) {
    const auto address = nb::cast<uintptr_t>(addresses[i]);
    if (address == 0) throw std::invalid_argument("there is no element at address 0");
    std::memcpy(to + i * size, reinterpret_cast<const void*>(address), size);
  }
  return found;
}

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
