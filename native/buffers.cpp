// buffers: contract in buffers.h.
#include "buffers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "fs.h"

namespace statehold {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

}  // namespace

StagingMemory::StagingMemory(uint64_t buffer_count, uint64_t buffer_bytes)
    : count_(buffer_count), buffer_bytes_(buffer_bytes), process_(::getpid()) {
  CHECK(buffer_bytes > 0);
  CHECK(buffer_bytes % kPageBytes == 0);
  mapping_bytes_ = align_up(count_ * buffer_bytes_, kHugePageBytes) + kHugePageBytes;
  void* mapping = ::mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw Failure(Status::io(errno, "map the staging memory", {}));
  mapping_ = static_cast<std::byte*>(mapping);
  data_ = mapping_ + (align_up(reinterpret_cast<uintptr_t>(mapping_), kHugePageBytes) -
                      reinterpret_cast<uintptr_t>(mapping_));
  // Both only cost speed when refused.
  ::madvise(mapping_, mapping_bytes_, MADV_HUGEPAGE);
  ::madvise(mapping_, mapping_bytes_, MADV_DONTFORK);
}

StagingMemory::~StagingMemory() {
  if (::getpid() == process_) ::munmap(mapping_, mapping_bytes_);
}

// Not MADV_POPULATE_WRITE: it holds the lock of the address space for a whole buffer, and every
// thread of the process that maps memory meanwhile, the trainer's too, waits for it. A fault takes
// the lock of this mapping only.
void StagingMemory::populate(uint64_t index) {
  CHECK(index < count_);
  std::byte* begin = buffer(index);
  for (uint64_t at = 0; at < buffer_bytes_; at += kPageBytes) {
    *static_cast<volatile std::byte*>(begin + at) = std::byte{0};
  }
}

void StagingMemory::discard() {
  if (::getpid() == process_) ::madvise(mapping_, mapping_bytes_, MADV_DONTNEED);
}

void BufferPool::add(uint32_t index) {
  CHECK(index < generations_.size());
  CHECK(added_ < generations_.size());
  CHECK(generations_[index] == 0);
  generations_[index] = 2;
  free_.push_back(index);
  ++added_;
}

std::optional<Lease> BufferPool::acquire_nowait() {
  CHECK(free_.size() + lent_ == added_);
  if (free_.empty()) return std::nullopt;
  const uint32_t index = free_.back();
  free_.pop_back();
  CHECK(generations_[index] % 2 == 0);
  ++generations_[index];
  ++lent_;
  return Lease{index, generations_[index]};
}

void BufferPool::release(Lease lease) {
  CHECK(lease.index < generations_.size());
  CHECK(lease.generation % 2 == 1);
  CHECK(generations_[lease.index] == lease.generation);
  ++generations_[lease.index];
  free_.push_back(lease.index);
  --lent_;
  CHECK(free_.size() + lent_ == added_);
}

}  // namespace statehold
