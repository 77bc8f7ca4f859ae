// bindings: handles and conversions between Python and the native core, for module.cpp and
// sim_module.cpp only.
//
// A handle shares the ownership of its native object. When Python drops a job, it is cancelled; an
// Fs lives on while an engine uses it. All of that happens without the GIL. Threads do not survive
// fork: in a child the handles refuse every call, and leak what they hold rather than wait for
// threads that are not there.
// A buffer that was lent to Python, and is dropped without being given back, fails its job and
// comes back: an exception, such as Ctrl-C, may come before Python has it in a variable. The handle
// of a job keeps the memory alive that the job copies from or to. It lets go of it on a Python
// thread, and only once the job is quiet (job.h): no native thread touches a Python object.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine.h"

namespace statehold::python {

namespace nb = nanobind;

// A path of the file system: any bytes. In Python those that are not UTF-8 are lone surrogates, as
// os.fsdecode() makes them, so that such a name hides nothing else in its directory.
struct FsPath : std::string {
  FsPath() = default;
  FsPath(std::string path) : std::string(std::move(path)) {}  // NOLINT: a path is a string
};

// Releases the GIL. When the interpreter ends, Python before 3.14 unwinds a thread that wants the
// GIL back (pthread_exit). No destructor and no function of nanobind lets that pass: it would end
// the process. So such a thread sleeps until the process ends, as it does in later Pythons.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      while (true) ::pause();
    }
  }

 private:
  PyThreadState* const state_;
};

template <class Object>
class Handle {
 public:
  Handle(std::shared_ptr<Object> object) : object_(std::move(object)), process_(::getpid()) {}
  Handle(Handle&&) = default;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  ~Handle() {
    if (!object_) return;
    if (!is_ours()) {
      // Leaked on purpose: nobody destroys this copy.
      alignas(std::shared_ptr<Object>) std::byte copy[sizeof(std::shared_ptr<Object>)];
      ::new (copy) std::shared_ptr<Object>(std::move(object_));
      return;
    }
    const GilReleased gil_released;
    object_.reset();
  }

  const std::shared_ptr<Object>& shared() const {
    if (!is_ours()) throw Failure(Status::closed("use in a forked process"));
    return object_;
  }
  Object& operator*() const { return *shared(); }
  Object* operator->() const { return shared().get(); }

  bool is_ours() const { return ::getpid() == process_; }

 protected:
  bool has_object() const { return object_ != nullptr; }
  void forget() { object_.reset(); }

 private:
  std::shared_ptr<Object> object_;
  const pid_t process_;
};

class PyFs : public Handle<Fs> {
 public:
  using Handle::Handle;
};

class PyEngine : public Handle<Engine> {
 public:
  using Handle::Handle;
};

// A job shares its engine's state, not its threads: Engine.close() ends it. All members are called
// with the GIL.
template <class SomeJob>
class JobHandle : public Handle<SomeJob> {
 public:
  JobHandle(std::shared_ptr<SomeJob> job, std::shared_ptr<StagingMemory> staging, nb::object owner)
      : Handle<SomeJob>(std::move(job)), memory(std::move(staging)), owner_(std::move(owner)) {}
  JobHandle(JobHandle&&) = default;
  ~JobHandle() {
    if (!this->has_object() || !this->is_ours()) return;  // moved from, or in a child
    static_cast<void>(guarded([this] { cancel(); }));
  }

  nb::handle owner() const { return owner_; }
  // The job is quiet. Two calls at once are harmless.
  void release_owner() { const nb::object dropped = std::move(owner_); }
  // Cancels the job, waits until it is quiet, lets go.
  void cancel() {
    {
      const GilReleased gil_released;
      (*this)->cancel();
    }
    release_owner();
  }

  std::shared_ptr<StagingMemory> memory;

 private:
  nb::object owner_;
};

using PyWriteJob = JobHandle<WriteJob>;
using PyReadJob = JobHandle<ReadJob>;
using PyRangesJob = JobHandle<RangesJob>;

class PyFile {
 public:
  explicit PyFile(std::shared_ptr<File> opened)
      : path(opened->path()),
        direct(opened->direct()),
        mapped(opened->mapped()),
        file_(std::move(opened)),
        process_(::getpid()) {}
  PyFile(PyFile&&) = default;
  ~PyFile() { close(); }

