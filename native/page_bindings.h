// page_bindings: what Python sees of the table and of the headers of pages of a KV cache.
//
// Invariants: a table shares the memory it was given, and lets go of it when Python drops the
// table. The GIL is released in what takes longer than a look-up. As in Python, an index beyond
// the table is an IndexError, and so is a damaged table.
#pragma once

#include <nanobind/nanobind.h>

namespace statehold::python {

void declare_pages(nanobind::module_& m);

}  // namespace statehold::python
