// The ring itself: positions that wrap, entries that run out, a wait that ends, fixed buffers.
// What becomes of transfers is for tests/conformance.
#include "ring.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

#include "folder.h"
#include "test.h"

using namespace statehold;
using statehold::test::Folder;

namespace {

constexpr unsigned kEntries = 4;

// A ring, and the file that it moves bytes to and from.
struct Fixture {
  Ring ring;
  Folder folder;
  int fd = ::open((folder.path + "/f").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  const int error = ring.open(kEntries);

  ~Fixture() { ::close(fd); }

  bool is_refused() const { return error == EPERM || error == ENOSYS || error == EACCES; }

  // Submits what is there, and returns the one completion that follows.
  Ring::Completion move() {
    EXPECT(ring.submit() == 0 && ring.not_taken() == 0);
    EXPECT(ring.wait(30) == 0);
    std::array<Ring::Completion, 2> taken;
    EXPECT(ring.take(taken.data(), taken.size()) == 1);
    return taken[0];
  }

  Ring::Completion transfer(bool is_read, std::string& memory, uint64_t offset, int slot = -1) {
    Ring::Entry* entry = ring.next_entry(offset);
    EXPECT(entry != nullptr);
    const auto bytes = static_cast<uint32_t>(memory.size());
    Ring::make_transfer(*entry, is_read, fd, memory.data(), bytes, offset, slot);
    return move();
  }
};

}  // namespace

#define ON_A_RING(name)                                                      \
  static void name##_on_a_ring(Fixture& f);                                  \
  TEST(name) {                                                               \
    Fixture f;                                                               \
    if (f.is_refused()) return static_cast<void>(std::puts("skip  " #name)); \
    EXPECT(f.error == 0 && f.fd >= 0);                                       \
    name##_on_a_ring(f);                                                     \
  }                                                                          \
  static void name##_on_a_ring(Fixture& f)

ON_A_RING(positions_wrap) {
  for (uint64_t i = 0; i < 5 * kEntries; ++i) {
    std::string out = "written " + std::to_string(i), in(out.size(), ' ');
    const Ring::Completion written = f.transfer(false, out, 100 * i);
    EXPECT(written.user_data == 100 * i && written.result == static_cast<int>(out.size()));
    EXPECT(f.transfer(true, in, 100 * i).result == static_cast<int>(in.size()));
    EXPECT(in == out);
  }
}

ON_A_RING(entries_run_out_until_they_are_submitted) {
  for (uint64_t i = 1; i <= kEntries; ++i) EXPECT(f.ring.next_entry(i) != nullptr);
  EXPECT(f.ring.next_entry(99) == nullptr);
  EXPECT(f.ring.not_taken() == kEntries);
  EXPECT(f.ring.submit() == 0);
  EXPECT(f.ring.not_taken() == 0);
  EXPECT(f.ring.next_entry(99) != nullptr);
}

ON_A_RING(completions_are_taken_once_and_at_most_as_many_as_asked_for) {
  for (uint64_t i = 1; i <= 3; ++i) EXPECT(f.ring.next_entry(i) != nullptr);
  EXPECT(f.ring.submit() == 0 && f.ring.wait(30) == 0);
  std::array<Ring::Completion, 2> taken;
  EXPECT(f.ring.take(taken.data(), 2) == 2);
  EXPECT(taken[0].user_data == 1 && taken[1].user_data == 2);
  EXPECT(f.ring.wait(30) == 0);  // one is left, so it returns at once
  EXPECT(f.ring.take(taken.data(), 2) == 1);
  EXPECT(taken[0].user_data == 3);
  EXPECT(f.ring.take(taken.data(), 2) == 0);
}

ON_A_RING(a_wait_ends_without_a_completion) { EXPECT(f.ring.wait(0) == ETIME); }

ON_A_RING(an_entry_that_is_withdrawn_moves_nothing) {
  std::string out = "never";
  Ring::Entry* entry = f.ring.next_entry(7);
  Ring::make_transfer(*entry, false, f.fd, out.data(), 5, 0, -1);
  Ring::make_nothing(*entry, 0);
  EXPECT(f.move().user_data == 0);
  EXPECT(::lseek(f.fd, 0, SEEK_END) == 0);
}

ON_A_RING(a_transfer_that_fails_has_its_errno) {
  std::string in(8, ' ');
  Ring::Entry* entry = f.ring.next_entry(1);
  Ring::make_transfer(*entry, true, -1, in.data(), 8, 0, -1);
  EXPECT(f.move().result == -EBADF);
}

ON_A_RING(fixed_buffers_are_those_of_the_table) {
  std::string out(4096, 'x'), in(4096, ' ');
  if (!f.ring.register_table(2)) return static_cast<void>(std::puts("skip  a table"));
  EXPECT(!f.ring.update_table(2, {out.data(), out.size()}));
  EXPECT(f.ring.update_table(0, {out.data(), out.size()}));
  EXPECT(f.ring.update_table(1, {in.data(), in.size()}));
  EXPECT(f.transfer(false, out, 0, 0).result == 4096);
  EXPECT(f.transfer(true, in, 0, 1).result == 4096);
  EXPECT(in == out);
  EXPECT(f.transfer(true, in, 0, 0).result == -EFAULT);  // it is not the memory of that slot
  EXPECT(f.ring.update_table(1, {nullptr, 0}));
  EXPECT(f.transfer(true, in, 0, 1).result == -EFAULT);
}

TEST(a_closed_ring_may_be_closed_again) {
  Ring ring;
  ring.close();
  static_cast<void>(ring.open(kEntries));
  ring.close();
  ring.close();
}

TEST(no_entries_are_refused) {
  Ring ring;
  EXPECT(ring.open(0) != 0);
}

TEST_MAIN