  // Throws after close, and in a forked process: what was mapped is not there.
  const std::shared_ptr<File>& opened() const;
  // For a call without the GIL: another thread may close the file meanwhile.
  std::shared_ptr<File> share() const { return opened(); }
  std::shared_ptr<File> take();  // closes it for Python
  void close();
  // As close(), and waits until nobody else has the file open; false when the time is over.
  bool close_alone(double within_s);

  const std::string path;
  const bool direct;
  const bool mapped;

 private:
  std::shared_ptr<File> file_;  // null after close
  const pid_t process_;
};

inline void give_back(WriteJob& job, const Fill& fill) { job.filled(fill); }
inline void give_back(ReadJob& job, const Ready& ready) { job.release(ready); }

// A buffer in the hands of Python. Holds the job that lent it until it is given back.
template <class SomeJob, class Loan>
class LentBuffer : public Handle<SomeJob> {
 public:
  LentBuffer(std::shared_ptr<SomeJob> job, Loan lent, std::shared_ptr<StagingMemory> staging)
      : Handle<SomeJob>(std::move(job)), loan(std::move(lent)), memory(std::move(staging)) {}
  LentBuffer(LentBuffer&&) = default;
  ~LentBuffer() {
    if (!this->has_object() || !this->is_ours()) return;
    const GilReleased gil_released;
    static_cast<void>(guarded([this] {
      (*this)->cancel();
      give_back(**this, loan);
    }));
  }

  // With the GIL.
  void was_given_back() { this->forget(); }
  bool is_lent() const { return this->has_object(); }
  uintptr_t address() const {
    return reinterpret_cast<uintptr_t>(memory->buffer(loan.lease.index));
  }

  Loan loan;
  std::shared_ptr<StagingMemory> memory;
};

using PyFill = LentBuffer<WriteJob, Fill>;
using PyReady = LentBuffer<ReadJob, Ready>;

// Exports staging memory, or a file that is memory, through the buffer protocol and keeps it
// mapped.
struct Region {
  std::shared_ptr<const void> owner;
  std::byte* data;
  uint64_t bytes;
  bool read_only = false;
};

int region_get_buffer(PyObject* self, Py_buffer* view, int flags);
nb::object view_of(const PyFile& file);
uintptr_t address_of(const PyFile& file);
void populate(const PyFile& file, uint64_t begin, uint64_t bytes);
PyFile open_write(PyFs& fs, const FsPath& path, uint64_t bytes, bool reuse, bool mapped,
                  PyFile* kept);
bool can_reuse(PyFs& fs, const FsPath& path, PyFile* kept);
nb::object view_of(const std::shared_ptr<StagingMemory>& memory, uint64_t first, uint64_t count);

class PyBufferPool {
 public:
  PyBufferPool(uint64_t count, uint64_t buffer_bytes);
  std::optional<std::tuple<uint32_t, uint32_t, uintptr_t>> acquire_nowait();
  void release(uint32_t index, uint32_t generation) { pool.release({index, generation}); }

  StagingMemory memory;
  BufferPool pool;
};

using Timeout = std::optional<double>;

// None, NaN, and more seconds than a clock can add stand for decades.
inline std::chrono::steady_clock::duration duration_of(Timeout timeout_s) {
  constexpr double at_most_s = 1e9;
  const double wanted_s = timeout_s.value_or(at_most_s);
  const double s = wanted_s < at_most_s ? std::max(wanted_s, 0.0) : at_most_s;
  using Duration = std::chrono::steady_clock::duration;
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(s));
}

// Waits in slices, so that Ctrl-C is noticed; done(Deadline) runs without the GIL.
template <class Done>
bool wait(Timeout timeout_s, Done&& done) {
  using Clock = std::chrono::steady_clock;
  constexpr auto slice = std::chrono::milliseconds(100);
  const auto end = Clock::now() + duration_of(timeout_s);
  while (true) {
    {
      const GilReleased gil_released;
      if (done(std::min(end, Clock::now() + slice))) return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (Clock::now() >= end) return false;
  }
}

// A wait after which the job touches its owner's memory no more: it is true, or the job has failed.
template <class SomeJob, class Done>
bool wait_and_release_owner(JobHandle<SomeJob>& job, Timeout timeout_s, Done&& done) {
  try {
    if (!wait(timeout_s, done)) return false;
  } catch (const Failure&) {
    job.release_owner();
    throw;
  }
  job.release_owner();
  return true;
}

// For Python's cyclic collector, which first finalizes all objects of a cycle, and then clears them
// one after the other, in an order of its own. What the owner has may be gone before the job is
// cleared. So a job is ended when it is finalized.
template <class PyJob>
void end_for_collector(PyObject* self) {
  if (!nb::inst_ready(self)) return;
  PyJob* job = nb::inst_ptr<PyJob>(self);
  if (job->is_ours()) job->cancel();
}
template <class PyJob>
int visit_owner(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<PyJob>(self)->owner().ptr());
  return 0;
}
template <class PyJob>
int clear_owner(PyObject* self) {
  end_for_collector<PyJob>(self);
  nb::inst_ptr<PyJob>(self)->release_owner();
  return 0;
}

