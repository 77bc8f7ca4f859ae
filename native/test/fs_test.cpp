// apply_result, the one judge of transfers: error, nothing, short, full.
#include "fs.h"

#include <cerrno>

#include "io_queue.h"
#include "test.h"

using namespace statehold;

namespace {

class FakeFile final : public File {
 public:
  explicit FakeFile(bool direct) : File("fake", direct) {}
  Result<uint64_t> size_bytes() override { return {}; }
  Status truncate(uint64_t) override { return {}; }
  Status sync() override { return {}; }
  Status read(std::byte*, uint64_t, uint64_t) override { return {}; }
  bool cached(uint64_t, uint64_t) override { return false; }
  void read_ahead(uint64_t, uint64_t) override {}
  void close() override {}
};

IoRequest request(IoRequest::Kind kind, bool direct, uint64_t bytes, uint64_t bytes_min) {
  IoRequest made;
  made.kind = kind;
  made.file = std::make_shared<FakeFile>(direct);
  made.bytes = bytes;
  made.bytes_min = bytes_min;
  made.offset = kPageBytes;
  return made;
}

constexpr auto kRead = IoRequest::Kind::read;
constexpr auto kWrite = IoRequest::Kind::write;

}  // namespace

TEST(full_is_finished) {
  IoRequest r = request(kWrite, true, 8192, 8192);
  Status status = Status::invariant("untouched");
  EXPECT(apply_result(r, 8192, status) == Progress::finished);
  EXPECT(status.ok());
}

TEST(short_goes_on_where_it_stopped) {
  IoRequest r = request(kWrite, false, 8192, 8192);
  Status status;
  EXPECT(apply_result(r, 1000, status) == Progress::again);
  EXPECT(r.next_offset() == kPageBytes + 1000);
  EXPECT(r.next_bytes() == 7192);
  EXPECT(apply_result(r, 7192, status) == Progress::finished);
  EXPECT(status.ok());
}

TEST(direct_goes_on_at_a_page) {
  IoRequest r = request(kRead, true, 16384, 16384);
  Status status;
  EXPECT(apply_result(r, 4096 + 512, status) == Progress::again);
  EXPECT(r.next_offset() == 2 * kPageBytes);
  EXPECT(r.next_bytes() == 12288);
}

TEST(tail_needs_only_the_minimum) {
  IoRequest r = request(kRead, true, 8192, 5000);
  Status status;
  EXPECT(apply_result(r, 5000, status) == Progress::finished);
  EXPECT(status.ok());
  IoRequest cut = request(kRead, true, 8192, 5000);
  EXPECT(apply_result(cut, 4999, status) == Progress::again);
  EXPECT(apply_result(cut, 903, status) == Progress::finished);
  EXPECT(status.code == Code::truncated);
  EXPECT(status.offset_bytes == static_cast<int64_t>(kPageBytes + 4999));
}

TEST(nothing_is_an_error) {
  Status status;
  IoRequest read = request(kRead, false, 100, 100);
  EXPECT(apply_result(read, 0, status) == Progress::finished);
  EXPECT(status.code == Code::truncated);
  IoRequest write = request(kWrite, false, 100, 100);
  EXPECT(apply_result(write, 0, status) == Progress::finished);
  EXPECT(status.code == Code::io);
  EXPECT(status.error == EIO);
}

TEST(errors_and_interruptions) {
  Status status;
  IoRequest r = request(kWrite, true, 8192, 8192);
  EXPECT(apply_result(r, -EINTR, status) == Progress::again);
  EXPECT(apply_result(r, -ECANCELED, status) == Progress::again);
  EXPECT(apply_result(r, -ENOSPC, status) == Progress::finished);
  EXPECT(status.error == ENOSPC);
  EXPECT(status.path == "fake");
  EXPECT(status.offset_bytes == static_cast<int64_t>(kPageBytes));
  EXPECT_THROWS(CheckFailed, apply_result(r, 8193, status));
}

// A file system (FUSE, say) may answer with one of these for ever.
TEST(what_never_gets_on_fails) {
  for (const int error : {EINTR, EAGAIN, ECANCELED}) {
    IoRequest r = request(kRead, false, 8192, 8192);
    Status status;
    const auto again = [&] { return apply_result(r, -error, status) == Progress::again; };
    EXPECT(again());
    EXPECT(apply_result(r, 4096, status) == Progress::again);
    int tries = 0;
    while (again() && tries < 1'000'000) ++tries;
    EXPECT(tries > 100);
    EXPECT(tries < 1'000'000);
    EXPECT(status.code == Code::io);
    EXPECT(status.error == error);
    EXPECT(status.offset_bytes == static_cast<int64_t>(kPageBytes + 4096));
  }
}

TEST(getting_on_is_patient) {
  IoRequest r = request(kRead, false, 1 << 20, 1 << 20);
  Status status;
  for (int i = 0; i + 1 < 1 << 20; ++i) {
    EXPECT(apply_result(r, -EAGAIN, status) == Progress::again);
    EXPECT(apply_result(r, 1, status) == Progress::again);
  }
  EXPECT(apply_result(r, 1, status) == Progress::finished);
  EXPECT(status.ok());
}

TEST(reads_before_writes) {
  IoQueue queue;
  const auto push = [&](IoRequest::Kind kind, uint64_t bytes) {
    queue.push(std::make_unique<IoRequest>(request(kind, false, bytes, bytes)));
  };
  EXPECT(queue.pop() == nullptr);
  push(kWrite, 1);
  push(kRead, 2);
  push(kRead, 3);
  EXPECT(queue.pop()->bytes == 2);
  EXPECT(queue.pop()->bytes == 3);
  EXPECT(queue.pop()->bytes == 1);
  EXPECT(queue.empty());
}

TEST_MAIN
