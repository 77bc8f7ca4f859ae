// fs_sim: contract in fs_sim.h.
#include "fs_sim.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "checksum.h"

namespace statehold {

// An open file on a SimDisk. Direct in every respect that can be checked.
class SimFile final : public File {
 public:
  // With the disk's mutex.
  SimFile(std::shared_ptr<SimDisk> disk, SimNodePtr node, std::string path, bool direct)
      : File(std::move(path), direct),
        disk_(std::move(disk)),
        node_(std::move(node)),
        epoch_(disk_->epoch_) {
    ++node_->open_count;
  }

  ~SimFile() override { close(); }

  void close() override {
    const Lock lock(disk_->mutex_);
    if (std::exchange(open_, false)) --node_->open_count;
  }

  Result<uint64_t> size_bytes() override {
    const Lock lock(disk_->mutex_);
    return {{}, node_->data.bytes().size()};
  }

  Status truncate(uint64_t bytes) override {
    const Lock lock(disk_->mutex_);
    disk_->moment("truncate", path());
    const int error = usable("truncate");
    if (error == 0) node_->data.resize(bytes);
    return disk_->done("truncate", path(), error);
  }

  Status sync() override {
    const Lock lock(disk_->mutex_);
    disk_->moment("sync", path());
    const int error = usable("sync");
    if (error == 0) node_->data.sync();
    if (error != 0 && disk_->fires("forgotten", 0.5, path(), 0)) node_->data.forget();
    return disk_->done("sync", path(), error);
  }

  Status read(std::byte* memory, uint64_t bytes, uint64_t offset) override {
    const Lock lock(disk_->mutex_);
    const int64_t result = faulty(IoRequest::Kind::read, bytes, offset);
    if (result < 0) {
      return Status::io(static_cast<int>(-result), "read", path(), static_cast<int64_t>(offset));
    }
    const std::string& data = node_->data.bytes();
    if (offset + bytes > data.size()) return Status::truncated("read", path(), data.size());
    std::memcpy(memory, data.data() + offset, bytes);
    return {};
  }

  // Some blocks are, some are not: both paths of a reader are used.
  bool cached(uint64_t offset, uint64_t) override {
    const Lock lock(disk_->mutex_);
    return disk_->chance("cached", path(), offset) < 0.5;
  }

  void read_ahead(uint64_t, uint64_t) override {}

  // What one system call would do: bytes, or -errno.
  int64_t transfer(IoRequest& request) {
    const Lock lock(disk_->mutex_);
    const uint64_t offset = request.next_offset();
    const int64_t allowed = faulty(request.kind, request.next_bytes(), offset);
    if (allowed < 0) return allowed;
    if (direct() && (request.next_bytes() % kPageBytes != 0 || offset % kPageBytes != 0)) {
      return -EINVAL;
    }
    const auto bytes = static_cast<uint64_t>(allowed);
    return request.kind == IoRequest::Kind::read ? get(request.next_memory(), bytes, offset)
                                                 : put(request.next_memory(), bytes, offset);
  }

 private:
  int usable(const char* operation) REQUIRES(disk_->mutex_) {
    if (epoch_ != disk_->epoch_) return EIO;
    return disk_->injected(operation);
  }

  // -errno, or how many of the bytes this call may transfer.
  int64_t faulty(IoRequest::Kind kind, uint64_t bytes, uint64_t offset) REQUIRES(disk_->mutex_) {
    const char* operation = kind == IoRequest::Kind::read ? "read" : "write";
    if (const int error = usable(operation); error != 0) return -error;
    if (disk_->fires("eio", disk_->options_.eio, path(), offset)) return -EIO;
    const uint64_t unit = direct() ? kPageBytes : 1;
    if (bytes > unit && disk_->fires("short", disk_->options_.short_io, path(), offset)) {
      const auto part =
          static_cast<uint64_t>(disk_->chance("part", path(), offset) * static_cast<double>(bytes));
      return static_cast<int64_t>(std::max(align_down(part, unit), unit));
    }
    return static_cast<int64_t>(bytes);
  }

