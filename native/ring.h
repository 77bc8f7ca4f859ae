// ring: one io_uring, by the three system calls and the shared memory that io_uring(7) describes.
//
// Owns the descriptor and the mappings. Its layouts are those of the kernel's stable interface, and
// no header of the kernel is needed: a build on an old distribution makes the same module. liburing
// was rejected: what is used of it fits into this file, and a wheel has to link it or do without.
//
// Not here: locks. Entries and submissions belong to one thread at a time, completions to another.
#pragma once

#include <cstdint>

struct iovec;

namespace statehold {

class Ring {
 public:
  // struct io_uring_sqe; the fields that transfers do not use have no name.
  struct Entry {
    uint8_t operation;
    uint8_t flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset;
    uint64_t memory;
    uint32_t bytes;
    uint32_t operation_flags;
    uint64_t user_data;
    uint16_t slot;
    uint16_t unused16;
    uint32_t unused32;
    uint64_t unused64[2];
  };
  // struct io_uring_cqe
  struct Completion {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
  };

  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { close(); }

  // 0 or an errno. ENOSYS also from a kernel where waiting would submit (before Linux 5.11).
  int open(unsigned entries);
  void close();

  // The next entry, all zero but for `user_data`, which does nothing; null: all are in use.
  Entry* next_entry(uint64_t user_data);
  static void make_nothing(Entry& entry, uint64_t user_data);
  static void make_transfer(Entry& entry, bool is_read, int fd, void* memory, uint32_t bytes,
                            uint64_t offset, int slot);  // slot < 0: not a registered buffer
  // Hands all entries to the kernel; 0 or an errno. What it left is not_taken().
  int submit();
  unsigned not_taken() const;

  // Until there is a completion: 0, or an errno (ETIME after `limit_s`).
  int wait(int64_t limit_s);
  // Copies completions out, at most `most`, and gives their places back.
  unsigned take(Completion* taken, unsigned most);

  // A table of `slots` buffers, all empty.
  bool register_table(unsigned slots);
  // Fills a slot of the table, or empties it.
  bool update_table(unsigned slot, const iovec& range);

 private:
  struct Mapping {
    void* memory = nullptr;
    uint64_t bytes = 0;
  };

  int map(Mapping& mapping, uint64_t bytes, int64_t offset);
  template <typename T>
  T* at(uint32_t offset) const;

  int fd_ = -1;
  Mapping rings_;
  Mapping entry_memory_;
  Entry* entries_ = nullptr;
  uint32_t entry_count_ = 0;
  uint32_t tail_ = 0;  // of the entries, those not yet submitted included
  // Shared with the kernel.
  uint32_t* submitted_head_ = nullptr;
  uint32_t* submitted_tail_ = nullptr;
  uint32_t* completed_head_ = nullptr;
  uint32_t* completed_tail_ = nullptr;
  Completion* completions_ = nullptr;
  uint32_t completion_count_ = 0;
};

}  // namespace statehold
