// status: how anything in the native core fails.
// A Status says what happened (code, errno), during which operation, to which path, at which byte.
// Functions return Status or Result<T>; only the API surface (jobs' waits, module.cpp) throws, as
// Failure. Translation to Python exceptions is module.cpp's alone.
#pragma once

#include <cerrno>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "check.h"

namespace statehold {

enum class Code : uint8_t {
  ok,
  io,         // the system refused: error is an errno
  missing,    // a file that must exist does not
  irregular,  // there is a link, a FIFO, a device or a directory where a file must be
  truncated,  // a file has another size than it must have; offset is where it ends
  mismatch,   // bytes differ from their checksum; see Mismatch
  closed,     // cancelled, or used after close
  invariant,  // we are wrong; operation holds the text of the CHECK
};

// One piece (a segment's part of one grid cell) whose checksum is not the recorded one.
struct Mismatch {
  uint64_t segment = 0;
  uint64_t piece = 0;  // counted inside the segment
  uint64_t begin = 0;  // file offsets
  uint64_t end = 0;
  uint64_t expected = 0;
  uint64_t got = 0;
};

struct [[nodiscard]] Status {
  Code code = Code::ok;
  int error = 0;
  std::string operation;
  std::string path;
  int64_t offset_bytes = -1;
  Mismatch mismatch;

  bool ok() const { return code == Code::ok; }

  static Status io(int error, std::string operation, std::string path, int64_t offset_bytes = -1) {
    return {Code::io, error, std::move(operation), std::move(path), offset_bytes, {}};
  }
  static Status missing(std::string operation, std::string path) {
    return {Code::missing, 0, std::move(operation), std::move(path), -1, {}};
  }
  static Status irregular(std::string operation, std::string path) {
    return {Code::irregular, 0, std::move(operation), std::move(path), -1, {}};
  }
  static Status truncated(std::string operation, std::string path, uint64_t ends_at_bytes) {
    return {Code::truncated,
            0,
            std::move(operation),
            std::move(path),
            static_cast<int64_t>(ends_at_bytes),
            {}};
  }
  static Status mismatched(std::string path, const Mismatch& mismatch) {
    return {Code::mismatch, 0, "verify", std::move(path), static_cast<int64_t>(mismatch.begin),
            mismatch};
  }
  // Needs no memory itself: the text fits into the string.
  static Status no_memory() noexcept { return io(ENOMEM, "get memory", {}); }
  static Status closed(std::string operation) {
    return {Code::closed, 0, std::move(operation), {}, -1, {}};
  }
  static Status invariant(std::string what) {
    return {Code::invariant, 0, std::move(what), {}, -1, {}};
  }
};

template <class T>
struct [[nodiscard]] Result {
  Status status;
  T value{};

  bool ok() const { return status.ok(); }
};

// What the API surface throws.
class Failure : public std::exception {
 public:
  explicit Failure(Status what) : status(std::move(what)) {}
  const char* what() const noexcept override { return status.operation.c_str(); }

  Status status;
};

inline void must(Status status) {
  if (!status.ok()) throw Failure(std::move(status));
}

template <class T>
T must(Result<T> result) {
  must(std::move(result.status));
  return std::move(result.value);
}

// Of the exception that is being handled.
inline Status status_of_exception() noexcept {
  try {
    try {
      throw;
    } catch (const Failure& failure) {
      return failure.status;
    } catch (const std::bad_alloc&) {
      return Status::no_memory();
    } catch (const std::exception& error) {  // CheckFailed
      return Status::invariant(error.what());
    } catch (...) {
      return Status::invariant("an exception of no known kind");
    }
  } catch (...) {  // no memory for the text
    return Status::no_memory();
  }
}

// Runs `body` at a thread's entry: what it throws becomes a Status, so that no thread dies of it.
template <class Body>
Status guarded(Body&& body) noexcept {
  try {
    body();
    return {};
  } catch (...) {
    return status_of_exception();
  }
}

// A copy, or the error of having no memory for one.
inline Status copy_of(const Status& status) noexcept {
  try {
    return status;
  } catch (...) {
    return Status::no_memory();
  }
}

}  // namespace statehold