std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>> tuples_of(
    const std::vector<BufferPiece>& pieces);
std::vector<std::pair<FsPath, bool>> list_dir(PyFs& fs, const FsPath& path);
std::optional<int64_t> stat_bytes(PyFs& fs, const FsPath& path);
void write_file(PyFs& fs, const FsPath& path, nb::bytes data);
nb::bytes read_file(PyFs& fs, const FsPath& path, uint64_t max_bytes);
// Fills a writable, contiguous buffer; whole or an error.
void read_into(PyFile& file, nb::handle memory, uint64_t offset);

// Reserved buffers and weight, by client.
using ClientTable = std::vector<std::tuple<uint64_t, uint64_t>>;

void new_engine(PyEngine* self, PyFs& fs, uint64_t staging_bytes, uint64_t buffer_bytes,
                int copy_threads, const ClientTable& clients);
PyWriteJob engine_write(PyEngine& engine, uint64_t file_bytes, uint64_t block_bytes,
                        nb::handle begins, nb::handle sizes, nb::handle addresses, nb::bytes flags,
                        nb::dict strided, nb::bytes header, nb::object owner, PyFile* file,
                        nb::bytes expected, uint32_t client, uint32_t path);
PyReadJob engine_read(PyEngine& engine, std::vector<FsPath> files, std::vector<uint64_t> file_bytes,
                      uint64_t block_bytes, nb::handle file_index, nb::handle begins,
                      nb::handle sizes, nb::handle addresses, nb::bytes flags, nb::dict strided,
                      nb::bytes sums, nb::object owner, nb::dict boxes, uint64_t first_segment,
                      uint32_t client, uint32_t path);
PyRangesJob engine_ranges(PyEngine& engine, bool write, const nb::list& files,
                          nb::handle file_index, nb::handle offsets, nb::handle sizes,
                          nb::handle addresses, nb::bytes sums, nb::object owner, uint32_t client,
                          std::vector<uint32_t> paths, uint64_t transfer_bytes, bool verified,
                          bool staged);
std::vector<uint64_t> next_done(PyRangesJob& job, Timeout timeout);
std::optional<PyFill> next_fill(PyWriteJob& job, Timeout timeout);
std::optional<PyReady> next_ready(PyReadJob& job, Timeout timeout);
std::vector<PyFill> next_fills(PyWriteJob& job, Timeout timeout, size_t most);
std::vector<PyReady> next_readies(PyReadJob& job, Timeout timeout, size_t most);
void filled_all(PyWriteJob& job, const std::vector<PyFill*>& fills);
void release_all(PyReadJob& job, const std::vector<PyReady*>& readies);
int call_copies(uintptr_t function, nb::handle to, nb::handle from, nb::handle sizes, int kind,
                uintptr_t stream);

}  // namespace statehold::python

namespace nanobind::detail {

template <>
struct type_caster<statehold::python::FsPath> {
  NB_TYPE_CASTER(statehold::python::FsPath, const_name("str"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    PyObject* const raw = PyUnicode_Check(source.ptr())
                              ? PyUnicode_AsEncodedString(source.ptr(), "utf-8", "surrogateescape")
                              : nullptr;
    if (raw == nullptr) {
      PyErr_Clear();
      return false;
    }
    value.assign(PyBytes_AsString(raw), static_cast<size_t>(PyBytes_Size(raw)));
    Py_DECREF(raw);
    return true;
  }

  static handle from_cpp(const statehold::python::FsPath& path, rv_policy, cleanup_list*) noexcept {
    return PyUnicode_DecodeUTF8(path.data(), static_cast<Py_ssize_t>(path.size()),
                                "surrogateescape");
  }
};

}  // namespace nanobind::detail
