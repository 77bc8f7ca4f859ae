// The pool lends every buffer once, and only a valid lease comes back.
#include "buffers.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>

#include "fs.h"
#include "test.h"

using namespace statehold;

TEST(lends_each_buffer_once) {
  BufferPool pool(3);
  EXPECT(!pool.acquire_nowait());
  for (uint32_t i = 0; i < 3; ++i) pool.add(i);
  std::vector<Lease> leases;
  while (const auto lease = pool.acquire_nowait()) leases.push_back(*lease);
  EXPECT(leases.size() == 3);
  EXPECT(leases[0].index != leases[1].index);
  EXPECT(leases[1].index != leases[2].index);
  EXPECT(leases[0].index != leases[2].index);
}

TEST(last_released_is_first_lent) {
  BufferPool pool(2);
  pool.add(0);
  pool.add(1);
  const Lease first = *pool.acquire_nowait();
  const Lease second = *pool.acquire_nowait();
  pool.release(first);
  pool.release(second);
  EXPECT(pool.acquire_nowait()->index == second.index);
}

TEST(refuses_stale_and_foreign_leases) {
  BufferPool pool(1);
  pool.add(0);
  const Lease lease = *pool.acquire_nowait();
  pool.release(lease);
  EXPECT_THROWS(CheckFailed, pool.release(lease));
  const Lease again = *pool.acquire_nowait();
  EXPECT(again.generation != lease.generation);
  EXPECT_THROWS(CheckFailed, pool.release(lease));
  EXPECT_THROWS(CheckFailed, pool.release({7, 1}));
  EXPECT_THROWS(CheckFailed, pool.add(0));
  pool.release(again);
}

TEST(memory_is_aligned_and_distinct) {
  StagingMemory memory(4, kPageBytes);
  for (uint64_t i = 0; i < 4; ++i) {
    EXPECT(reinterpret_cast<uintptr_t>(memory.buffer(i)) % kPageBytes == 0);
    memory.populate(i);
    memory.buffer(i)[0] = static_cast<std::byte>(i);
  }
  for (uint64_t i = 0; i < 4; ++i) EXPECT(memory.buffer(i)[0] == static_cast<std::byte>(i));
}

namespace {

// Puts a page where the parent has its memory, drops that memory, and looks for the page.
bool keeps_a_page_there(std::unique_ptr<StagingMemory> memory) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  void* page = ::mmap(memory->data(), kPageBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (page == MAP_FAILED) return false;
  memory.reset();
  unsigned char resident = 0;
  return ::mincore(page, kPageBytes, &resident) == 0;
}

}  // namespace

// The memory is not inherited: in a child its addresses may be somebody else's.
TEST(a_child_unmaps_nothing) {
  auto memory = std::make_unique<StagingMemory>(2, kPageBytes);
  const pid_t child = ::fork();
  EXPECT(child >= 0);
  if (child == 0) ::_exit(keeps_a_page_there(std::move(memory)) ? 0 : 1);
  int how = 0;
  EXPECT(::waitpid(child, &how, 0) == child);
  EXPECT(WIFEXITED(how));
  EXPECT(WEXITSTATUS(how) == 0);
}

TEST_MAIN
