// buffers: the staging memory. A fixed set of equal, aligned buffers, allocated once.
//
// Always: free + lent == count; a lease names a buffer and the generation in which it was lent, so
// a lease that was given back cannot give back, or be mistaken for, a later one.
// Not here: waiting (the engine's scheduler), what the bytes mean (jobs).
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "status.h"

namespace statehold {

// Anonymous memory in huge pages where possible, not inherited by fork. Unmapped on destruction,
// but not in a forked child, where its addresses may be somebody else's.
class StagingMemory {
 public:
  StagingMemory(uint64_t buffer_count, uint64_t buffer_bytes);
  ~StagingMemory();
  StagingMemory(const StagingMemory&) = delete;
  StagingMemory& operator=(const StagingMemory&) = delete;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return count_ * buffer_bytes_; }
  uint64_t count() const { return count_; }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  std::byte* buffer(uint64_t index) const { return data_ + index * buffer_bytes_; }
  // Makes the pages of one buffer present, so that no later copy pays for page faults.
  void populate(uint64_t index);
  // Gives all pages back. Nobody uses a buffer any more.
  void discard();

 private:
  const uint64_t count_;
  const uint64_t buffer_bytes_;
  std::byte* mapping_ = nullptr;
  uint64_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
  const pid_t process_;
};

struct Lease {
  uint32_t index = 0;
  uint32_t generation = 0;  // odd while lent; 0 is no lease
};

// Which buffers are free. Last in, first out: the buffer used last is the warmest.
// Not synchronised: the engine's mutex guards it.
class BufferPool {
 public:
  explicit BufferPool(uint64_t count) : generations_(count) {
    CHECK(count <= UINT32_MAX);
    free_.reserve(count);  // so that giving back needs no memory
  }

  uint64_t count() const { return generations_.size(); }
  uint64_t free_count() const { return free_.size(); }
  uint64_t lent_count() const { return lent_; }
  // Buffers are lent only after they were added, once each.
  void add(uint32_t index);
  std::optional<Lease> acquire_nowait();
  void release(Lease lease);

 private:
  std::vector<uint32_t> generations_;  // odd: lent
  std::vector<uint32_t> free_;
  uint64_t added_ = 0;
  uint64_t lent_ = 0;
};

}  // namespace statehold
