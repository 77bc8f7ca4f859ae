// tensor_forms: what many tensors show, read in one pass and without an object for each fact.
//
// torch's tensors have a table of C functions for other libraries on their type: DLPack's exchange
// API, version 1. One of them describes a tensor where it is. So the core reads dtypes, shapes,
// strides and addresses without headers or symbols of torch.
// Invariants: the GIL is held, and no reference to a tensor is kept. Two lists of tensors give
// equal bytes exactly when they are equal in dtypes, shapes and strides, in their order.
#pragma once

#include <nanobind/nanobind.h>

namespace statehold::python {

// What each reader says of each object: a list for each reader. A reader is a descriptor of an
// attribute, or what is called with the object.
nanobind::list read_members(const nanobind::list& objects, const nanobind::list& readers);

// The elements of `size` bytes at these addresses, one after the other.
nanobind::object read_elements(const nanobind::list& addresses, size_t size);

// (shapes, strides, dtypes, addresses): three bytes objects, and a list of integers. Raises what
// the library says of a tensor that has no such description.
nanobind::tuple read_forms(const nanobind::list& tensors, nanobind::handle exchange);

}  // namespace statehold::python