  int64_t get(std::byte* memory, uint64_t bytes, uint64_t offset) REQUIRES(disk_->mutex_) {
    const std::string& data = node_->data.bytes();
    if (offset >= data.size()) return 0;
    const uint64_t count = std::min<uint64_t>(bytes, data.size() - offset);
    std::memcpy(memory, data.data() + offset, count);
    return static_cast<int64_t>(count);
  }

  int64_t put(const std::byte* memory, uint64_t bytes, uint64_t offset) REQUIRES(disk_->mutex_) {
    if (disk_->grows_too_much(node_->data.bytes().size(), offset + bytes)) return -ENOSPC;
    const std::string_view data(reinterpret_cast<const char*>(memory), bytes);
    disk_->moment("write", path());
    if (disk_->fires("misdirected", disk_->options_.misdirected, path(), offset)) {
      disk_->misdirect(node_, path(), offset, data);
    } else {
      node_->data.write(offset, data);
    }
    return static_cast<int64_t>(bytes);
  }

  const std::shared_ptr<SimDisk> disk_;
  const SimNodePtr node_;
  const uint64_t epoch_;
  bool open_ GUARDED_BY(disk_->mutex_) = true;
};

void SimDisk::crash() {
  const Lock lock(mutex_);
  lose(SimChoices(random_, options_.torn), nullptr);
}

std::vector<int> SimDisk::crash(std::vector<int> choices) {
  const Lock lock(mutex_);
  std::vector<int> arities;
  lose(SimChoices(std::move(choices)), &arities);
  return arities;
}

void SimDisk::lose(SimChoices choices, std::vector<int>* arities) {
  ++epoch_;
  power_left_.reset();
  const SimLoss loss = tree_.crash(choices);
  if (arities) *arities = choices.arities();
  for (const auto& [kind, count] :
       {std::pair{"torn", loss.torn}, std::pair{"lost name", loss.names},
        std::pair{"lost sector", loss.sectors}}) {
    if (count > 0) fired_[kind] += count;
  }
  operations_.push_back("crash");
}

void SimDisk::cut_power(uint64_t after) {
  const Lock lock(mutex_);
  power_left_ = after;
}

bool SimDisk::is_off() {
  if (!power_left_) return false;
  if (*power_left_ > 0) {
    --*power_left_;
    return false;
  }
  ++fired_["power"];
  return true;
}

void SimDisk::set_faults(SimOptions options) {
  const Lock lock(mutex_);
  options_ = options;
  injections_.clear();
}

void SimDisk::record() {
  const Lock lock(mutex_);
  recording_ = true;
}

std::vector<std::string> SimDisk::recorded() {
  const Lock lock(mutex_);
  std::vector<std::string> operations;
  operations.reserve(moments_.size());
  for (const SimMoment& moment : moments_) operations.push_back(moment.operation);
  return operations;
}

SimTree SimDisk::recorded_tree(size_t index) {
  const Lock lock(mutex_);
  return moments_.at(index).tree.clone();
}

std::vector<std::string> SimDisk::damaged() {
  const Lock lock(mutex_);
  std::vector<std::string> paths;
  for (const auto& [path, node] : tree_.files()) {
    if (node->damaged) paths.push_back(path);
  }
  return paths;
}

void SimDisk::moment(const std::string& operation, const std::string& path) {
  if (recording_) moments_.push_back({operation + ' ' + path, tree_.clone()});
}

void SimDisk::count(const std::string& fault) {
  const Lock lock(mutex_);
  ++fired_[fault];
}

void SimDisk::fail_next(const std::string& operation, int error, int count, int skip) {
  const Lock lock(mutex_);
  injections_[operation].push_back({error, count, skip});
}

std::map<std::string, uint64_t> SimDisk::fired() {
  const Lock lock(mutex_);
  return fired_;
}

std::vector<std::string> SimDisk::operations() {
  const Lock lock(mutex_);
  return operations_;
}

Status SimDisk::corrupt(const std::string& path, uint64_t offset, uint8_t mask) {
  const Lock lock(mutex_);
  const SimNodePtr node = tree_.find(path);
  if (!node || offset >= node->data.bytes().size()) return Status::io(ENOENT, "corrupt", path);
  node->data.corrupt(offset, mask);
  node->damaged = true;
  ++fired_["rot"];
  return {};
}

// Half of them hit the same file elsewhere, the others any file.
void SimDisk::misdirect(const SimNodePtr& node, const std::string& path, uint64_t offset,
                        std::string_view data) {
  const auto files = tree_.files();
  const auto pick = [&](const char* what, uint64_t count) {
    mutex_.assert_held();
    return static_cast<uint64_t>(chance(what, path, offset) * static_cast<double>(count));
  };
  // There may be no file left: who still writes to this one may have unlinked it.
  const bool stays = pick("stray", 2) == 0 || files.empty();
  const SimNodePtr victim = stays ? node : files[pick("victim", files.size())].second;
  const uint64_t sectors = align_up(victim->data.bytes().size(), kPageBytes) / kPageBytes;
  victim->data.overwrite_misdirected(pick("place", sectors) * kPageBytes, data);
  victim->damaged = node->damaged = true;
}

bool SimDisk::fires(const char* kind, double probability, const std::string& path,
                    uint64_t offset) {
  if (chance(kind, path, offset) >= probability) return false;
  ++fired_[kind];
  return true;
}

int SimDisk::injected(const std::string& operation) {
  if (is_off()) return EIO;
  for (Injection& injection : injections_[operation]) {
    if (injection.count == 0) continue;
    if (injection.skip > 0) {
      --injection.skip;
      return 0;
    }
    --injection.count;
    ++fired_["injected"];
    ++fired_["injected " + operation];
    return injection.error;
  }
  return 0;
}

double SimDisk::chance(const char* kind, const std::string& path, uint64_t offset) {
  const std::string text = std::string(kind) + ' ' + path + ' ' + std::to_string(offset) + ' ' +
                           std::to_string(options_.seed);
  const auto hash = [](const std::string& s) {
    return xxh3_64(reinterpret_cast<const std::byte*>(s.data()), s.size());
  };
  const uint64_t tries = tries_[hash(text)]++;
  return static_cast<double>(hash(text + ' ' + std::to_string(tries)) >> 11) * 0x1p-53;
}

bool SimDisk::grows_too_much(uint64_t from_bytes, uint64_t to_bytes) {
  if (!options_.capacity_bytes || to_bytes <= from_bytes) return false;
  if (tree_.used_bytes() + (to_bytes - from_bytes) <= *options_.capacity_bytes) return false;
  ++fired_["enospc"];
  return true;
}

Status SimDisk::done(const std::string& operation, const std::string& path, int error,
                     const std::string& detail) {
  if (error != 0) return Status::io(error, operation, path);
  operations_.push_back(operation + ' ' + path + (detail.empty() ? "" : ' ' + detail));
  return {};
}

SimFs::SimFs(const SimOptions& options, SimTree tree)
    : disk_(std::make_shared<SimDisk>(options, std::move(tree))),
      reorder_(options.reorder),
      order_(options.seed),
      thread_([this] { serve(); }) {}

SimFs::~SimFs() { SimFs::close(); }

template <class Change>
Status SimFs::name_change(const char* operation, const std::string& path, const std::string& detail,
                          Change&& change) {
  const Lock lock(disk_->mutex_);
  disk_->moment(operation, path);
  int error = disk_->injected(operation);
  if (error == 0) error = change(disk_->tree_);
  return disk_->done(operation, path, error, detail);
}

Status SimFs::mkdir(const std::string& path) {
  return name_change("mkdir", path, {}, [&](SimTree& tree) { return tree.mkdir(path); });
}

Status SimFs::rename(const std::string& from, const std::string& to) {
  return name_change("rename", from, to, [&](SimTree& tree) { return tree.rename(from, to); });
}

Status SimFs::exchange(const std::string& a, const std::string& b) {
  return name_change("exchange", a, b, [&](SimTree& tree) { return tree.exchange(a, b); });
}

Status SimFs::link(const std::string& from, const std::string& to) {
  return name_change("link", from, to, [&](SimTree& tree) { return tree.link(from, to); });
}

Status SimFs::unlink(const std::string& path) {
  return name_change("unlink", path, {}, [&](SimTree& tree) { return tree.unlink(path); });
}

Status SimFs::rmdir(const std::string& path) {
  return name_change("rmdir", path, {}, [&](SimTree& tree) { return tree.rmdir(path); });
}

Status SimFs::sync_dir(const std::string& path) {
  return name_change("sync_dir", path, {}, [&](SimTree& tree) { return tree.sync_dir(path); });
}

Result<std::vector<DirEntry>> SimFs::listdir(const std::string& path) {
  const Lock lock(disk_->mutex_);
  const SimNodePtr dir = disk_->tree_.find(path);
  if (!dir) return {Status::io(ENOENT, "listdir", path)};
  if (!dir->is_dir) return {Status::io(ENOTDIR, "listdir", path)};
  std::vector<DirEntry> entries;
  for (const auto& [name, node] : dir->names) entries.push_back({name, node->is_dir});
  return {{}, std::move(entries)};
}

Result<int64_t> SimFs::stat_bytes(const std::string& path) {
  const Lock lock(disk_->mutex_);
  const SimNodePtr node = disk_->tree_.find(path);
  return {{}, node ? static_cast<int64_t>(node->data.bytes().size()) : -1};
}

Result<bool> SimFs::is_dir(const std::string& path) {
  const Lock lock(disk_->mutex_);
  const SimNodePtr node = disk_->tree_.find(path);
  return {{}, node && node->is_dir};
}

int SimFs::store(const std::string& path, std::string_view data) {
  SimNodePtr node = disk_->tree_.find(path);
  if (node && node->is_dir) return EISDIR;
  if (node && disk_->tree_.name_count(node) > 1) return EMLINK;
  if (disk_->grows_too_much(node ? node->data.bytes().size() : 0, data.size())) return ENOSPC;
  if (!node) {
    if (const int error = disk_->tree_.create(path, node); error != 0) return error;
  }
  node->data.resize(0);
  disk_->moment("write_file: empty", path);
  if (disk_->is_off()) return EIO;
  node->data.write(0, data);
  disk_->moment("write_file: unsynced", path);
  if (disk_->is_off()) return EIO;
  node->data.sync();
  return 0;
}

Status SimFs::write_file(const std::string& path, std::string_view data) {
  Status status = name_change("write_file", path, {}, [&](SimTree&) {
    disk_->mutex_.assert_held();
    return store(path, data);
  });
  if (!status.ok()) write_half(path, data);
  return status;
}

// What a write_file that fails may leave: the file, empty or cut, and not durable.
void SimFs::write_half(const std::string& path, std::string_view data) {
  const Lock lock(disk_->mutex_);
  if (!disk_->fires("half a file", 0.5, path, 0)) return;
  SimNodePtr node = disk_->tree_.find(path);
  if (!node && disk_->tree_.create(path, node) != 0) return;
  if (node->is_dir || disk_->tree_.name_count(node) > 1) return;
  node->data.resize(0);
  node->data.write(0, data.substr(0, data.size() / 2));
}

Result<std::string> SimFs::read_file(const std::string& path, uint64_t bytes_max) {
  const Lock lock(disk_->mutex_);
  const SimNodePtr node = disk_->tree_.find(path);
  int error = disk_->injected("read_file");
  if (error == 0 && !node) error = ENOENT;
  if (error == 0 && node->is_dir) error = EISDIR;
  if (error == 0 && node->data.bytes().size() > bytes_max) error = EFBIG;
  if (error != 0) return {Status::io(error, "read_file", path)};
  return {{}, node->data.bytes()};
}

int SimFs::prepare(const std::string& path, uint64_t bytes, bool reuse, SimNodePtr& node) {
  if (const int error = disk_->injected("open_write"); error != 0) return error;
  node = disk_->tree_.find(path);
  if (reuse && !node) return ENOENT;
  if (reuse && node->is_dir) return EISDIR;
  if (reuse && disk_->tree_.name_count(node) > 1) return EMLINK;
  if (disk_->grows_too_much(reuse ? node->data.bytes().size() : 0, bytes)) return ENOSPC;
  disk_->moment("open_write", path);
  if (!reuse) {
    if (const int error = disk_->tree_.create(path, node); error != 0) return error;
  }
  node->damaged = false;
  node->data.resize(bytes);
  return 0;
}

Result<std::shared_ptr<File>> SimFs::open_write(const std::string& path, uint64_t bytes,
                                                bool reuse) {
  const Lock lock(disk_->mutex_);
  SimNodePtr node;
  const int error = prepare(path, align_up(bytes, kPageBytes), reuse, node);
  Status status = disk_->done("open_write", path, error, reuse ? "reuse" : "");
  if (!status.ok()) return {std::move(status)};
  return {{}, std::make_shared<SimFile>(disk_, node, path, true)};
}

Result<std::shared_ptr<File>> SimFs::open_read(const std::string& path, bool direct) {
  const Lock lock(disk_->mutex_);
  const SimNodePtr node = disk_->tree_.find(path);
  if (const int error = disk_->injected("open_read"); error != 0) {
    return {Status::io(error, "open_read", path)};
  }
  if (!node) return {Status::missing("open_read", path)};
  if (node->is_dir) return {Status::io(EISDIR, "open_read", path)};
  return {{}, std::make_shared<SimFile>(disk_, node, path, direct)};
}

bool SimFs::can_reuse(const std::string& path) {
  const Lock lock(disk_->mutex_);
  const SimNodePtr node = disk_->tree_.find(path);
  return node && !node->is_dir && node->open_count == 0 && disk_->tree_.name_count(node) == 1;
}

void SimFs::submit(IoRequest request) {
  {
    const Lock lock(mutex_);
    if (!closed_) {
      queue_.push_back(std::move(request));
      wake_.notify_one();
      return;
    }
  }
  call_done(request, Status::closed("transfer"));
}

void SimFs::hold() {
  const Lock lock(mutex_);
  held_ = true;
}

std::vector<std::string> SimFs::waiting() {
  const Lock lock(mutex_);
  std::vector<std::string> found;
  for (const IoRequest& each : queue_) {
    const char* kind = each.kind == IoRequest::Kind::read ? "read " : "write ";
    found.push_back(kind + each.file->path() + ' ' + std::to_string(each.offset) + ' ' +
                    std::to_string(each.bytes));
  }
  return found;
}

void SimFs::complete(size_t index) {
  Lock lock(mutex_);
  if (index >= queue_.size()) throw std::out_of_range("no such transfer waits");
  IoRequest request = take(index);
  lock.unlock();
  perform(std::move(request), index > 0, false);
}

IoRequest SimFs::take(size_t index) {
  const auto at = queue_.begin() + static_cast<ptrdiff_t>(index);
  IoRequest request = std::move(*at);
  queue_.erase(at);
  return request;
}

void SimFs::delay(const IoRequest& request) {
  double wait_s = 0;
  {
    const Lock lock(disk_->mutex_);
    const std::string& path = request.file->path();
    if (disk_->fires("slow", disk_->options_.slow, path, request.offset)) {
      wait_s = disk_->chance("wait", path, request.offset) * 1e-3;
    }
  }
  if (wait_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(wait_s));
}

void SimFs::perform(IoRequest request, bool reordered, bool may_delay) noexcept {
  Status status;
  const Status internal = guarded([&] {
    if (reordered) disk_->count("reordered");
    if (may_delay) delay(request);
    auto& file = static_cast<SimFile&>(*request.file);
    while (apply_result(request, file.transfer(request), status) == Progress::again) {
    }
  });
  call_done(request, internal.ok() ? std::move(status) : copy_of(internal));
}

void SimFs::serve() noexcept {
  Lock lock(mutex_);
  while (true) {
    while (!closed_ && (held_ || queue_.empty())) wake_.wait(lock);
    if (queue_.empty()) return;
    const size_t index = reorder_ ? order_() % queue_.size() : 0;
    IoRequest request = take(index);
    lock.unlock();
    perform(std::move(request), index > 0, true);
    lock.lock();
  }
}

void SimFs::close() {
  {
    const Lock lock(mutex_);
    closed_ = true;
  }
  wake_.notify_all();
  std::call_once(closing_, [this] { thread_.join(); });
}

}  // namespace statehold
