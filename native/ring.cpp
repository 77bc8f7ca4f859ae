// ring: contract in ring.h.
//
// Both queues are rings of a power of two. Positions count up and wrap at 2^32. The producer
// publishes its tail with release, the consumer its head.
#include "ring.h"

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace statehold {
namespace {

// The numbers are the same on all architectures that PyTorch runs on.
constexpr long kSetup = 425;
constexpr long kEnter = 426;
constexpr long kRegister = 427;

constexpr uint32_t kSetupClamp = 1U << 4;
constexpr uint32_t kFeatureSingleMapping = 1U << 0;
constexpr uint32_t kFeatureExtendedArgument = 1U << 8;
constexpr int64_t kOffsetRings = 0;
constexpr int64_t kOffsetEntries = 0x10000000;

constexpr unsigned kEnterGetEvents = 1U << 0;
constexpr unsigned kEnterExtendedArgument = 1U << 3;

constexpr unsigned kRegisterBuffers2 = 15;
constexpr unsigned kRegisterBuffersUpdate = 16;
constexpr uint32_t kRegisterSparse = 1U << 0;

constexpr uint8_t kNothing = 0;
constexpr uint8_t kReadFixed = 4;
constexpr uint8_t kWriteFixed = 5;
constexpr uint8_t kRead = 22;
constexpr uint8_t kWrite = 23;

struct SubmissionOffsets {
  uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
  uint64_t address;
};
struct CompletionOffsets {
  uint32_t head, tail, mask, entries, overflow, completions, flags, reserved;
  uint64_t address;
};
struct Parameters {
  uint32_t entries, completions, flags, thread_cpu, thread_idle, features, workers_of, reserved[3];
  SubmissionOffsets submitted;
  CompletionOffsets completed;
};
struct Timespec {
  int64_t seconds, nanoseconds;
};
struct EnterArgument {
  uint64_t signals;
  uint32_t signals_bytes, unused;
  uint64_t limit;
};
struct Table {
  uint32_t slots, flags;
  uint64_t reserved, ranges, tags;
};
struct TableUpdate {
  uint32_t slot, reserved;
  uint64_t ranges, tags;
  uint32_t count, reserved2;
};
static_assert(sizeof(Ring::Entry) == 64 && sizeof(Ring::Completion) == 16);
static_assert(sizeof(Parameters) == 120 && sizeof(EnterArgument) == 24);
static_assert(sizeof(Table) == 32 && sizeof(TableUpdate) == 32);

uint32_t load(const uint32_t* shared) { return __atomic_load_n(shared, __ATOMIC_ACQUIRE); }
void store(uint32_t* shared, uint32_t value) { __atomic_store_n(shared, value, __ATOMIC_RELEASE); }
uint64_t address(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

}  // namespace

template <typename T>
T* Ring::at(uint32_t offset) const {
  return reinterpret_cast<T*>(static_cast<char*>(rings_.memory) + offset);
}

int Ring::map(Mapping& mapping, uint64_t bytes, int64_t offset) {
  void* memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
  if (memory == MAP_FAILED) return errno;
  mapping = {memory, bytes};
  return 0;
}

int Ring::open(unsigned entries) {
  Parameters made{};
  made.flags = kSetupClamp;
  fd_ = static_cast<int>(::syscall(kSetup, entries, &made));
  if (fd_ < 0) return errno;
  constexpr uint32_t needed = kFeatureSingleMapping | kFeatureExtendedArgument;
  if ((made.features & needed) != needed) return ENOSYS;
  const uint64_t of_submitted = made.submitted.array + made.entries * sizeof(uint32_t);
  const uint64_t of_completed = made.completed.completions + made.completions * sizeof(Completion);
  if (int error = map(rings_, std::max(of_submitted, of_completed), kOffsetRings)) return error;
  if (int error = map(entry_memory_, made.entries * sizeof(Entry), kOffsetEntries)) return error;

  entries_ = static_cast<Entry*>(entry_memory_.memory);
  entry_count_ = made.entries;
  submitted_head_ = at<uint32_t>(made.submitted.head);
  submitted_tail_ = at<uint32_t>(made.submitted.tail);
  completed_head_ = at<uint32_t>(made.completed.head);
  completed_tail_ = at<uint32_t>(made.completed.tail);
  completions_ = at<Completion>(made.completed.completions);
  completion_count_ = made.completions;
  // Entries could be submitted in another order than they lie in; these are not.
  uint32_t* order = at<uint32_t>(made.submitted.array);
  for (uint32_t i = 0; i < made.entries; ++i) order[i] = i;
  return 0;
}

void Ring::close() {
  for (Mapping* mapping : {&entry_memory_, &rings_}) {
    if (mapping->memory != nullptr) ::munmap(mapping->memory, mapping->bytes);
    *mapping = {};
  }
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Ring::Entry* Ring::next_entry(uint64_t user_data) {
  if (not_taken() == entry_count_) return nullptr;
  Entry& entry = entries_[tail_++ & (entry_count_ - 1)];
  make_nothing(entry, user_data);
  return &entry;
}

void Ring::make_nothing(Entry& entry, uint64_t user_data) {
  entry = {};
  entry.operation = kNothing;
  entry.fd = -1;
  entry.user_data = user_data;
}

void Ring::make_transfer(Entry& entry, bool is_read, int fd, void* memory, uint32_t bytes,
                         uint64_t offset, int slot) {
  if (slot < 0) {
    entry.operation = is_read ? kRead : kWrite;
  } else {
    entry.operation = is_read ? kReadFixed : kWriteFixed;
    entry.slot = static_cast<uint16_t>(slot);
  }
  entry.fd = fd;
  entry.memory = address(memory);
  entry.bytes = bytes;
  entry.offset = offset;
}

int Ring::submit() {
  store(submitted_tail_, tail_);
  return ::syscall(kEnter, fd_, not_taken(), 0, 0, nullptr, 0) < 0 ? errno : 0;
}

unsigned Ring::not_taken() const { return tail_ - load(submitted_head_); }

int Ring::wait(int64_t limit_s) {
  if (load(completed_tail_) != *completed_head_) return 0;
  const Timespec limit{limit_s, 0};
  const EnterArgument argument{0, 0, 0, address(&limit)};
  constexpr unsigned flags = kEnterGetEvents | kEnterExtendedArgument;
  return ::syscall(kEnter, fd_, 0, 1, flags, &argument, sizeof(argument)) < 0 ? errno : 0;
}

unsigned Ring::take(Completion* taken, unsigned most) {
  const uint32_t head = *completed_head_;
  const uint32_t count = std::min<uint32_t>(load(completed_tail_) - head, most);
  for (uint32_t i = 0; i < count; ++i)
    taken[i] = completions_[(head + i) & (completion_count_ - 1)];
  store(completed_head_, head + count);
  return count;
}

bool Ring::register_table(unsigned slots) {
  const Table table{slots, kRegisterSparse, 0, 0, 0};
  return ::syscall(kRegister, fd_, kRegisterBuffers2, &table, sizeof(table)) == 0;
}

bool Ring::update_table(unsigned slot, const iovec& range) {
  const TableUpdate update{slot, 0, address(&range), 0, 1, 0};
  return ::syscall(kRegister, fd_, kRegisterBuffersUpdate, &update, sizeof(update)) == 1;
}

}  // namespace statehold
