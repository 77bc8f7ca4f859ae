// sim_module: what Python sees of the simulated disk; declarations only.
// A module of its own, statehold._sim, because it is built for tests and not shipped. It shares
// nothing with statehold._core but types: that module binds the base class Fs, and translates what
// is thrown.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "fs_sim.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace statehold;
using namespace statehold::python;

namespace {

class PySimFs : public PyFs {
 public:
  explicit PySimFs(const SimOptions& options, SimTree tree = {})
      : PyFs(std::make_shared<SimFs>(options, std::move(tree))) {}
  SimFs& sim() const { return static_cast<SimFs&>(**this); }
  SimDisk& disk() const { return sim().disk(); }
};

}  // namespace

NB_MODULE(_sim, m) {
  m.doc() = "The simulated disk of statehold, for tests.";
  nb::module_::import_("statehold._core");
  nb::set_leak_warnings(false);  // native code does not print
  const auto gil_released = nb::call_guard<GilReleased>();
  nb::class_<PySimFs, PyFs>(m, "SimFs", "A simulated disk; see native/fs_sim.h.")
      .def(
          "__init__",
          [](PySimFs* self, uint64_t seed, double short_io, bool reorder, double eio,
             std::optional<uint64_t> capacity, double torn, double misdirected, double slow) {
            new (self) PySimFs({seed, short_io, reorder, eio, capacity, torn, misdirected, slow});
          },
          "seed"_a, nb::kw_only(), "short_io"_a = 0.0, "reorder"_a = true, "eio"_a = 0.0,
          "capacity"_a = nb::none(), "torn"_a = 0.0, "misdirected"_a = 0.0, "slow"_a = 0.0)
      .def(
          "set_faults",
          [](PySimFs& self, uint64_t seed, double short_io, double eio,
             std::optional<uint64_t> capacity, double torn, double misdirected, double slow) {
            self.disk().set_faults({seed, short_io, true, eio, capacity, torn, misdirected, slow});
          },
          "seed"_a = 0, nb::kw_only(), "short_io"_a = 0.0, "eio"_a = 0.0, "capacity"_a = nb::none(),
          "torn"_a = 0.0, "misdirected"_a = 0.0, "slow"_a = 0.0, gil_released)
      .def(
          "crash", [](PySimFs& self) { self.disk().crash(); }, gil_released)
      .def(
          "crash_as",
          [](PySimFs& self, std::vector<int> choices) {
            return self.disk().crash(std::move(choices));
          },
          "choices"_a, gil_released)
      .def(
          "cut_power", [](PySimFs& self, uint64_t after) { self.disk().cut_power(after); },
          "after"_a, gil_released)
      .def(
          "record", [](PySimFs& self) { self.disk().record(); }, gil_released)
      .def_prop_ro("recorded", [](PySimFs& self) { return self.disk().recorded(); })
      .def(
          "at_moment",
          [](PySimFs& self, size_t index) {
            return PySimFs(SimOptions{}, self.disk().recorded_tree(index));
          },
          "index"_a, gil_released)
      .def("hold", [](PySimFs& self) { self.sim().hold(); })
      .def_prop_ro("waiting", [](PySimFs& self) { return self.sim().waiting(); })
      .def(
          "complete", [](PySimFs& self, size_t index) { self.sim().complete(index); }, "index"_a,
          gil_released)
      .def_prop_ro("damaged", [](PySimFs& self) { return self.disk().damaged(); })
      .def(
          "fail_next",
          [](PySimFs& self, const std::string& operation, int error, int count, int skip) {
            self.disk().fail_next(operation, error, count, skip);
          },
          "operation"_a, "errno"_a, "count"_a = 1, "skip"_a = 0)
      .def(
          "corrupt",
          [](PySimFs& self, const std::string& path, uint64_t offset, uint8_t mask) {
            must(self.disk().corrupt(path, offset, mask));
          },
          "path"_a, "offset"_a, "xor"_a)
      .def_prop_ro("fired", [](PySimFs& self) { return self.disk().fired(); })
      .def_prop_ro("operations", [](PySimFs& self) { return self.disk().operations(); });
}
