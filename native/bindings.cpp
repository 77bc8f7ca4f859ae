// bindings: contract in bindings.h.
#include "bindings.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace statehold::python {
namespace {

// The elements of an array.array (or anything like it) of 8-byte integers.
std::vector<uint64_t> integers(nb::handle source, const char* name) {
  Py_buffer view;
  if (PyObject_GetBuffer(source.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
  const bool fits = view.itemsize == sizeof(uint64_t);
  std::vector<uint64_t> values(fits ? static_cast<size_t>(view.len) / sizeof(uint64_t) : 0);
  if (!values.empty()) std::memcpy(values.data(), view.buf, values.size() * sizeof(uint64_t));
  PyBuffer_Release(&view);
  if (!fits) throw std::invalid_argument(std::string(name) + " must hold 8-byte integers");
  return values;
}

std::vector<uint64_t> sums_from(nb::bytes source) {
  if (source.size() % sizeof(uint64_t) != 0) {
    throw std::invalid_argument("sums must hold 8-byte integers");
  }
  std::vector<uint64_t> sums(source.size() / sizeof(uint64_t));
  if (source.size() > 0) std::memcpy(sums.data(), source.data(), source.size());
  return sums;
}

nb::object view_of(Region region) {
  const nb::object owner = nb::cast(std::move(region));
  PyObject* view = PyMemoryView_FromObject(owner.ptr());
  if (view == nullptr) throw nb::python_error();
  return nb::steal(view);
}

void apply_strides(nb::dict strided, std::vector<Segment>& segments) {
  using Layout = std::tuple<uint64_t, std::vector<int64_t>, std::vector<int64_t>>;
  for (const auto& [key, value] : strided) {
    const auto index = nb::cast<size_t>(key);
    const auto [item_bytes, shape, strides] = nb::cast<Layout>(value);
    if (index >= segments.size()) throw std::invalid_argument("strided: no such segment");
    Segment& segment = segments[index];
    segment.place.strides.emplace(item_bytes, shape, strides);
    if (segment.place.strides->bytes() != segment.end - segment.begin) {
      throw std::invalid_argument("strided: shape and size differ");
    }
  }
}

void apply_boxes(nb::dict boxes, std::vector<Segment>& segments) {
  using Shape = std::vector<int64_t>;
  using Target = std::tuple<uint64_t, Shape, Shape, Shape, Shape, uint64_t>;
  for (const auto& [key, value] : boxes) {
    const auto index = nb::cast<size_t>(key);
    auto [item_bytes, chunk_shape, low, box_shape, strides, skip_bytes] = nb::cast<Target>(value);
    if (index >= segments.size()) throw std::invalid_argument("boxes: no such segment");
    Segment& segment = segments[index];
    if (segment.place.strides || segment.external) {
      throw std::invalid_argument("boxes: the segment is strided or external, too");
    }
    const ChunkBox box{std::move(chunk_shape), std::move(low), std::move(box_shape)};
    const Strides& placed = segment.place.strides.emplace(item_bytes, box, strides);
    const uint64_t bytes = segment.end - segment.begin;
    if (bytes > placed.bytes() || skip_bytes > placed.bytes() - bytes) {
      throw std::invalid_argument("boxes: the segment does not lie inside its chunk");
    }
    segment.place.skip_bytes = skip_bytes;
  }
}

std::vector<Segment> parse_segments(nb::handle begins, nb::handle sizes, nb::handle addresses,
                                    nb::bytes flags, nb::dict strided) {
  const std::vector<uint64_t> begin = integers(begins, "begins");
  const std::vector<uint64_t> size = integers(sizes, "sizes");
  const std::vector<uint64_t> address = integers(addresses, "addresses");
  const auto* flag = static_cast<const uint8_t*>(flags.data());
  const size_t count = begin.size();
  if (size.size() != count || address.size() != count || flags.size() != count) {
    throw std::invalid_argument("begins, sizes, addresses and flags must have equal lengths");
  }
  std::vector<Segment> segments(count);
  for (size_t i = 0; i < count; ++i) {
    constexpr uint64_t file_bytes_max = uint64_t{1} << 62;
    if (begin[i] > file_bytes_max || size[i] > file_bytes_max) {
      throw std::invalid_argument("a segment does not lie inside its file");
    }
    segments[i].begin = begin[i];
    segments[i].end = begin[i] + size[i];
    segments[i].place.address = reinterpret_cast<std::byte*>(address[i]);
    segments[i].eager = (flag[i] & kSegmentEager) != 0;
    segments[i].external = (flag[i] & kSegmentExternal) != 0;
    segments[i].shared = (flag[i] & kSegmentShared) != 0;
  }
  apply_strides(strided, segments);
  return segments;
}

}  // namespace

int region_get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Region* region = nb::inst_ptr<Region>(self);
  return PyBuffer_FillInfo(view, self, region->data, static_cast<Py_ssize_t>(region->bytes),
                           region->read_only ? 1 : 0, flags);
}

nb::object view_of(const std::shared_ptr<StagingMemory>& memory, uint64_t first, uint64_t count) {
  return view_of(Region{memory, memory->buffer(first), count * memory->buffer_bytes()});
}

nb::object view_of(const PyFile& file) {
  const std::shared_ptr<File>& shared = file.opened();
  const std::span<const std::byte> view = shared->view();
  // The buffer protocol knows no const; `read_only` keeps Python from writing.
  return view_of(Region{shared, const_cast<std::byte*>(view.data()), view.size(), true});
}

uintptr_t address_of(const PyFile& file) {
  return reinterpret_cast<uintptr_t>(file.opened()->view().data());
}

void populate(const PyFile& file, uint64_t begin, uint64_t bytes) {
  const std::shared_ptr<File> shared = file.share();
  const GilReleased gil_released;
  must(shared->populate(begin, bytes));
}

const std::shared_ptr<File>& PyFile::opened() const {
  if (::getpid() != process_) throw Failure(Status::closed("use in a forked process"));
  if (!file_) throw Failure(Status::closed("a use of " + path));
  return file_;
}

std::shared_ptr<File> PyFile::take() {
  static_cast<void>(opened());
  return std::move(file_);
}

void PyFile::close() {
  std::shared_ptr<File> file = std::move(file_);
  if (!file) return;
  const GilReleased gil_released;  // a file system may wait here, and undoing a mapping takes long
  file.reset();
}

bool PyFile::close_alone(double within_s) {
  std::shared_ptr<File> file = std::move(file_);
  const GilReleased gil_released;
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + duration_of(within_s);
  // The others are transfers in flight, and a job: they let go of it, and nobody can join them.
  while (file.use_count() > 1) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  file.reset();
  return true;
}

PyFile open_write(PyFs& fs, const FsPath& path, uint64_t bytes, bool reuse, bool mapped,
                  PyFile* kept) {
  const std::shared_ptr<File> before = kept != nullptr ? kept->take() : nullptr;
  const GilReleased gil_released;
  return PyFile(must(mapped ? fs->open_mapped(path, bytes, reuse, before)
                            : fs->open_write(path, bytes, reuse)));
}

// With the GIL where a file is kept, so that no other thread becomes its owner meanwhile; it is
// quick in memory.
bool can_reuse(PyFs& fs, const FsPath& path, PyFile* kept) {
  if (kept != nullptr) return fs->can_reuse_kept(path, kept->opened());
  const GilReleased gil_released;
  return fs->can_reuse(path);
}

PyBufferPool::PyBufferPool(uint64_t count, uint64_t buffer_bytes)
    : memory(count, buffer_bytes), pool(count) {
  for (uint32_t index = 0; index < count; ++index) pool.add(index);
}

std::optional<std::tuple<uint32_t, uint32_t, uintptr_t>> PyBufferPool::acquire_nowait() {
  const std::optional<Lease> lease = pool.acquire_nowait();
  if (!lease) return std::nullopt;
  const auto address = reinterpret_cast<uintptr_t>(memory.buffer(lease->index));
  return std::tuple(lease->index, lease->generation, address);
}

std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>> tuples_of(
    const std::vector<BufferPiece>& pieces) {
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>> tuples;
  tuples.reserve(pieces.size());
  for (const BufferPiece& piece : pieces) {
    tuples.emplace_back(piece.segment, piece.segment_offset, piece.buffer_offset, piece.bytes);
  }
  return tuples;
}

std::vector<std::pair<FsPath, bool>> list_dir(PyFs& fs, const FsPath& path) {
  std::vector<std::pair<FsPath, bool>> names;
  for (DirEntry& entry : must(fs->listdir(path))) {
    names.emplace_back(std::move(entry.name), entry.is_dir);
  }
  return names;
}

std::optional<int64_t> stat_bytes(PyFs& fs, const FsPath& path) {
  const int64_t bytes = must(fs->stat_bytes(path));
  return bytes < 0 ? std::nullopt : std::optional(bytes);
}

void write_file(PyFs& fs, const FsPath& path, nb::bytes data) {
  const std::string_view bytes(static_cast<const char*>(data.data()), data.size());
  const GilReleased gil_released;
  must(fs->write_file(path, bytes));
}

nb::bytes read_file(PyFs& fs, const FsPath& path, uint64_t max_bytes) {
  std::string data;
  {
    const GilReleased gil_released;
    data = must(fs->read_file(path, max_bytes));
  }
  return nb::bytes(data.data(), data.size());
}

void read_into(PyFile& file, nb::handle memory, uint64_t offset) {
  const std::shared_ptr<File> source = file.share();
  Py_buffer view;
  if (PyObject_GetBuffer(memory.ptr(), &view, PyBUF_CONTIG) != 0) throw nb::python_error();
  Status status;
  {
    const GilReleased gil_released;
    status =
        source->read(static_cast<std::byte*>(view.buf), static_cast<uint64_t>(view.len), offset);
  }
  PyBuffer_Release(&view);
  must(status);
}

void new_engine(PyEngine* self, PyFs& fs, uint64_t staging_bytes, uint64_t buffer_bytes,
                int copy_threads, const ClientTable& clients) {
  EngineOptions options{staging_bytes, buffer_bytes, copy_threads, {}};
  for (const auto& [reserved, weight] : clients) options.clients.push_back({reserved, weight});
  new (self) PyEngine(std::make_shared<Engine>(fs.shared(), options));
}

PyWriteJob engine_write(PyEngine& engine, uint64_t file_bytes, uint64_t block_bytes,
                        nb::handle begins, nb::handle sizes, nb::handle addresses, nb::bytes flags,
                        nb::dict strided, nb::bytes header, nb::object owner, PyFile* file,
                        nb::bytes expected, uint32_t client, uint32_t path) {
  WriteRequest request;
  request.expected = sums_from(expected);
  request.client = client;
  request.path = path;
  if (file != nullptr) request.file = file->opened();
  request.file_bytes = file_bytes;
  request.block_bytes = block_bytes;
  request.header.assign(static_cast<const char*>(header.data()), header.size());
  request.segments = parse_segments(begins, sizes, addresses, flags, strided);
  for (const Segment& segment : request.segments) {
    if (segment.begin != segment.end && segment.place.address == nullptr && !segment.external) {
      throw std::invalid_argument("a segment has no memory, as a fake tensor has none");
    }
  }
  std::shared_ptr<WriteJob> job;
  {
    const GilReleased gil_released;
    job = engine->write(std::move(request));
  }
  return {std::move(job), engine->memory(), std::move(owner)};
}

PyReadJob engine_read(PyEngine& engine, std::vector<FsPath> files, std::vector<uint64_t> file_bytes,
                      uint64_t block_bytes, nb::handle file_index, nb::handle begins,
                      nb::handle sizes, nb::handle addresses, nb::bytes flags, nb::dict strided,
                      nb::bytes sums, nb::object owner, nb::dict boxes, uint64_t first_segment,
                      uint32_t client, uint32_t path) {
  ReadRequest request;
  request.client = client;
  request.path = path;
  request.paths.assign(files.begin(), files.end());
  request.file_bytes = std::move(file_bytes);
  request.block_bytes = block_bytes;
  request.segments = parse_segments(begins, sizes, addresses, flags, strided);
  request.first_segment = first_segment;
  apply_boxes(boxes, request.segments);
  const std::vector<uint64_t> file = integers(file_index, "file_index");
  if (file.size() != request.segments.size()) {
    throw std::invalid_argument("file_index has the wrong length");
  }
  for (size_t i = 0; i < file.size(); ++i) {
    if (file[i] >= request.paths.size()) throw std::invalid_argument("file_index: no such file");
    request.segments[i].file = static_cast<uint32_t>(file[i]);
  }
  request.sums = sums_from(sums);
  std::shared_ptr<ReadJob> job;
  {
    const GilReleased gil_released;
    job = engine->read(std::move(request));
  }
  return {std::move(job), engine->memory(), std::move(owner)};
}

PyRangesJob engine_ranges(PyEngine& engine, bool write, const nb::list& files,
                          nb::handle file_index, nb::handle offsets, nb::handle sizes,
                          nb::handle addresses, nb::bytes sums, nb::object owner, uint32_t client,
                          std::vector<uint32_t> paths, uint64_t transfer_bytes, bool verified,
                          bool staged) {
  RangesRequest request;
  request.kind = write ? IoRequest::Kind::write : IoRequest::Kind::read;
  for (const nb::handle file : files) request.files.push_back(nb::cast<PyFile&>(file).opened());
  if (!paths.empty() && paths.size() != request.files.size()) {
    throw std::invalid_argument("paths must be as many as files, or none");
  }
  request.paths = std::move(paths);
  request.client = client;
  request.transfer_bytes = transfer_bytes;
  request.staged = staged;
  const std::vector<uint64_t> file = integers(file_index, "file_index");
  const std::vector<uint64_t> offset = integers(offsets, "offsets");
  const std::vector<uint64_t> size = integers(sizes, "sizes");
  const std::vector<uint64_t> address = integers(addresses, "addresses");
  const std::vector<uint64_t> sum = sums_from(sums);
  const size_t count = offset.size();
  if (file.size() != count || size.size() != count || address.size() != count ||
      sum.size() != (write || !verified ? 0 : count)) {
    throw std::invalid_argument(
        "there must be one file_index, size, address and (reading, verified) sum, "
        "and (otherwise) no sum, for each offset");
  }
  request.verified = verified;
  request.ranges.resize(count);
  for (size_t i = 0; i < count; ++i) {
    // An index that does not fit is one that there is not.
    Range& range = request.ranges[i];
    range.file = static_cast<uint32_t>(std::min<uint64_t>(file[i], UINT32_MAX));
    range.offset = offset[i];
    range.bytes = size[i];
    range.memory = reinterpret_cast<std::byte*>(address[i]);
    range.sum = sum.empty() ? 0 : sum[i];
  }
  std::shared_ptr<RangesJob> job;
  {
    const GilReleased gil_released;
    job = engine->ranges(std::move(request));
  }
  return {std::move(job), engine->memory(), std::move(owner)};
}

std::vector<uint64_t> next_done(PyRangesJob& job, Timeout timeout) {
  std::vector<uint64_t> done;
  wait(timeout, [&](Deadline deadline) {
    done = job->next_done(deadline);
    return !done.empty() || job->unreturned() == 0;
  });
  return done;
}

namespace {

// The buffers that a job lends now, at most so many; waits for the first one. `lend` gives one, or
// none at its deadline; `is_over`: there will be no more.
template <class Loan, class Lend, class IsOver>
std::vector<Loan> lent_now(Timeout timeout, size_t most, Lend lend, IsOver is_over) {
  std::vector<Loan> lent;
  lent.reserve(most);  // no memory is needed once one is there
  wait(timeout, [&](Deadline deadline) {
    while (lent.size() < most) {
      try {
        std::optional<Loan> one = lend(deadline);
        if (!one) break;
        lent.push_back(std::move(*one));
      } catch (const Failure&) {
        if (lent.empty()) throw;
        break;  // these have to come back first; the next call raises it
      }
      deadline = std::chrono::steady_clock::now();
    }
    return !lent.empty() || is_over();
  });
  return lent;
}

template <class PyLoan, class SomeJob, class Loan>
std::vector<PyLoan> handles_of(JobHandle<SomeJob>& job, std::vector<Loan> lent) {
  std::vector<PyLoan> handles;
  handles.reserve(lent.size());
  for (Loan& each : lent) handles.emplace_back(job.shared(), std::move(each), job.memory);
  return handles;
}

// Those that were given back before are left: an exception, such as Ctrl-C, may have come after it.
template <class SomeJob, class PyLoan>
void give_all_back(JobHandle<SomeJob>& job, const std::vector<PyLoan*>& lent) {
  std::vector<PyLoan*> left;
  for (PyLoan* each : lent) {
    if (each->is_lent()) left.push_back(each);
  }
  size_t count = 0;
  const auto forget = [&] {
    for (size_t i = 0; i < count; ++i) left[i]->was_given_back();
  };
  try {
    const std::shared_ptr<SomeJob> shared = job.shared();
    const GilReleased gil_released;
    for (; count < left.size(); ++count) give_back(*shared, left[count]->loan);
  } catch (...) {
    forget();
    throw;
  }
  forget();
}

template <class Loan>
std::optional<Loan> first_of(std::vector<Loan> handles) {
  if (handles.empty()) return std::nullopt;
  return std::move(handles.front());
}

}  // namespace

std::vector<PyFill> next_fills(PyWriteJob& job, Timeout timeout, size_t most) {
  return handles_of<PyFill>(
      job, lent_now<Fill>(
               timeout, most, [&](Deadline deadline) { return job->next_fill(deadline); },
               [&] { return job->fills_left() == 0; }));
}

std::vector<PyReady> next_readies(PyReadJob& job, Timeout timeout, size_t most) {
  return handles_of<PyReady>(
      job, lent_now<Ready>(
               timeout, most, [&](Deadline deadline) { return job->next_ready(deadline); },
               [&] { return job->ready_left() == 0; }));
}

std::optional<PyFill> next_fill(PyWriteJob& job, Timeout timeout) {
  return first_of(next_fills(job, timeout, 1));
}

std::optional<PyReady> next_ready(PyReadJob& job, Timeout timeout) {
  return first_of(next_readies(job, timeout, 1));
}

void filled_all(PyWriteJob& job, const std::vector<PyFill*>& fills) { give_all_back(job, fills); }

void release_all(PyReadJob& job, const std::vector<PyReady*>& readies) {
  give_all_back(job, readies);
}

int call_copies(uintptr_t function, nb::handle to, nb::handle from, nb::handle sizes, int kind,
                uintptr_t stream) {
  using Copy = int (*)(void*, const void*, size_t, int, void*);
  const std::vector<uint64_t> targets = integers(to, "to");
  const std::vector<uint64_t> sources = integers(from, "from");
  const std::vector<uint64_t> bytes = integers(sizes, "sizes");
  if (targets.size() != bytes.size() || sources.size() != bytes.size()) {
    throw std::invalid_argument("there must be one target and one size for each source");
  }
  const auto copy = reinterpret_cast<Copy>(function);
  const GilReleased gil_released;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int error =
        copy(reinterpret_cast<void*>(targets[i]), reinterpret_cast<const void*>(sources[i]),
             bytes[i], kind, reinterpret_cast<void*>(stream));
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace statehold::python
