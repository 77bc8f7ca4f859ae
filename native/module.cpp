// module: what Python sees of the native core; declarations only (details in bindings.h).
// Invariants: the GIL is released in everything that can block, and native threads never touch
// Python. The one place where a failed Status becomes a Python exception is raise_status.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "bindings.h"
#include "checksum.h"
#include "fs_threads.h"
#include "fs_uring.h"
#include "page_bindings.h"
#include "raw.h"
#include "tensor_forms.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace statehold;
using namespace statehold::python;

namespace {

PyObject* mismatch_type = nullptr;

void raise_mismatch(const Status& status) {
  const Mismatch& m = status.mismatch;
  nb::object error = nb::handle(mismatch_type)("checksum mismatch in " + status.path);
  error.attr("path") = FsPath(status.path);
  error.attr("segment") = m.segment;
  error.attr("piece") = m.piece;
  error.attr("begin") = m.begin;
  error.attr("end") = m.end;
  error.attr("expected") = m.expected;
  error.attr("got") = m.got;
  PyErr_SetObject(mismatch_type, error.ptr());
}

const char* name_of(Code code) {
  switch (code) {
    case Code::io:
      return "io";
    case Code::missing:
      return "missing";
    case Code::irregular:
      return "irregular";
    case Code::truncated:
      return "truncated";
    case Code::closed:
      return "closed";
    case Code::invariant:
      return "invariant";
    case Code::ok:        // never raised
    case Code::mismatch:  // has an exception of its own
      break;
  }
  return "invariant";
}

void raise_status(const Status& status) {
  if (status.code == Code::mismatch) return raise_mismatch(status);
  nb::object offset = nb::none();
  if (status.offset_bytes >= 0) offset = nb::int_(status.offset_bytes);
  nb::object error = nb::module_::import_("statehold.errors")
                         .attr("from_native")(name_of(status.code), status.operation, status.error,
                                              FsPath(status.path), offset);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

void raise_thrown(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    raise_status(failure.status);
  } catch (const CheckFailed& failure) {
    raise_status(Status::invariant(failure.what()));
  } catch (const std::system_error& failure) {  // only threads throw it, where there are no more
    raise_status(Status::io(failure.code().value(), "start a thread", {}));
  }
}

// The error is built by Python code, where Ctrl-C may raise. What it raises wins: nanobind would
// make a RuntimeError of a python_error that leaves a translator.
void translate(const std::exception_ptr& thrown, void*) {
  try {
    raise_thrown(thrown);
  } catch (nb::python_error& raised) {
    raised.restore();
  }
}

PyFs open_fs(const std::string& backend, int queue_depth, int io_threads) {
  constexpr int kMost = 4096;
  if (queue_depth < 1 || queue_depth > kMost || io_threads < 1 || io_threads > kMost) {
    throw std::invalid_argument("queue_depth and io_threads must be between 1 and 4096");
  }
  if (backend != "auto" && backend != "io_uring" && backend != "threads") {
    throw std::invalid_argument("backend must be auto, io_uring or threads, not " + backend);
  }
  std::string note = "chosen by backend=\"threads\"";
  if (backend != "threads") {
    Result<std::shared_ptr<Fs>> uring = open_uring(queue_depth);
    if (uring.ok()) return {std::move(uring.value)};
    note = uring_hint(uring.status.error);
    if (backend == "io_uring") {
      throw Failure(Status::io(uring.status.error, "set up io_uring (" + note + ")", {}));
    }
  }
  return {std::make_shared<ThreadsFs>(io_threads, note)};
}

void declare_fs(nb::module_& m) {
  nb::class_<PyFile>(m, "File", "An open data file; closed by WriteJob.finish() or close().")
      .def_prop_ro("path", [](const PyFile& self) { return FsPath(self.path); })
      .def_prop_ro("direct", [](const PyFile& self) { return self.direct; })
      .def("size_bytes", [](PyFile& self) { return must(self.opened()->size_bytes()); })
      .def("read_into", &read_into, "memory"_a, "offset"_a)
      .def("sync",
           [](PyFile& self) {
             const std::shared_ptr<File> file = self.share();
             const GilReleased gil_released;
             must(file->sync());
           })
      .def_prop_ro("mapped", [](const PyFile& self) { return self.mapped; })
      .def_prop_ro("address", &address_of)
      .def_prop_ro("view", [](const PyFile& self) { return view_of(self); })
      .def("populate", &populate, "begin"_a, "nbytes"_a)
      .def("close", &PyFile::close)
      .def("close_alone", &PyFile::close_alone, "within_s"_a);

  const auto gil_released = nb::call_guard<GilReleased>();
  nb::class_<PyFs>(m, "Fs", "Every effect on storage; see native/fs.h.")
      .def_prop_ro("backend", [](const PyFs& self) { return self->backend(); })
      .def_prop_ro("note", [](const PyFs& self) { return self->note(); })
      .def(
          "mkdir", [](PyFs& self, const FsPath& path) { must(self->mkdir(path)); }, "path"_a,
          gil_released)
      .def(
          "rename",
          [](PyFs& self, const FsPath& src, const FsPath& dst) { must(self->rename(src, dst)); },
          "src"_a, "dst"_a, gil_released)
      .def(
          "exchange",
          [](PyFs& self, const FsPath& a, const FsPath& b) { must(self->exchange(a, b)); }, "a"_a,
          "b"_a, gil_released)
      .def(
          "link",
          [](PyFs& self, const FsPath& src, const FsPath& dst) { must(self->link(src, dst)); },
          "src"_a, "dst"_a, gil_released)
      .def(
          "unlink", [](PyFs& self, const FsPath& path) { must(self->unlink(path)); }, "path"_a,
          gil_released)
      .def(
          "rmdir", [](PyFs& self, const FsPath& path) { must(self->rmdir(path)); }, "path"_a,
          gil_released)
      .def(
          "listdir", [](PyFs& self, const FsPath& path) { return list_dir(self, path); }, "path"_a,
          gil_released)
      .def(
          "stat_bytes", [](PyFs& self, const FsPath& path) { return stat_bytes(self, path); },
          "path"_a, gil_released)
      .def(
          "is_dir", [](PyFs& self, const FsPath& path) { return must(self->is_dir(path)); },
          "path"_a, gil_released)
      .def(
          "sync_dir", [](PyFs& self, const FsPath& path) { must(self->sync_dir(path)); }, "path"_a,
          gil_released)
      .def("write_file", &write_file, "path"_a, "data"_a)
      .def("read_file", &read_file, "path"_a, "max_bytes"_a)
      .def("open_write", &open_write, "path"_a, "bytes"_a, "reuse"_a = false, nb::kw_only(),
           "mapped"_a = false, "kept"_a.none() = nb::none())
      .def("can_reuse", &can_reuse, "path"_a, "kept"_a.none() = nb::none())
      .def(
          "open_view",
          [](PyFs& self, const FsPath& path, uint64_t bytes) {
            return PyFile(must(self->open_view(path, bytes)));
          },
          "path"_a, "bytes"_a, gil_released)
      .def(
          "open_read",
          [](PyFs& self, const FsPath& path, bool direct) {
            return PyFile(must(self->open_read(path, direct)));
          },
          "path"_a, nb::kw_only(), "direct"_a = false, gil_released)
      .def("close", [](PyFs& self) { self->close(); }, gil_released);

  m.def("open_fs", &open_fs, "backend"_a = "auto", "queue_depth"_a = 32, "io_threads"_a = 4,
        gil_released);
}

void declare_buffers(nb::module_& m) {
  static PyType_Slot region_slots[] = {
      {Py_bf_getbuffer, reinterpret_cast<void*>(&region_get_buffer)}, {0, nullptr}};
  static_cast<void>(nb::class_<Region>(m, "Region", "Owner of a memoryview of staging memory.",
                                       nb::type_slots(region_slots)));

  nb::class_<PyBufferPool>(m, "BufferPool", "The allocator of the staging buffers, for tests.")
      .def(nb::init<uint64_t, uint64_t>(), "count"_a, "buffer_bytes"_a)
      .def_prop_ro("free_count", [](PyBufferPool& self) { return self.pool.free_count(); })
      .def("acquire_nowait", &PyBufferPool::acquire_nowait,
           "(index, generation, address) of a free buffer, or None")
      .def("release", &PyBufferPool::release, "index"_a, "generation"_a);
}

template <class PyJob>
PyType_Slot* owner_slots() {
  static PyType_Slot slots[] = {
      {Py_tp_traverse, reinterpret_cast<void*>(&visit_owner<PyJob>)},
      {Py_tp_finalize, reinterpret_cast<void*>(&end_for_collector<PyJob>)},
      {Py_tp_clear, reinterpret_cast<void*>(&clear_owner<PyJob>)},
      {0, nullptr}};
  return slots;
}

void declare_write_job(nb::module_& m) {
  nb::class_<PyFill>(m, "Fill", "A buffer of a WriteJob that waits for bytes from Python.")
      .def_prop_ro("token", [](const PyFill& self) { return self.loan.block; })
      .def_prop_ro("address", &PyFill::address)
      .def_prop_ro("pieces", [](const PyFill& self) { return tuples_of(self.loan.pieces); })
      .def_prop_ro("view", [](const PyFill& self) {
        return view_of(self.memory, self.loan.lease.index, 1);
      });

  nb::class_<PyWriteJob>(m, "WriteJob", "One file being written; see native/write_job.h.",
                         nb::type_slots(owner_slots<PyWriteJob>()))
      .def(
          "attach",
          [](PyWriteJob& self, PyFile& file, PyFile* before) {
            std::shared_ptr<File> shared = file.opened();
            std::shared_ptr<File> has_same = before == nullptr ? nullptr : before->opened();
            const GilReleased gil_released;
            self->attach(std::move(shared), std::move(has_same));
          },
          "file"_a, "before"_a.none() = nb::none())
      .def(
          "wait_compared",
          [](PyWriteJob& self, Timeout timeout) {
            return wait(timeout, [&](Deadline d) { return self->wait_compared(d); });
          },
          "timeout"_a.none())
      .def_prop_ro("is_refuted", [](PyWriteJob& self) { return self->refuted(); })
      .def(
          "wait_eager",
          [](PyWriteJob& self, Timeout timeout) {
            return wait(timeout, [&](Deadline d) { return self->wait_eager(d); });
          },
          "timeout"_a.none())
      .def(
          "wait_copied",
          [](PyWriteJob& self, Timeout timeout) {
            return wait_and_release_owner(self, timeout,
                                          [&](Deadline d) { return self->wait_copied(d); });
          },
          "timeout"_a.none())
      .def(
          "wait_written",
          [](PyWriteJob& self, Timeout timeout) {
            return wait_and_release_owner(self, timeout,
                                          [&](Deadline d) { return self->wait_written(d); });
          },
          "timeout"_a.none())
      .def(
          "finish", [](PyWriteJob& self) { self->finish(); }, nb::call_guard<GilReleased>())
      .def("checksums",
           [](PyWriteJob& self) {
             const std::vector<uint64_t> sums = self->checksums();
             return nb::bytes(sums.data(), sums.size() * sizeof(uint64_t));
           })
      .def("cancel", &PyWriteJob::cancel)
      .def("next_fill", &next_fill, "timeout"_a.none())
      .def("next_fills", &next_fills, "timeout"_a.none(), "most"_a)
      .def(
          "filled",
          [](PyWriteJob& self, PyFill& fill, bool is_there) {
            {
              const GilReleased gil_released;
              self->filled(fill.loan, is_there);
            }
            fill.was_given_back();
          },
          "fill"_a, nb::kw_only(), "is_there"_a = false)
      .def("filled_all", &filled_all, "fills"_a)
      .def_prop_ro("fills_left", [](PyWriteJob& self) { return self->fills_left(); })
      .def_prop_ro("stats", [](PyWriteJob& self) {
        const WriteStats stats = self->stats();
        return std::map<std::string, uint64_t>{{"bytes", stats.bytes},
                                               {"blocks", stats.blocks},
                                               {"copy_ns", stats.copy_ns},
                                               {"first_write_ns", stats.first_write_ns},
                                               {"write_ns", stats.write_ns}};
      });
}

void declare_read_job(nb::module_& m) {
  nb::class_<PyReady>(m, "Ready", "A verified buffer of a ReadJob that Python has to empty.")
      .def_prop_ro("token", [](const PyReady& self) { return self.loan.block; })
      .def_prop_ro("address", &PyReady::address)
      .def_prop_ro("pieces", [](const PyReady& self) { return tuples_of(self.loan.pieces); })
      .def_prop_ro("view", [](const PyReady& self) {
        return view_of(self.memory, self.loan.lease.index, 1);
      });

  nb::class_<PyReadJob>(m, "ReadJob", "Segments being read; see native/read_job.h.",
                        nb::type_slots(owner_slots<PyReadJob>()))
      .def(
          "wait",
          [](PyReadJob& self, Timeout timeout) {
            return wait_and_release_owner(self, timeout,
                                          [&](Deadline d) { return self->wait_done(d); });
          },
          "timeout"_a.none())
      .def("next_ready", &next_ready, "timeout"_a.none())
      .def("next_readies", &next_readies, "timeout"_a.none(), "most"_a)
      .def(
          "release",
          [](PyReadJob& self, PyReady& ready) {
            {
              const GilReleased gil_released;
              self->release(ready.loan);
            }
            ready.was_given_back();
          },
          "ready"_a)
      .def("release_all", &release_all, "readies"_a)
      .def_prop_ro("ready_left", [](PyReadJob& self) { return self->ready_left(); })
      .def("cancel", &PyReadJob::cancel)
      .def_prop_ro("stats", [](PyReadJob& self) {
        const ReadStats stats = self->stats();
        return std::map<std::string, uint64_t>{{"bytes", stats.bytes},
                                               {"cached_bytes", stats.cached_bytes},
                                               {"direct_bytes", stats.direct_bytes}};
      });
}

void declare_ranges_job(nb::module_& m) {
  nb::class_<PyRangesJob>(m, "RangesJob", "Ranges of files being moved; see native/ranges_job.h.",
                          nb::type_slots(owner_slots<PyRangesJob>()))
      .def(
          "wait",
          [](PyRangesJob& self, Timeout timeout) {
            return wait_and_release_owner(self, timeout,
                                          [&](Deadline d) { return self->wait_done(d); });
          },
          "timeout"_a.none())
      .def("next_done", &next_done, "timeout"_a.none())
      .def_prop_ro("unreturned", [](PyRangesJob& self) { return self->unreturned(); })
      .def("checksums",
           [](PyRangesJob& self) {
             const std::vector<uint64_t> sums = self->checksums();
             return nb::bytes(sums.data(), sums.size() * sizeof(uint64_t));
           })
      .def("cancel", &PyRangesJob::cancel)
      .def_prop_ro("stats", [](PyRangesJob& self) {
        const RangesStats stats = self->stats();
        return std::map<std::string, uint64_t>{{"bytes", stats.bytes},
                                               {"copied_bytes", stats.copied_bytes}};
      });
}

void declare_engine(nb::module_& m) {
  m.attr("SEGMENT_EAGER") = static_cast<int>(kSegmentEager);
  m.attr("SEGMENT_EXTERNAL") = static_cast<int>(kSegmentExternal);
  m.attr("SEGMENT_SHARED") = static_cast<int>(kSegmentShared);
  nb::class_<PyEngine>(m, "Engine", "Staging buffers and copy threads; see native/engine.h.")
      .def("__init__", &new_engine, "fs"_a, "staging_bytes"_a,
           "buffer_bytes"_a = uint64_t{16} << 20, "copy_threads"_a = 2,
           "clients"_a = ClientTable{{1, 1}})
      .def_prop_ro(
          "staging",
          [](PyEngine& self) { return view_of(self->memory(), 0, self->memory()->count()); })
      .def_prop_ro(
          "staging_address",
          [](PyEngine& self) { return reinterpret_cast<uintptr_t>(self->memory()->data()); })
      .def_prop_ro("buffer_bytes", [](PyEngine& self) { return self->memory()->buffer_bytes(); })
      .def_prop_ro("buffer_count", [](PyEngine& self) { return self->memory()->count(); })
      .def("write", &engine_write, nb::kw_only(), "file_bytes"_a, "block_bytes"_a, "begins"_a,
           "sizes"_a, "addresses"_a, "flags"_a, "strided"_a, "header"_a, "owner"_a.none(),
           "file"_a.none() = nb::none(), "expected"_a = nb::bytes("", 0), "client"_a = 0,
           "path"_a = 0)
      .def("read", &engine_read, nb::kw_only(), "files"_a, "file_bytes"_a, "block_bytes"_a,
           "file_index"_a, "begins"_a, "sizes"_a, "addresses"_a, "flags"_a, "strided"_a, "sums"_a,
           "owner"_a.none(), "boxes"_a = nb::dict(), "first_segment"_a = 0, "client"_a = 0,
           "path"_a = 0)
      .def("ranges", &engine_ranges, nb::kw_only(), "write"_a, "files"_a, "file_index"_a,
           "offsets"_a, "sizes"_a, "addresses"_a, "sums"_a = nb::bytes("", 0), "owner"_a.none(),
           "client"_a = 0, "paths"_a = std::vector<uint32_t>{}, "transfer_bytes"_a = 0,
           "verified"_a = true, "staged"_a = false)
      .def(
          "set_limit",
          [](PyEngine& self, uint32_t path, std::optional<uint32_t> client, uint64_t bytes_per_s) {
            const GilReleased gil_released;
            self->set_limit(path, client, bytes_per_s);
          },
          "path"_a, "client"_a.none(), "bytes_per_s"_a)
      .def(
          "client_stats",
          [](PyEngine& self, uint32_t client) {
            const ClientStats stats = self->stats_of(client);
            return std::map<std::string, uint64_t>{{"buffers", stats.buffers},
                                                   {"read_bytes", stats.read_bytes},
                                                   {"written_bytes", stats.written_bytes}};
          },
          "client"_a)
      .def(
          "settle", [](PyEngine& self, bool all_buffers) { self->settle(all_buffers); },
          "all_buffers"_a = false, nb::call_guard<GilReleased>())
      .def("close", [](PyEngine& self) { self->close(); }, nb::call_guard<GilReleased>());
}

void declare_benchmarks(nb::module_& m) {
  const auto gil_released = nb::call_guard<GilReleased>();
  m.def(
      "raw_write",
      [](PyFs& fs, const std::string& path, uint64_t file_bytes, uint64_t buffer_bytes, int depth,
         bool reuse) {
        return raw_write_seconds(*fs, path, file_bytes, reuse, {buffer_bytes, depth});
      },
      "fs"_a, "path"_a, "file_bytes"_a, "buffer_bytes"_a, "depth"_a, "reuse"_a, gil_released);
  m.def(
      "raw_read",
      [](PyFs& fs, const std::string& path, uint64_t buffer_bytes, int depth) {
        return raw_read_seconds(*fs, path, {buffer_bytes, depth});
      },
      "fs"_a, "path"_a, "buffer_bytes"_a, "depth"_a, gil_released);
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The native core of statehold: moves bytes, decides nothing.";
  mismatch_type = PyErr_NewExceptionWithDoc(
      "statehold._core.Mismatch", "A piece differs from its checksum; attributes say which.",
      PyExc_ValueError, nullptr);
  m.attr("Mismatch") = nb::borrow(mismatch_type);
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false);  // native code does not print
  declare_fs(m);
  declare_buffers(m);
  declare_write_job(m);
  declare_read_job(m);
  declare_ranges_job(m);
  declare_engine(m);
  declare_benchmarks(m);
  m.def(
      "xxh3_64",
      [](nb::bytes data) {
        return xxh3_64(static_cast<const std::byte*>(data.data()), data.size());
      },
      "data"_a);
  m.def(
      "hash_memory",
      [](uintptr_t address, uint64_t nbytes) {
        return xxh3_64(reinterpret_cast<const std::byte*>(address), nbytes);
      },
      "address"_a, "nbytes"_a, nb::call_guard<GilReleased>());
  declare_pages(m);
  m.def("call_copies", &call_copies, "function"_a, nb::kw_only(), "to"_a, "source"_a, "sizes"_a,
        "kind"_a, "stream"_a);
  m.def("read_forms", &read_forms, "tensors"_a, "exchange"_a);
  m.def("read_members", &read_members, "objects"_a, "readers"_a);
  m.def("read_elements", &read_elements, "addresses"_a, "size"_a);
}
