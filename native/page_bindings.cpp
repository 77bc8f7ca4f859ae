// page_bindings: contract in page_bindings.h.
#include "page_bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "checksum.h"
#include "page_header.h"
#include "page_table.h"

namespace statehold::python {

using namespace nb::literals;

namespace {

// The bytes of a Python object, for as long as this is there. Needs the GIL at both ends.
class View {
 public:
  explicit View(nb::handle source, int flags = PyBUF_C_CONTIGUOUS) {
    if (PyObject_GetBuffer(source.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() { PyBuffer_Release(&view_); }

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  uint64_t bytes() const { return static_cast<uint64_t>(view_.len); }

 private:
  Py_buffer view_;
};

std::string_view text(const nb::bytes& source) { return {source.c_str(), source.size()}; }

nb::bytes bytes_of(std::string_view source) { return nb::bytes(source.data(), source.size()); }

class PyPageTable : public PageTable {
 public:
  PyPageTable(nb::handle memory, uint64_t slots)
      : PyPageTable(std::make_shared<View>(memory, PyBUF_WRITABLE), slots) {}

 private:
  PyPageTable(std::shared_ptr<View> memory, uint64_t slots)
      : PageTable(memory->data(), memory->bytes(), slots), memory_(std::move(memory)) {}

  std::shared_ptr<View> memory_;
};

std::vector<int64_t> find_all(const PyPageTable& table, const std::vector<uint64_t>& indices) {
  std::vector<int64_t> found;
  found.reserve(indices.size());
  for (const uint64_t index : indices) found.push_back(table.find(index));
  return found;
}

std::vector<uint64_t> clear_seats(PyPageTable& table, const nb::bytes& dead) {
  std::vector<bool> is_dead;
  for (const char each : text(dead)) is_dead.push_back(each != 0);
  return table.clear_seats(is_dead);
}

void adopt(PyPageTable& table, uint64_t first, nb::handle headers, uint64_t stride) {
  const View memory(headers);
  if (stride < kPageHeaderBytes) throw std::invalid_argument("headers overlap");
  const uint64_t count =
      memory.bytes() < kPageHeaderBytes ? 0 : (memory.bytes() - kPageHeaderBytes) / stride + 1;
  const GilReleased gil_released;
  table.adopt(first, memory.data(), stride, count);
}

nb::bytes entries(const PyPageTable& table, uint64_t first, uint64_t count) {
  std::vector<std::byte> found(std::min(count, table.slots()) * PageTable::kEntryBytes);
  table.write_entries(first, count, found.data());
  return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size());
}

std::vector<std::pair<uint64_t, uint64_t>> adopt_entries(PyPageTable& table, uint64_t first,
                                                         nb::handle entries) {
  const View memory(entries);
  const GilReleased gil_released;
  return table.adopt_entries(first, memory.data(), memory.bytes() / PageTable::kEntryBytes);
}

nb::list drop(PyPageTable& table, const std::vector<nb::bytes>& identities, uint32_t before_s,
              uint64_t most, uint64_t keep) {
  std::vector<std::string_view> names;
  for (const nb::bytes& each : identities) names.push_back(text(each));
  nb::list dropped;
  for (const auto& each : table.drop(names, before_s, most, keep)) {
    dropped.append(nb::make_tuple(each.slot, bytes_of(each.identity)));
  }
  return dropped;
}

nb::list counted(const PyPageTable& table) {
  nb::list found;
  for (const auto& each : table.counted()) {
    found.append(nb::make_tuple(bytes_of(each.identity), each.pages, each.counts));
  }
  return found;
}

std::vector<uint64_t> page_indices(const nb::bytes& identity, const nb::sequence& keys) {
  std::vector<uint64_t> found;
  for (const nb::handle key : keys) {
    if (!nb::isinstance<nb::bytes>(key)) throw std::invalid_argument("a key is not bytes");
    found.push_back(page_index(text(identity), text(nb::borrow<nb::bytes>(key))));
  }
  return found;
}

nb::object read_page_header(nb::handle source) {
  const View memory(source);
  if (memory.bytes() < kPageHeaderBytes) return nb::none();
  const std::optional<PageHeader> header = PageHeader::read(memory.data());
  if (!header) return nb::none();
  return nb::make_tuple(bytes_of(header->identity), bytes_of(header->key), header->bytes,
                        header->checksum, header->before, header->score);
}

void fill_page(uintptr_t address, nb::handle page, const nb::bytes& identity, const nb::bytes& key,
               uint64_t before, double score) {
  constexpr uint64_t kCacheBytes = 64 << 10;
  const View payload(page);
  auto* const slot = reinterpret_cast<std::byte*>(address);
  PageHeader header;
  header.identity = text(identity);
  header.key = text(key);
  header.bytes = payload.bytes();
  header.before = before;
  header.score = score;
  const GilReleased gil_released;
  std::byte* const to = slot + kPageHeaderBytes;
  const uint64_t bytes = payload.bytes();
  const uint64_t whole = (bytes + kPageHeaderBytes - 1) / kPageHeaderBytes * kPageHeaderBytes;
  Xxh3 hash;
  for (uint64_t at = 0; at < whole; at += kCacheBytes) {
    const uint64_t end = std::min(whole, at + kCacheBytes);
    const uint64_t copied = std::min(std::max(bytes, at), end);
    std::memcpy(to + at, payload.data() + at, copied - at);
    std::memset(to + copied, 0, end - copied);
    hash.update(to + at, end - at);
  }
  header.checksum = hash.digest();
  header.write(slot);
}

}  // namespace

void declare_pages(nb::module_& m) {
  const auto gil_released = nb::call_guard<GilReleased>();
  nb::class_<PyPageTable>(m, "PageTable", "Which slots hold which pages; see page_table.h.")
      .def(nb::init<nb::handle, uint64_t>(), "memory"_a, "slots"_a)
      .def_static("nbytes", &PageTable::bytes, "slots"_a)
      .def_prop_ro("slots", &PyPageTable::slots)
      .def_prop_ro("is_new", &PyPageTable::is_new)
      .def("create", &PyPageTable::create)
      .def("find", &PyPageTable::find, "index"_a)
      .def("find_all", &find_all, "indices"_a)
      .def("generation", &PyPageTable::generation, "slot"_a)
      .def("index", &PyPageTable::index, "slot"_a)
      .def_prop_ro("evicted", &PyPageTable::evicted)
      .def("pages", &PyPageTable::pages)
      .def_prop_rw("boot", &PyPageTable::boot, &PyPageTable::set_boot)
      .def_prop_ro("is_torn", &PyPageTable::is_torn)
      .def("count", &PyPageTable::count, "seat"_a, "amounts"_a)
      .def("counted", &counted)
      .def("begin_change", &PyPageTable::begin_change, "now_s"_a = 0, gil_released)
      .def("end_change", &PyPageTable::end_change)
      .def("take", &PyPageTable::take, "seat"_a, "below"_a = UINT64_MAX)
      .def("publish", &PyPageTable::publish, "slot"_a, "index"_a, "before"_a, "space"_a,
           "score"_a = 0.0)
      .def("hold", &PyPageTable::hold, "slot"_a, "seat"_a)
      .def("release", &PyPageTable::release, "slot"_a)
      .def("free", &PyPageTable::free, "slot"_a)
      .def("drop", &drop, "identities"_a, "before_s"_a, "most"_a, "keep"_a = 0)
      .def("cut", &PyPageTable::cut, "below"_a, gil_released)
      .def("touch", &PyPageTable::touch, "slots"_a)
      .def(
          "space",
          [](PyPageTable& self, const nb::bytes& identity) { return self.space(text(identity)); },
          "identity"_a)
      .def(
          "seat",
          [](PyPageTable& self, uint32_t seat, std::optional<int64_t> space) {
            self.seat(seat, space.value_or(-1));
          },
          "seat"_a, "space"_a.none())
      .def("clear_seats", &clear_seats, "dead"_a)
      .def("mend", &PyPageTable::mend, gil_released)
      .def("adopt", &adopt, "first"_a, "headers"_a, "stride"_a)
      .def("entries", &entries, "first"_a, "count"_a)
      .def("adopt_entries", &adopt_entries, "first"_a, "entries"_a);
  m.attr("SEATS_MAX") = PageTable::kSeats;
  m.attr("SPACES_MAX") = PageTable::kSpaces;
  m.attr("PAGE_ENTRY_BYTES") = PageTable::kEntryBytes;
  m.attr("RANKED") = PageTable::kRanked;
  m.def("page_indices", &page_indices, "identity"_a, "keys"_a);
  m.def("read_page_header", &read_page_header, "memory"_a);
  m.def("fill_page", &fill_page, "address"_a, "page"_a, "identity"_a, "key"_a, "before"_a,
        "score"_a);
}

}  // namespace statehold::python
